"""`train.py` as users run it: complete processes on a small text."""

import gzip
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from lines import lines, values
from orbax.checkpoint import v1 as ocp

from jaxstack import data
from jaxstack.checkpoint import manifest
from jaxstack.common.errors import Exit
from jaxstack.common.tree import flatten
from jaxstack.config import DataConfig
from jaxstack.data import ngram

ROOT = Path(__file__).parent.parent

SMALL = [
    f"--config={ROOT / 'configs' / 'quickstart.yaml'}",
    "--model.num_layers=2",
    "--model.d_model=32",
    "--model.d_ff=64",
    "--data.source=path",
    "--data.seq_len=32",
    "--data.batch_size=4",
    "--train.steps=12",
    "--train.eval_every=4",
    "--train.eval_steps=2",
    "--train.ngram_baseline=false",
    "--run.log_every=1",
    "--checkpoint.every=4",
    "--sample.tokens=8",
]


PLAIN = ["--optim.name=sgd", "--sample.prompts=[]"]
"""Where neither optimizer nor samples matter, whose compilation takes long. Such a run is compiled as tests are."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(p.read_text() for p in sorted((ROOT / "jaxstack").rglob("*.py"))))
    return path


def environment() -> dict[str, str]:
    """Returns the environment of the machine, without what conftest.py sets for the process of the tests."""
    return {k: v for k, v in os.environ.items() if k not in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")}


def start(*argv: str, **env: str) -> subprocess.Popen[str]:
    if set(PLAIN) <= set(argv):
        env = {"XLA_FLAGS": os.environ["XLA_FLAGS"], **env}
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment() | env,
    )


def run(*argv: str, code: int = 0, **env: str) -> tuple[str, str]:
    process = start(*argv, **env)
    try:
        out, err = process.communicate()
    finally:
        process.kill()  # where the test's time limit ended the wait
    assert process.returncode == code, out + err
    return out, err


@pytest.fixture(scope="module")
def straight(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    out, _ = run(*SMALL, f"--data.path={text}", f"--run.dir={run_dir}")
    return run_dir, out


def test_a_run_directory_holds_what_it_should(straight, text):
    run_dir, out = straight
    names = {path.name for path in run_dir.iterdir()}
    assert names == {
        ".lock",
        "config.yaml",
        "tokenizer.json",
        "metrics.jsonl",
        "checkpoints",
        "loss.png",
        "samples.txt",
    }
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["12", "8"]
    steps = [line for line in lines(run_dir) if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    contract = {"step", "loss", "grad_norm", "lr", "tokens_per_s", "mfu", "step_time_s", "data_wait_s"}
    assert all(contract <= set(line) for line in steps)
    assert all(line["mfu"] is None for line in steps), "no peak is known for a CPU"
    assert [line["step"] for line in lines(run_dir) if "eval_loss" in line] == [4, 8, 12]
    assert abs(steps[0]["loss"] - math.log(256)) < 0.1, "an untrained model predicts all bytes alike"
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert (run_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    shown = out[out.index("--- sample 1 of 3") :].splitlines()
    assert [line for line in shown if line.startswith("--- ")] == [f"--- sample {i} of 3" for i in (1, 2, 3)]
    held_out = text.read_text()[-text.stat().st_size // 10 :]
    rows = [line for line in held_out.splitlines() if line.strip()]  # indented or not
    cut = [row if len(row) <= 60 else row[:61].rpartition(" ")[0].rstrip() for row in rows]  # after a word
    prompts = {row[:32] for row in cut if row}  # of 32 bytes at most
    assert any(shown[1].startswith(prompt) for prompt in prompts)
    for word in ("device", "parameters", "first step done", "held-out loss", "12 of 12"):
        assert word in out
    (warning,) = [line for line in out.splitlines() if line.startswith("optim.warmup_steps=50 takes all of")]
    assert "to 0.00168 of optim.lr=0.007" in warning


@pytest.mark.slow
def test_interrupted_equals_straight_bit_for_bit(straight, text, tmp_path):
    """A run that is killed after a checkpoint and started again has equal losses, parameters and optimizer state."""
    run_dir = tmp_path / "run"
    argv = [*SMALL, f"--data.path={text}", f"--run.dir={run_dir}"]
    process = start(*argv)
    while not (run_dir / "checkpoints" / "4" / manifest.NAME).is_file() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    out, _ = run(*argv)
    assert "resumed from step " in out
    # A resumed run names the keys that changed. Here only the directory differs, which does not count.
    assert "changed" not in out
    assert values(run_dir) == values(straight[0])
    for a, b in zip(*(arrays(d / "checkpoints" / "12") for d in (run_dir, straight[0])), strict=True):
        assert a[0] == b[0]
        assert np.array_equal(a[1], b[1]), a[0]


def arrays(checkpoint: Path) -> list[tuple[str, np.ndarray]]:
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    saved = ocp.metadata(checkpoint).metadata
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one), saved)
    state = ocp.load(checkpoint, abstract)
    return [(path, np.asarray(leaf)) for path, leaf in flatten(state).items()]


def test_a_finished_run_is_not_trained_again(straight, text):
    run_dir, _ = straight
    before = values(run_dir)
    out, _ = run(*SMALL, f"--data.path={text}", f"--run.dir={run_dir}")
    assert "resumed from step 12" in out
    assert "compiling" not in out
    assert values(run_dir) == before


@pytest.mark.matrix
def test_a_run_can_be_prolonged_and_says_what_changed(straight, text, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(straight[0], run_dir)
    out, _ = run(*SMALL, f"--data.path={text}", f"--run.dir={run_dir}", "--train.steps=14", "--optim.lr=1e-4")
    assert "changed  train.steps was 12, is now 14" in out
    assert "changed  optim.lr was 0.007, is now 0.0001" in out
    assert [line["step"] for line in lines(run_dir) if "loss" in line] == list(range(1, 15))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model.d_model=64"], ["model.d_model=64", "model.d_model=32"]),
        (["--model.num_heads=8"], ["model.num_heads=8"]),
        (["--model.qk_norm=false"], ["model.qk_norm=False"]),
        (["--optim.name=lion"], ["optim.name=lion", "optim.name=muon"]),
        (["--train.steps=10"], ["train.steps=10", "12 steps already"]),
        (["--run.resume=false"], ["run.resume=false", "checkpoints"]),
    ],
)
def test_what_does_not_fit_the_checkpoint_is_refused_and_nothing_is_written(flags, words, straight, text):
    run_dir, _ = straight
    before = {p: p.read_bytes() for p in run_dir.rglob("*") if p.is_file()}
    _, err = run(*SMALL, f"--data.path={text}", f"--run.dir={run_dir}", *flags, code=2)
    assert err.count("\n") <= 2
    for word in words:
        assert word in err
    assert {p: p.read_bytes() for p in run_dir.rglob("*") if p.is_file()} == before


def test_a_checkpoint_of_another_shape_is_refused_by_its_arrays(straight, text, tmp_path):
    """The arrays themselves are compared, so an edited config.yaml does not help."""
    run_dir = tmp_path / "run"
    shutil.copytree(straight[0], run_dir)
    saved = run_dir / "config.yaml"
    saved.write_text(saved.read_text().replace("d_ff: 64", "d_ff: 96"))
    before = {p: p.read_bytes() for p in run_dir.rglob("*") if p.is_file()}
    _, err = run(*SMALL, f"--data.path={text}", f"--run.dir={run_dir}", "--model.d_ff=96", code=2)
    assert "params/layers/mlp/w_down" in err
    assert "config.yaml" in err
    assert {p: p.read_bytes() for p in run_dir.rglob("*") if p.is_file()} == before


def test_a_folder_of_texts_is_not_a_run(text):
    """The user has named the folder of the texts instead of a new one: one line, before anything is written."""
    before = {p: p.read_bytes() for p in text.parent.rglob("*")}
    _, err = run(*SMALL, f"--data.path={text}", f"--run.dir={text.parent}", code=2)
    assert err.count("\n") <= 2
    assert "is not a run (it has no config.yaml) and is not empty" in err
    assert {p: p.read_bytes() for p in text.parent.rglob("*")} == before


@pytest.mark.matrix
def test_a_tokenizer_of_other_text_is_refused(tmp_path):
    """A tokenizer with as many characters, but different ones, fits the shapes but not their meaning."""
    small = [flag for flag in SMALL if not flag.startswith("--train.steps")]
    argv = [*small, "--data.tokenizer=chars", f"--run.dir={tmp_path / 'run'}", "--train.steps=1", *PLAIN]
    for name, letters in (("a", "abc\n"), ("b", "xyz\n")):
        (tmp_path / name).write_text(letters * 400)
    run(*argv, f"--data.path={tmp_path / 'a'}")
    _, err = run(*argv, f"--data.path={tmp_path / 'b'}", code=2)
    assert "tokenizer.json" in err


def test_steps_that_are_not_finite_stop_the_run_and_name_the_batch(text, tmp_path):
    """A learning rate breaks the model in step 1. All later steps are skipped; the third in a row ends the run."""
    flags = ["--optim.name=sgd", "--optim.lr=1e30", "--optim.clip_norm=null", "--optim.warmup_steps=0"]
    _, err = run(
        *SMALL,
        f"--data.path={text}",
        f"--run.dir={tmp_path / 'run'}",
        *flags,
        "--train.max_bad_steps=3",
        "--run.log_every=10",
        code=Exit.DIVERGED,
    )
    last = " ".join(err.splitlines()[-2:])
    assert "stopped at step 4" in last
    assert "text.txt tokens" in last
    recorded = lines(tmp_path / "run")  # none of these steps is a tenth
    assert [(line["step"], line["event"], line["skipped"]) for line in recorded] == [
        (step, "skipped", step - 1) for step in (2, 3, 4)
    ]
    assert all(None in (line["loss"], line["grad_norm"]) and "text.txt tokens" in line["batch"] for line in recorded)


@pytest.mark.slow
def test_accumulation_on_the_command_line(text, straight, tmp_path):
    """The same batches in two microbatches have the same losses, up to the order of float32 sums."""
    run_dir = tmp_path / "run"
    run(*SMALL, f"--data.path={text}", f"--run.dir={run_dir}", "--train.grad_accum=2")
    a, b = ([line["loss"] for line in lines(d) if "loss" in line] for d in (run_dir, straight[0]))
    # Differences of 1e-7 grow over 12 steps of Muon; the first steps show the equality.
    np.testing.assert_allclose(a[:4], b[:4], rtol=1e-5)
    np.testing.assert_allclose(a, b, rtol=5e-3)


@pytest.mark.matrix
def test_hundreds_of_held_out_batches(text, tmp_path):
    """If evaluations ran concurrently, their collectives would deadlock on two CPU devices."""
    flags = ["--train.eval_steps=400", "--train.steps=2", "--data.eval_fraction=0.5", "--data.seq_len=16", *PLAIN]
    run(*SMALL, f"--data.path={text}", f"--run.dir={tmp_path / 'run'}", *flags)
    assert [line["step"] for line in lines(tmp_path / "run") if "eval_loss" in line] == [2]


@pytest.mark.matrix
def test_the_environment_of_the_user_wins(text, tmp_path):
    """If the user asks for one device, one is used, although `train.py` would create one per core."""
    argv = [*SMALL, f"--data.path={text}", f"--run.dir={tmp_path / 'run'}", "--train.steps=1", *PLAIN]
    out, _ = run(*argv, JAX_NUM_CPU_DEVICES="1")
    assert "device   1 x" in out


@pytest.mark.matrix
def test_a_dense_run_is_up_cycled_on_another_mesh(straight, text, tmp_path):
    """With a learning rate of zero, the held-out loss with experts is that of the dense run, since every expert is its
    MLP."""
    run_dir, argv = tmp_path / "run", [*SMALL, f"--data.path={text}", f"--run.init_from={straight[0]}"]
    experts = ["--model.moe={num_experts: 4}", "--mesh.expert=2", "--mesh.tensor=2", "--mesh.data=1"]
    out, _ = run(*argv, *experts, f"--run.dir={run_dir}", "--optim.lr=0", "--train.steps=4")
    assert f"starting with the parameters of {straight[0]}" in out
    assert "4 x cpu" in out
    dense, grown = (
        [line["eval_loss"] for line in lines(run) if "eval_loss" in line][-1] for run in (straight[0], run_dir)
    )
    assert abs(grown - dense) < 1e-5 * dense
    routed = [line for line in lines(run_dir) if "loss" in line]
    assert all(1 <= line["moe_load_max_over_mean"] <= 4 and line["moe_dropped_fraction"] == 0 for line in routed)
    _, err = run(*argv, "--model.d_ff=128", f"--run.dir={tmp_path / 'other'}", code=2)
    assert "has another model" in err


def test_a_missing_source_of_parameters_is_found_before_anything_is_compiled(text, tmp_path):
    out, err = run(*SMALL, f"--data.path={text}", "--run.init_from=nowhere", f"--run.dir={tmp_path / 'run'}", code=2)
    assert "run.init_from=nowhere is not a folder of a run" in err
    assert not out


def test_shardings_are_printed_and_nothing_is_written(text, tmp_path):
    argv = [*SMALL, f"--data.path={text}", f"--run.dir={tmp_path / 'run'}", "--print_shardings", "--mesh.data=1"]
    out, _ = run(*argv, "--mesh.fsdp=2", "--mesh.tensor=2")
    row = next(line for line in out.splitlines() if line.startswith("layers/mlp/w_down"))
    # Two layers of 64 x 32 numbers of four bytes, in four parts.
    assert row.split() == ["layers/mlp/w_down", "2", "x", "64", "x", "32", "layers,", "mlp,", "embed",
                           "-,", "tensor,", "fsdp", "4,096"]  # fmt: skip
    assert "replicated" in out.splitlines()[-2]
    assert out.splitlines()[-1].startswith("optimizer state: total")
    assert not (tmp_path / "run").exists()


@pytest.mark.matrix
def test_some_steps_are_traced(text, tmp_path):
    """The trace is in the run's directory, and a line names it. No step includes the profiler's own seconds."""
    run_dir = tmp_path / "run"
    argv = [*SMALL, f"--data.path={text}", f"--run.dir={run_dir}", "--train.steps=6", "--profile.steps=3:4", *PLAIN]
    out, _ = run(*argv)
    (line,) = [line for line in out.splitlines() if line.startswith("profile")]
    assert f"steps 3 to 4 are in {run_dir}/profile/" in line
    for kind in ("xplane.pb", "trace.json.gz"):
        (trace,) = (run_dir / "profile").rglob(f"*.{kind}")
        assert trace.stat().st_size > 1000
    # Python's and XLA's events are there, and of steps those that were named.
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert {e["args"]["step_num"] for e in events if e.get("name") == "train"} == {"3", "4"}
    spent = [line["seconds"] for line in lines(run_dir) if "seconds" in line]
    timed = {line["step"]: line for line in lines(run_dir) if "loss" in line}
    own = sum(seconds.get("profile", 0) for seconds in spent)
    assert own > 0
    assert sum(line["step_time_s"] or 0 for line in timed.values()) < sum(sum(s.values()) for s in spent) - own
    # Steps before the resumed one cannot be traced, and the run says so.
    shutil.rmtree(run_dir / "checkpoints" / "6")
    out, _ = run(*argv, "--profile.steps=1:2")
    assert "profile  steps 1 to 2 were done before" in out


@pytest.mark.matrix
def test_bits_per_byte_of_a_token_file_are_those_of_its_bytes(text, tmp_path):
    """The file's own tokenizer counts, while `data.tokenizer` keeps its default. The n-grams are of bytes."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra [hf]")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    content = text.read_text().encode("ascii", "ignore").decode()  # so that a window cuts no character
    made.train_from_iterator([content], tokenizers.trainers.BpeTrainer(vocab_size=512, initial_alphabet=alphabet))
    made.save(str(tmp_path / "tokenizer.json"))
    saved = data.make_tokenizer(str(tmp_path / "tokenizer.json"), [])
    data.write_token_file(tmp_path / "text.bin", [data.Document("text", content)], saved)
    flags = ["--data.source=tokens", f"--data.path={tmp_path / 'text.bin'}", "--train.steps=2", *PLAIN]
    out, _ = run(*SMALL, *flags, f"--run.dir={tmp_path / 'run'}", "--train.ngram_baseline=true")
    cfg = DataConfig(source="tokens", path=str(tmp_path / "text.bin"))
    found, sizes = data.load(cfg), {"seq_len": 32, "batch_size": 4, "packing": False}
    held_out = [*data.eval_batches(found.eval, steps=2, **sizes)]
    train = data.batches(found.train, seed=0, **sizes)
    first = [train[0], train[1]]
    texts = [[made.decode(row).encode() for b in some for row in complete(b)] for some in (first, held_out)]
    skipped = [len(made.decode(row[:1]).encode()) for b in held_out for row in complete(b)]
    size = sum(map(len, texts[1])) - sum(skipped)
    (evaluation,) = (line for line in lines(tmp_path / "run") if "eval_loss" in line)
    (ngrams,) = (line for line in lines(tmp_path / "run") if "ngram_order" in line)
    bits = evaluation["eval_loss"] * 2 * 4 * 32 / math.log(2) / size
    assert evaluation["eval_bits_per_byte"] == pytest.approx(bits, rel=1e-6)
    assert bits < 6 < evaluation["eval_loss"] / math.log(2), "a token is several bytes"
    *_, p = ngram.probabilities(*texts, ngrams["ngram_order"])
    scored = np.concatenate([np.arange(len(t)) >= n for t, n in zip(texts[1], skipped, strict=True)])
    assert ngrams["ngram_bits_per_byte"] == pytest.approx(-np.log2(p[scored]).mean(), rel=1e-12)
    assert (
        f"{ngrams['ngram_bits_per_byte']:.3f} bits per byte, fitted on the same {ngrams['ngram_train_bytes']:,} bytes"
        in out
    )
    assert f"held out, this model      {bits:.3f} bits per byte" in out


def complete(batch: data.Batch) -> list[list[int]]:
    """Returns the S + 1 tokens of each row."""
    return np.concatenate([batch["tokens"], batch["targets"][:, -1:]], axis=1).tolist()


@pytest.mark.matrix
def test_batches_of_one(tmp_path):
    """The run trains a tiny text in batches of one sequence."""
    (tmp_path / "text").write_text("abc def ghi\n" * 40)
    one = ["--data.batch_size=1", "--train.steps=2", "--train.eval_every=2", "--mesh.data=1", *PLAIN]
    run(*SMALL, f"--data.path={tmp_path / 'text'}", f"--run.dir={tmp_path / 'run'}", *one)
    assert [line["step"] for line in lines(tmp_path / "run") if "loss" in line] == [1, 2]
