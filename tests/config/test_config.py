"""Configurations: every file builds, every mistake is one line that names the key and the fix."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import yaml

from jaxstack import families
from jaxstack.cli import parser
from jaxstack.common import errors
from jaxstack.config import Config, ConfigError, DataConfig, MeshConfig, ModelConfig, flat, resolve
from jaxstack.config.reading import key_help, parse, suggestions
from jaxstack.families.context import make_context
from jaxstack.models import params
from jaxstack.models.batches import abstract_batch
from jaxstack.runtime import platform
from jaxstack.sharding import make_mesh
from jaxstack.training import assemble
from jaxstack.training.state import Recipe, abstract_state

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
QUICKSTART = ROOT / "configs" / "quickstart.yaml"

PARAMETERS = {  # published counts, embeddings counted once
    "gpt2": 124_475_904,  # 124,439,808 with 50,257 rows of vocabulary, 47 fewer
    "llama3_8b": 8_030_261_248,
    "qwen2.5_0.5b": 494_032_768,
    "qwen3_0.6b": 596_049_920,
    "gemma2_2b": 2_614_341_888,
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_30b_a3b": 30_532_122_624,
    "olmo2_7b": 7_298_617_344,
    "pythia_160m": 162_322_944,
    "gptj_6b": 6_050_882_784,
    "smollm3_3b": 3_075_098_624,
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v3": 671_026_419_200,  # 671,026,404,352 and the biases of 58 routers
    "dots1": 142_774_381_696,
    "qwen3_next_80b_a3b": 79_674_391_296,  # of the class in `transformers`; its authors say 80 billion
    "mamba_codestral_7b": 7_285_403_648,
    "granite4_h_small": 32_207_337_984,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
}


def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *argv: str) -> str:
    """Returns what `train.py` says of a mistake: two lines on stderr at most, before JAX starts, and exit code 2."""
    monkeypatch.setattr(platform, "configure", lambda *args: pytest.fail("the next call would start JAX"))
    with pytest.raises(SystemExit) as end:
        parser.run("train.py", ["train", *argv])
    assert end.value.code == errors.Exit.USER_ERROR
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("train.py: error: ")
    assert err.count("\n") <= 2, err
    return err


def image_of(cfg):
    """The size of the pictures that a configuration reads."""
    return (16, 16, 3) if cfg.data.path == "drawn:digits" else (8, 8, 1)


@pytest.mark.matrix(quick=["[quickstart]", "moe_quickstart", "encoder_quickstart"])
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_builds_abstractly(path):
    read = parse.parse_config([f"--config={path}"], QUICKSTART)
    cfg = resolve(read, 256, image_of(read))
    mesh = make_mesh(cfg.mesh, cfg.data.batch_size // cfg.train.grad_accum, jax.devices()[:1])
    ctx = make_context(cfg, mesh)
    state = abstract_state(Recipe.of(cfg), ctx)
    batch = abstract_batch(families.batch_spec(cfg.model, cfg.data), ctx.layout.sharding(ctx.layout.batch))
    new, metrics = jax.eval_shape(assemble.make_train_step(cfg, ctx), state, batch)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), new) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert metrics["loss"].shape == ()
    if path.stem in PARAMETERS:
        assert params.count(families.spec(cfg.model)) == PARAMETERS[path.stem]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_resolved_config_reads_back_unchanged(path, tmp_path):
    read = parse.parse_config([f"--config={path}", "--optim.lr=1e-5"], QUICKSTART)
    cfg = resolve(read, 256, image_of(read))
    (tmp_path / "config.yaml").write_text(parse.to_yaml(cfg))
    assert parse.parse_config([f"--config={tmp_path / 'config.yaml'}"], QUICKSTART) == cfg
    assert cfg.optim.lr == 1e-5


def test_flags_override_files_wherever_they_stand():
    before = parse.parse_config(["--model.num_layers=3", "--config", str(QUICKSTART)], QUICKSTART)
    after = parse.parse_config(["--config", str(QUICKSTART), "--model.num_layers=3"], QUICKSTART)
    assert before == after
    assert before.model.num_layers == 3


def test_help_comes_before_anything_slow_is_imported():
    """benchmarks/start.py takes the time."""
    code = (
        "import runpy, sys\nsys.argv = ['train.py', '--help']\n"
        "try: runpy.run_path('train.py', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "slow = {'jax', 'jaxlib', 'flax', 'grain', 'matplotlib', 'optax', 'orbax', 'rich'} & {*sys.modules}\n"
        "assert not slow, slow"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "  --model.num_layers=4            Number of transformer blocks.\n" in done.stdout


def helped(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Returns what a command line prints that asks for help."""
    with pytest.raises(SystemExit) as end:
        parser.execute([*argv])
    assert not end.value.code
    return capsys.readouterr().out


def test_help_is_short_and_shows_the_configuration_that_would_run(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = helped(capsys, "train", "--help")
    assert text.count("\n") <= 60
    assert max(map(len, text.splitlines())) <= 80
    assert "the values of quickstart:" in text
    values = flat(parse.parse_config([]))
    lines = dict(
        line.strip().split()[0].split("=") for line in text.splitlines() if line.startswith("  --") and "=" in line
    )
    assert set(lines) == {f"--{group}.{key}" for group, keys in key_help.COMMON.items() for key in keys}
    for flag, shown in lines.items():
        assert yaml.safe_load(shown) == values[flag[2:]], flag
    assert tuple(key_help.COMMON) == parse.GROUPS
    for argv in (["--model.num_layers=77", "--help"], ["-h", "--model.num_layers", "77"]):
        text = helped(capsys, "train", "--config", "gpt2", *argv)
        assert "the values of gpt2 and the flags given:" in text
        assert "--model.num_layers=77 " in text
        assert "--model.d_model=768 " in text
    assert "--optim.lr=0.001" in helped(capsys, "import", "--help"), "which begins with the defaults"
    for name in parser.COMMANDS:
        assert helped(capsys, *name.split(), "--help").count("\n") <= 75, name


def test_help_of_a_topic_has_all_of_it(capsys):
    text = helped(capsys, "train", "--help.model")
    everything = helped(capsys, "help", "all")
    for key, value in flat(parse.parse_config([])).items():
        line = f"  --{key}={key_help.shown(value)}\n"
        assert (line in text) == key.startswith("model."), key
        assert line in everything
    expected = "  --optim.lr=0.007\n      Peak learning rate. (a number >= 0; default 0.001)\n"
    for words in (["--help=optim.lr"], ["--help", "optim.lr"]):
        assert helped(capsys, "train", *words) == expected
    for words in (["optim.lr"], ["learning_rate"], ["lr"]):
        assert helped(capsys, "help", *words) == expected
    assert helped(capsys, "generate", "--help.sample.top_p").startswith("  --sample.top_p=null\n")
    assert helped(capsys, "help", "top_k").count("\n  --") == 1, "both keys of this name"
    assert helped(capsys, "help", "model.moe", "--config=mixtral_8x7b").startswith("model.moe: ")
    assert helped(capsys, "help", "plan", "roofline") == helped(capsys, "plan", "roofline", "--help")
    for words in (["help"], ["help", "--help"]):
        parser.execute(words)
        assert capsys.readouterr().out == parser.overview([]) + "\n"
    with pytest.raises(ConfigError, match=r"unknown key modle\. Did you mean model\?"):
        parser.execute(["help", "modle"])
    with pytest.raises(ConfigError, match=r"model.num_layers=x is not valid"):
        parser.execute(["train", "--model.num_layers=x", "--help"])


MISTAKES = {
    "unknown key": (["--model.num_layer=3"], ["model.num_layer", "Did you mean model.num_layers?"]),
    "unknown group": (["--modl.num_layers=3"], ["modl.num_layers", "Did you mean"]),
    "wrong type": (["--model.num_layers=three"], ["model.num_layers", "int", "three"]),
    "abbreviation": (["--model.num_l=3"], ["model.num_l"]),
    "wrong choice": (["--optim.name=adam"], ["optim.name", "adamw", "adam"]),
    "heads": (["--model.num_heads=7"], ["model.num_heads=7", "model.d_model=128"]),
    "kv heads": (["--model.num_kv_heads=3"], ["model.num_kv_heads=3", "model.num_heads=4"]),
    "odd head": (["--model.head_dim=63"], ["model.head_dim=63", "even"]),
    "windows": (["--model.windows=[8,8,8]"], ["model.windows=[8, 8, 8]", "model.num_layers=4"]),
    "negative steps": (["--train.steps=-1"], ["train.steps=-1", "1 or more"]),
    "accumulation": (["--train.grad_accum=3"], ["train.grad_accum=3", "data.batch_size=8"]),
    "mesh and batch": (["--mesh.data=3"], ["mesh.data=3", "8"]),
    "top k": (["--model.moe.num_experts=4", "--model.moe.top_k=5"], ["model.moe.top_k=5", "num_experts=4"]),
    "groups": (
        ["--model.moe={num_experts: 8, router: sigmoid, num_groups: 3}"],
        ["model.moe.num_groups=3", "num_experts=8"],
    ),
    "mesh and experts": (
        ["--model.moe.num_experts=6", "--mesh.expert=4", "--mesh.data=1"],
        ["mesh.expert=4", "model.moe.num_experts=6"],
    ),
    "capacity and context": (
        ["--model.moe={num_experts: 8, capacity_factor: 1.0}", "--mesh.context=2"],
        ["model.moe.capacity_factor=1.0", "mesh.context=2"],
    ),
    "capacity and a hard gate": (
        ["--model.moe={num_experts: 2, router: domain, capacity_factor: 1.25}", "--data.domains=[a, b]"],
        ["model.moe.capacity_factor=1.25", "model.moe.router=domain", "capacity_factor=null"],
    ),
    "domains": (["--model.moe={num_experts: 2, router: domain}"], ["data.domains", "2 experts"]),
    "chunks": (["--pipeline.chunks=2"], ["pipeline.chunks=2", "pipeline.schedule=interleaved_1f1b"]),
    "mesh and width": (
        [
            "--mesh.fsdp=4",
            "--mesh.expert=2",
            "--mesh.data=1",
            "--model.d_model=36",
            "--model.num_heads=3",
            "--model.moe.num_experts=4",
        ],
        ["mesh.fsdp=4 x mesh.expert=2", "model.d_model=36", "Make the product 4", "a multiple of 8"],
    ),
    "two open axes": (["--mesh.fsdp=-1"], ["mesh.data=-1 and mesh.fsdp=-1", "only one"]),
    "mesh and heads": (["--mesh.tensor=3"], ["mesh.tensor=3", "model.num_heads=4"]),
    "mesh and sequence": (["--mesh.context=5"], ["data.seq_len=", "5", "multiple of 10"]),
    "no mesh at all": (["--mesh.tensor=0"], ["mesh.tensor=0", "positive"]),
    "dropout": (["--model.dropout=1.0"], ["model.dropout=1.0", "[0, 1)"]),
    "no such config": (["--config=nowhere.yaml"], ["nowhere.yaml"]),
    "no path": (["--data.source=path"], ["data.path", "--data.path="]),
    "path without source": (["--data.path=my.txt"], ["data.path=my.txt", "--data.source=path", "--data.source=tokens"]),
    "no such text": (["--data.source=path", "--data.path=nowhere.txt"], ["nowhere.txt"]),
    "small vocabulary": (["--model.vocab_size=100"], ["model.vocab_size=100", "256"]),
    "scaling": (["--model.rope_scaling.factor=0.5"], ["factor", "0.5"]),
    "group as value": (["--model=3"], ["--model=3 is not a group of keys", "--model.family=VALUE"]),
    "inner group as value": (["--model.moe=8"], ["--model.moe=8 is not a group", "--model.moe.num_experts=VALUE"]),
    "mesh as value": (["--mesh=8"], ["--mesh=8 is not a group of keys", "--mesh.data=VALUE", "--mesh=auto"]),
    "group without keys": (["--mesh={}", "--model={num_layers: }"], ["model.num_layers"]),
    "key twice": (["--model.moe={top_k: 1, top_k: 2}"], ["model.moe.top_k occurs twice"]),
    "empty word": ([""], ["unknown argument ''. Remove it."]),
    "dashes alone": (["--", "x"], ["unknown argument --. Remove it."]),
    "group without a value": (["--mesh", "--model.num_layers=3"], ["--mesh has no value"]),
    "group with an empty value": (["--mesh="], ["--mesh= is not a group of keys"]),
    "no dashes": (["model.num_layers=8"], ["model.num_layers=8 is not a flag. Write --model.num_layers=8."]),
    "switch without dashes": (["print_config"], ["print_config is not a flag. Write --print_config."]),
    "one dash": (["-model.num_layers=8"], ["-model.num_layers=8 is not a flag. Write --model.num_layers=8."]),
    "hyphens": (["--model.num-layers", "8"], ["--model.num-layers is not a flag. Write --model.num_layers=8."]),
    "spaces": (["--model.num_layers", "=", "8"], ["Write --model.num_layers=VALUE, without spaces"]),
    "no group": (["--num_layers=8"], ["unknown key num_layers. Did you mean model.num_layers?"]),
    "several groups": (["--top_k=8"], ["Did you mean model.moe.top_k or sample.top_k?"]),
    "part of a name": (["--model.layers=8"], ["Did you mean model.num_layers or "]),
    "another tool's key": (["--max_steps", "8"], ["max_steps (Hugging Face, Lightning). Use --train.steps=8."]),
    "another tool's unit": (
        ["--per_device_train_batch_size=8"],
        ["Use --data.batch_size=VALUE. It counts the sequences of an optimizer step: sequences per device x devices x"],
    ),
    "another tool's flag": (["--bf16"], ["Use --train.dtype=bfloat16."]),
    "another tool's word for a second key": (["--eval_steps=8"], ["--train.eval_every=8 or --train.eval_steps=VALUE"]),
    "switch with a value": (["--print_shardings=true"], ["--print_shardings takes no value"]),
    "number with a point": (["--train.steps=1e3"], ["Use an integer >= 1, such as 1000."]),
    "home of nobody": (["--config=~nobody_here/x"], ["--config=~nobody_here/x is not a file"]),
    "near a config": (["--config=quikstart"], ["Did you mean --config quickstart?"]),
    "near a config, without the flag": (["llama3-8b"], ["Did you mean --config llama3_8b?"]),
    "file as argument": (["my.yaml"], ["Did you mean --config my.yaml?"]),
    "print_config checks keys": (["--print_config", "--model.num_heads=7"], ["model.num_heads=7"]),
    "print_config checks the vocabulary": (
        ["--print_config", "--model.vocab_size=257", "--model.pad_vocab_to=256"],
        ["model.pad_vocab_to=256", "257"],
    ),
    "profile": (["--profile.steps=5"], ["profile.steps=5", "10:15"]),
    "profile backwards": (["--profile.steps=5:3"], ["profile.steps=5:3", "10:15"]),
    "profile past the end": (["--profile.steps=5:9999"], ["profile.steps=5:9999", "train.steps"]),
    "stray word": (["quickstart"], ["quickstart"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_two_lines_and_exit_code_2(name, tmp_path, capsys, monkeypatch):
    argv, words = MISTAKES[name]
    said = refused(capsys, monkeypatch, *argv, f"--run.dir={tmp_path / 'run'}").replace("\n", " ")
    for word in words:
        assert word in said
    assert not (tmp_path / "run").exists()


def test_a_process_ends_by_the_same_lines_and_code(capsys, monkeypatch):
    argv, _ = MISTAKES["unknown key"]
    command = [sys.executable, str(ROOT / "train.py"), *argv]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", refused(capsys, monkeypatch, *argv))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model:\n  num_layer: 4\n", ["model.num_layer", "Did you mean model.num_layers?"]),
        ("modl:\n  num_layers: 4\n", ["modl.num_layers"]),
        ("profile:\n  steps: 10:15\n", ["profile.steps=10:15 as the number 615", 'Put it in quotes: "10:15".']),
        ("model: 3\n", ["line 1: model=3 is not a group of keys"]),
        ("model: {moe: 8}\n", ["line 1: model.moe=8 is not a group of keys"]),
        ("model:\n", ["line 1: model is a group of keys, but it is empty"]),
        ("mesh: [8]\n", ["line 1: mesh is a group of keys, but its value is a list"]),
        ("", ["is empty. Write groups of keys"]),
        ("# nothing\n", ["is empty"]),
        ("- model\n", ["does not contain keys"]),
        ("1: 2\n", ["line 1: 1 is not the name of a key"]),
        ("run: {seed: 1}\nrun: {seed: 2}\n", ["line 2: the key run occurs twice"]),
        ("run:\n  seed: 1\n  seed: 2\n", ["line 3: the key run.seed occurs twice"]),
        ("run: {seed: 1}\nrun.seed: 2\n", ["line 2: the key run.seed occurs twice"]),
        ("model:\n\tnum_layers: 3\n", ["line 2 has a tab", "Use spaces."]),
        ("run: {seed: 1}\n---\nrun: {seed: 2}\n", ["line 2 is not YAML"]),
        ("config: quickstart\n", ["Write --config on the command line."]),
        (
            'run:\n  resume: "yes"\n',
            ["line 2: run.resume='yes' is text", "Write it without quotes, such as resume: true."],
        ),
        ("run: {resume: 'off'}\n", ["such as resume: false."]),
        ("train: {steps: '5'}\n", ["takes an integer >= 1", "such as steps: 5."]),
        ("model: {d_ff: '5'}\n", ["takes an integer >= 1 or null"]),
        ("model: {windows: ['5']}\n", ["model.windows='5' is text"]),
        ("train: {steps: 010}\n", ["YAML reads train.steps=010 as 8"]),
        ("run: {dir: yes}\n", ["YAML reads run.dir=yes as true", 'Put it in quotes: "yes".']),
        ("run: {dir: 5}\n", ["as the number 5", 'Put it in quotes: "5".']),
        ("data: {mixture: [{path: a, path: b}]}\n", ["data.mixture has the key path twice"]),
        ("data: {mixture: [{path: a, weight: '1'}]}\n", ["data.mixture.weight='1' is text in quotes"]),
        ("data: {mixture: [3]}\n", ["data.mixture=3 is not valid. Use a list of mappings with source, path"]),
        ("model: {num_layers=3}\n", ["line 1: num_layers=3 is not a key. Write num_layers: 3."]),
        ("model: {num-layers: 3}\n", ["Did you mean model.num_layers?"]),
        ("learning_rate: 1\n", ["unknown key learning_rate (nanoGPT, MaxText, Hugging Face). Use optim.lr."]),
        ("training: {global_batch_size: 8}\n", ["training.global_batch_size", "Use data.batch_size."]),
        ("model:\n  d_model: [\n", ["line 3"]),
        ("optim:\n  lr: !!python/object/apply:os.getcwd []\n", ["python/object"]),
    ],
)
def test_a_mistake_in_a_file_too(text, words, tmp_path, capsys, monkeypatch):
    (tmp_path / "wrong.yaml").write_text(text)
    said = refused(capsys, monkeypatch, f"--config={tmp_path / 'wrong.yaml'}").replace("\n", " ")
    for word in words:
        assert word in said


def test_a_suggestion_works_and_is_never_what_was_typed():
    names = parser.parser_of("train")._names()
    for flag in names.flags:
        last, hyphens = flag.rpartition(".")[2], flag.replace("_", "-")
        for word in (
            f"{flag}=1",
            f"-{flag}=1",
            f"--{hyphens}=1",
            f"--{last}=1",
            f"--x.{last}=1",
            f"--{flag}s",
            flag[:-1],
        ):
            if word.partition("=")[0].removeprefix("--") in names.flags and word.startswith("--"):
                continue  # nothing is wrong with it
            said = suggestions.unknown_argument(word, "", names)
            advice = re.search(r"(?:Did you mean|Write|Use) (.*?)(?:[.?]$|\. [A-Z])", said)
            for proposed in advice[1].split(" or ") if advice else ():
                assert proposed != word
                assert proposed.removeprefix("--").partition("=")[0] in names.flags, said


def test_yaml_reads_what_users_write(tmp_path):
    """Numbers with exponents are text for YAML 1.1; words such as `on` are booleans."""
    text = (
        "optim: {lr: 1e-3, eps: 1E-9}\nrun: {resume: off, dir: ~/runs/x}\ntrain: {steps: 1_000}\nmodel: {qk_norm: Yes}"
    )
    (tmp_path / "config.yaml").write_text(text)
    cfg = parse.parse_config([f"--config={tmp_path / 'config.yaml'}"])
    assert (cfg.optim.lr, cfg.optim.eps, cfg.run.resume, cfg.train.steps) == (1e-3, 1e-9, False, 1000)
    assert cfg.model.qk_norm


def test_a_tilde_is_the_home_directory(tmp_path, monkeypatch):
    """In every key and argument that is a path: shells expand it only at the beginning of a word."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my.yaml").write_text("run: {dir: ~/runs/x}")
    keys = ["run.dir", "run.init_from", "data.path", "data.tokenizer", "pipeline.partition"]
    flags = [f"--{key}=~/{key}" for key in keys]
    values = flat(parse.parse_config(["--config=~/my.yaml", *flags, "--data.source=path"]))
    assert [values[key] for key in keys] == [f"{tmp_path}/{key}" for key in keys]
    assert parse.parse_config(["--config=~/my.yaml"]).run.dir == f"{tmp_path}/runs/x"
    seen = set()
    for name in parser.COMMANDS:
        for action in parser.parser_of(name)._actions:
            if action.metavar in ("RUN", "DIR", "FILE", "OUT"):
                assert action.type is parse.user_path, f"{name} {action.dest}: paths need type=user_path"
                seen.add(f"{name} {action.dest}")
    assert parse.user_path("~/x") == f"{tmp_path}/x"
    assert {"generate run", "import folder", "import out", "report runs", "plan roofline json"} <= seen


def test_print_config_prints_the_checked_configuration(capsys):
    with pytest.raises(SystemExit) as end:
        parser.read_arguments(["train", "--config=gpt2", "--model.num_layers=3", "--print_config"])
    assert not end.value.code
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed == yaml.safe_load(parse.to_yaml(parse.parse_config(["--config=gpt2", "--model.num_layers=3"])))


def test_mesh_errors_before_compilation():
    cfg = Config()
    with pytest.raises(ConfigError, match=r"mesh.data=9 needs 9 devices, but there are 8. .* is --mesh.data=8"):
        make_mesh(type(cfg.mesh)(data=9), 18)
    with pytest.raises(ConfigError, match=r"mesh.data=3 x mesh.tensor=4 needs 12 .* is --mesh.data=2 --mesh.tensor=4"):
        make_mesh(type(cfg.mesh)(data=3, tensor=4), 18)
    with pytest.raises(ConfigError, match=r"mesh.data=4 x mesh.fsdp=2 does not divide the 12 .* Use mesh.data=3,"):
        make_mesh(type(cfg.mesh)(data=-1, fsdp=2), 12)
    with pytest.raises(ConfigError, match=r"mesh.data=8 does not divide the 12 sequences .* Use mesh.data=6"):
        make_mesh(type(cfg.mesh)(data=-1), 12)
    with pytest.raises(ConfigError, match=r"mesh.fsdp=2 x mesh.expert=4 does not divide the 12 .* multiple of 8"):
        make_mesh(type(cfg.mesh)(data=1, fsdp=2, expert=4), 12)
    assert make_mesh(type(cfg.mesh)(data=-1, tensor=4), 12).shape["data"] == 2


@pytest.mark.parametrize(
    ("mesh", "padding", "rows"),
    [({}, None, 257), ({"tensor": 4}, None, 260), ({"tensor": 2, "pipe": 4}, None, 264), ({"tensor": 4}, 258, 260),
     ({"tensor": 4}, 300, 300)],
)  # fmt: skip
def test_a_vocabulary_that_the_mesh_does_not_divide_is_padded(mesh, padding, rows):
    model = ModelConfig(num_layers=4, pad_vocab_to=padding)
    cfg = Config(model=model, data=DataConfig(batch_size=8), mesh=MeshConfig(**mesh))
    found = resolve(cfg, 257).model
    assert (found.vocab, found.padded_vocab) == (257, rows)
    assert found.pad_vocab_to is None or rows > 257
