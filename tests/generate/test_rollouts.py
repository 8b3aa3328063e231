"""Runs that learn from rewards: exact first ratios, resuming, groups that are drawn again, and what is logged."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import jaxstack
from jaxstack import data, start
from jaxstack.common.tree import flatten
from jaxstack.config import ConfigError, resolve
from jaxstack.config.reading.parse import parse_config
from jaxstack.config.training import RLConfig
from jaxstack.data.loader import DataLoader
from jaxstack.debug import replay
from jaxstack.generate.rollouts import Completion, Rollouts, Sampler
from jaxstack.train import main
from jaxstack.training.services import init_from

FLAGS = [
    "--model.num_layers=1", "--model.d_model=16", "--model.d_ff=32", "--model.num_heads=2", "--data.seq_len=48",
    "--data.batch_size=8", "--train.eval_every=4", "--train.eval_steps=1", "--run.log_every=1", "--checkpoint.every=2",
    "--sample.prompts=[]", "--optim.warmup_steps=0", "--optim.schedule=constant", "--data.path=task:addition:1",
]  # fmt: skip
RL = ["--data.source=prompts", "--rl.tokens=4", "--rl.group=4", "--data.eval_fraction=0.3", "--optim.lr=3e-3"]
REWARDS = """
def shorter(completion):
    return -len(completion)

def constant(completion):
    return 0.5

def letters(completion, answer):
    return sum(map(str.isalpha, completion)) + 0.01 * len(answer)

def fails(completion):
    raise RuntimeError("no")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a run that was trained a little on conversations, and with functions of rewards."""
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "rewards.py").write_text(REWARDS)
    main(parse_config([*FLAGS, "--data.source=chat", f"--run.dir={folder}/chat", "--train.steps=2"]))
    return folder


def parsed(folder, name, steps, *more):
    flags = [f"--run.init_from={folder}/chat", f"--train.steps={steps}", f"--run.dir={folder / name}"]
    return parse_config([*FLAGS, *RL, f"--rl.rewards=[{folder}/rewards.py:letters]", *flags, *more])


def train(folder, name, steps, *more):
    """Trains from the run `chat`, and returns the records of the log."""
    main(parsed(folder, name, steps, *more))
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def steps_of(records):
    return [record for record in records if "grad_norm" in record]


def arrays(path):
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    saved = ocp.metadata(path).metadata
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one), saved)
    return {name: np.asarray(leaf) for name, leaf in flatten(ocp.load(path, abstract)).items()}


def opened(cfg):
    """Returns rollouts of a run, and the parameters that it starts with."""
    dataset = data.load_for(cfg.model, cfg.data)
    cfg = resolve(cfg, dataset.vocab_size, dataset.image, dataset.buckets)
    setup = start.resolve(cfg, dataset)
    sharding = setup.ctx.layout.sharding(jax.sharding.PartitionSpec())
    rollouts = Rollouts.create(setup, DataLoader(cfg, dataset, sharding))
    return rollouts, init_from.init_state_from(cfg, setup.ctx, setup.abstract, dataset.tokenizer).params


DEEP = ["--model.num_layers=5"]
PIPE = ["--mesh.pipe=2", "--pipeline.microbatches=2", "--train.remat=full", *DEEP]
CHUNKS = [*PIPE, "--mesh.data=2", "--mesh.fsdp=2", "--pipeline.schedule=interleaved_1f1b", "--pipeline.chunks=2"]


def base(folder, name, more):
    """Returns the flag that begins with another model, after it was trained a little."""
    if not (folder / name).exists():
        main(parse_config([*FLAGS, *more, "--data.source=chat", f"--run.dir={folder}/{name}", "--train.steps=2"]))
    return f"--run.init_from={folder}/{name}"


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", [[], CHUNKS], ids=["one", "pipe"])
def test_a_run_resumes_bit_for_bit_in_the_middle_of_a_rollout(folder, mesh):
    flags = ["--rl.updates=4", "--rl.kl_weight=0.1", *mesh, *([base(folder, "deep", DEEP)] if mesh else [])]
    names = f"whole{len(mesh)}", f"parts{len(mesh)}"
    whole = train(folder, names[0], 6, *flags)
    train(folder, names[1], 2, *flags)
    assert [file.name for file in (folder / names[1] / "rollouts").iterdir()] == ["2.npz"]
    parts = train(folder, names[1], 6, *flags)
    saved, again = (arrays(folder / name / "checkpoints" / "6") for name in names)
    assert [name for name in saved if not np.array_equal(saved[name], again[name])] == []
    names = ("loss", "reward", "kl", "ratio_max", "ratio_min", "length", "groups_without_spread")
    shown = [[[record[name] for name in names] for record in steps_of(log)] for log in (whole, parts)]
    assert shown[0] == shown[1]
    ratios = [(record["ratio_min"], record["ratio_max"]) for record in steps_of(whole)]
    assert [ratio == (1, 1) for ratio in ratios] == [True, False, False, False, True, False]
    kl = [record["kl"] for record in steps_of(whole)]
    assert kl[0] == pytest.approx(0, abs=1e-9)
    assert kl[-1] > 1e-6
    evaluated = [record for record in whole if "eval_loss" in record][-1]
    assert evaluated["eval_loss"] == pytest.approx(-evaluated["eval_reward"] + 0.1 * evaluated["eval_kl"], rel=1e-5)
    samples = [record["samples"] for record in whole if "samples" in record]
    assert len(samples) == 2
    assert all({"prompt", "completion", "reward"} == sample.keys() for sample in samples[0])


STAGED = {
    "stages": PIPE,
    "chunks": CHUNKS,
    "tensor": [*PIPE, "--mesh.tensor=2", "--pipeline.schedule=zb1"],
    "drafts": [*PIPE, "--mesh.fsdp=4", "--mesh.data=1", "--pipeline.schedule=gpipe", "--rl.exact=false"],
}


@pytest.mark.matrix
@pytest.mark.parametrize("case", STAGED)
def test_a_pipeline_learns_as_replicas(folder, case):
    """The same completions are sampled, so all that differs is the order of sums."""
    flags = ["--rl.updates=2", "--rl.kl_weight=0.1", "--optim.name=sgd", "--optim.lr=0.1", base(folder, "deep", DEEP)]
    if not (folder / "replicas").exists():
        train(folder, "replicas", 4, *DEEP, *flags)
    train(folder, case, 4, *flags, *STAGED[case])
    names = ("loss", "reward", "reward_std", "kl", "length", "ratio_max", "ratio_min", "grad_norm")
    logs = [folder / name / "metrics.jsonl" for name in ("replicas", case)]
    records = [steps_of(json.loads(line) for line in log.read_text().splitlines()) for log in logs]
    shown = [[[record[name] for name in names] for record in log] for log in records]
    np.testing.assert_allclose(shown[1], shown[0], rtol=1e-4, atol=1e-6)  # Adds of float32 in another order.
    first = [(record["ratio_min"], record["ratio_max"]) == (1, 1) for record in records[1]]
    assert first == [True, False, True, False] or case == "drafts"
    assert all(0 <= record["sampler_kl"] < 1e-6 for record in records[1])
    found = [arrays(log.parent / "checkpoints" / "4") for log in logs]
    apart = {name: np.abs(found[0][name] - found[1][name]).max() for name in found[0] if name.startswith("params")}
    assert apart
    assert max(apart.values()) < 1e-5, apart


@pytest.mark.matrix
def test_a_rollout_that_is_lost_is_sampled_again_and_said(folder, capsys):
    train(folder, "lost", 2, "--rl.updates=3")
    (folder / "lost" / "rollouts" / "2.npz").write_bytes(b"PK")
    train(folder, "lost", 4, "--rl.updates=3")
    assert "2.npz with completions for the next steps cannot be read" in " ".join(capsys.readouterr().out.split())


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", [[], ["--mesh.data=2", "--mesh.fsdp=4"]])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_first_ratio_of_each_rollout_is_exactly_1(folder, mesh, dtype):
    records = steps_of(train(folder, f"exact{len(mesh)}{dtype}", 3, f"--train.dtype={dtype}", *mesh))
    assert [(record["ratio_min"], record["ratio_max"]) for record in records] == [(1, 1)] * 3
    assert len({record["reward"] for record in records}) > 1, "the parameters change"


EXPERTS = ["--model.moe.num_experts=4", "--model.moe.top_k=2", "--model.moe.d_ff=16"]
ELSEWHERE = {
    "sampler": ["--rl.exact=false"],
    "tensor": ["--mesh.tensor=2"],
    "accumulation": ["--mesh.tensor=2", "--train.grad_accum=2", "--rl.exact=false"],
    "experts": EXPERTS,
    "expert_axis": ["--mesh.expert=2", *EXPERTS],
}


@pytest.mark.matrix(quick=("sampler", "expert_axis"))
@pytest.mark.parametrize("case", ELSEWHERE)
def test_the_first_ratio_is_exactly_1_whatever_has_sampled(folder, case):
    """The bits of the sampler may be others. They are measured, and importance weights correct them."""
    flags = [*ELSEWHERE[case], f"--run.init_from={folder}/{'experts' if EXPERTS[0] in ELSEWHERE[case] else 'chat'}"]
    if EXPERTS[0] in flags and not (folder / "experts").exists():
        argv = [*FLAGS, *EXPERTS, "--data.source=chat", f"--run.dir={folder}/experts", "--train.steps=1"]
        main(parse_config(argv))
    records = steps_of(train(folder, f"near_{case}", 2, *flags))
    assert [(record["ratio_min"], record["ratio_max"]) for record in records] == [(1, 1)] * 2
    assert all(0 <= record["sampler_kl"] < 1e-6 for record in records)
    assert all(record["sampler_difference"] < 1e-3 for record in records)


@pytest.mark.matrix
@pytest.mark.parametrize("loss", ["dr_grpo", "dapo", "gspo", "rloo", "cispo"])
def test_a_reward_of_letters_is_learned(folder, loss):
    flags = ["--optim.lr=2e-2", "--data.batch_size=64", "--train.eval_every=30"]
    rewards = [record["reward"] for record in steps_of(train(folder, loss, 30, f"--rl.loss={loss}", *flags))]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.5, rewards


def test_a_function_that_raises_ends_the_run_with_its_row(folder):
    with pytest.raises(ConfigError, match=r"rewards\.py:fails raised RuntimeError: no for task:addition:1, row"):
        train(folder, "fails", 2, f"--rl.rewards=[{folder}/rewards.py:fails]")


class Scripted(Sampler):
    """A sampler whose completions are written in advance, by the number of the call."""

    def sample(self, params, prompts, seed):
        self.calls.append((list(prompts), seed))
        texts = self.script(len(self.calls), len(prompts))
        zeros = [np.zeros(len(text), np.float32) for text in texts]
        return [Completion([*text.encode()], zero, zero) for text, zero in zip(texts, zeros, strict=True)]


def scripted(rollouts, script):
    rollouts.rescore = None  # the texts have the log-probability 0
    sampler = Scripted(rollouts.sampler.exact, rollouts.sampler.rl)
    object.__setattr__(sampler, "calls", [])
    object.__setattr__(sampler, "script", script)
    rollouts.sampler = sampler
    return sampler.calls


def test_groups_without_spread_are_replaced_by_groups_of_other_prompts(folder):
    cfg = parsed(folder, "redrawn", 2, "--rl.redraws=2", "--data.batch_size=16")
    rollouts, params = opened(cfg)

    def script(call, count):
        # The first call has four groups, of which the second and the fourth have no spread; then one of two.
        if call == 1:
            return ["a", "1", "1", "1", *["1"] * 4, "ab", "1", "1", "1", *["a"] * 4]
        return ["1"] * 4 + ["abc", "1", "1", "1"] if call == 2 else ["1", "1", "1", "abcd"]

    calls = scripted(rollouts, script)
    batch, figures = rollouts.batch(params, 3)
    assert [len(prompts) for prompts, _ in calls] == [16, 8, 4]
    assert len({seed for _, seed in calls}) == 3
    numbers = rollouts.loader.read(3)["prompts"][:, 0].tolist()
    assert len(numbers) == 4 * 3
    expected = [rollouts.prompts.ids_of([n])[0] for n in (*numbers[:4], *numbers[4:6], *numbers[8:9])]
    assert [prompts for prompts, _ in calls] == [
        [ids for ids in expected[a:b] for _ in range(4)] for a, b in ((0, 4), (4, 6), (6, 7))
    ]
    assert (figures["groups_drawn"], figures["groups_without_spread"]) == (7, pytest.approx(3 / 7))
    lengths = np.asarray(batch["loss_weights"]).sum(1).astype(int).tolist()
    assert lengths == [1, 1, 1, 1, 1, 1, 1, 4, 2, 1, 1, 1, 3, 1, 1, 1]
    again = np.asarray(batch["advantages"])[:, 0].reshape(4, 4)
    np.testing.assert_allclose(again.sum(1), 0, atol=1e-5)
    assert (again.std(1) > 0).all()


def test_prompts_and_seeds_are_functions_of_seed_and_step(folder):
    rollouts, params = opened(parsed(folder, "seeds", 2, "--rl.updates=2"))
    calls = scripted(rollouts, lambda call, count: ["a", "1"] * (count // 2))
    for index in (0, 1, 2):
        rollouts.batch(params, index)
    other, _ = opened(parsed(folder, "seeds", 2, "--rl.updates=2"))
    again = scripted(other, lambda call, count: ["a", "1"] * (count // 2))
    other.batch(params, 2)
    assert [len(prompts) for prompts, _ in calls] == [16, 16]
    assert again == calls[1:]
    assert calls[0][1] != calls[1][1]
    third, _ = opened(parsed(folder, "seeds", 2, "--rl.updates=2", "--run.seed=1"))
    third_calls = scripted(third, lambda call, count: ["a", "1"] * (count // 2))
    third.batch(params, 2)
    assert third_calls[0][1] != calls[1][1]


@pytest.mark.parametrize("damage", ["whole", "cut", "changed", "empty", "missing"])
def test_files_of_waiting_batches_are_read_or_named(folder, damage):
    rollouts, params = opened(parsed(folder, f"files{damage}", 2, "--rl.updates=3"))
    calls = scripted(rollouts, lambda call, count: ["a", "1"] * (count // 2))
    rollouts.batch(params, 3)
    (folder / f"files{damage}").mkdir()
    rollouts.save(4)
    waiting = rollouts.waiting
    assert sorted(waiting) == [4, 5]
    path = folder / f"files{damage}" / "rollouts" / "4.npz"
    content = path.read_bytes()
    half = len(content) // 2
    changed = content[:half] + bytes([content[half] ^ 255]) + content[half + 1 :]
    damaged = {"whole": content, "cut": content[:half], "changed": changed, "empty": b""}
    path.unlink() if damage == "missing" else path.write_bytes(damaged[damage])
    line = rollouts.restore(4, 4)
    if damage == "whole":
        assert line == ""
        assert jax.tree.all(jax.tree.map(np.array_equal, rollouts.waiting, waiting))
        assert rollouts.restore(4, 6) == ""
        assert rollouts.waiting == {}, "a new rollout begins"
        return
    assert "4.npz with completions for the next steps cannot be read" in line
    rollouts.batch(params, 4)
    assert [len(prompts) for prompts, _ in calls] == [24, 16]


def test_penalties_and_weights_are_in_the_reward(folder):
    names = f"[{folder}/rewards.py:letters, {folder}/rewards.py:shorter]"
    flags = [f"--rl.rewards={names}", "--rl.weights=[1, 0.5]", "--rl.overlong_buffer=2"]
    rollouts, params = opened(parsed(folder, "weights", 2, *flags))
    scripted(rollouts, lambda call, count: ["ab\0", "1\0", "abcd", "1234"] * (count // 4))
    _, figures = rollouts.batch(params, 0)
    answers = [rollouts.prompts.rows[n].fields["answer"] for n in rollouts.loader.read(0)["prompts"][:, 0]]
    each = [
        letters + 0.01 * len(answer) - 0.5 * length + penalty
        for answer in answers
        for letters, length, penalty in ((2, 2, -0.5), (0, 1, 0), (4, 4, -1), (0, 4, -1))
    ]
    np.testing.assert_allclose([figures["reward"], figures["reward_std"]], [np.mean(each), np.std(each)], rtol=1e-6)
    assert (figures["length"], figures["ended"]) == (13 / 4, 0.5)
    assert figures[f"reward/{folder}/rewards.py:shorter"] == pytest.approx(-11 / 4)


def test_what_does_not_fit_is_refused_before_the_run(folder):
    with pytest.raises(ConfigError, match=r"needs \d+ positions with rl.tokens=40, but data.seq_len=48"):
        train(folder, "refused", 2, "--rl.tokens=40")
    (folder / "plain.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    with pytest.raises(ConfigError, match=r"rl\.rewards is empty, but data\.path=.*plain\.jsonl is not a task"):
        train(folder, "refused", 2, "--rl.rewards=[]", f"--data.path={folder}/plain.jsonl")
    with pytest.raises(ConfigError, match=r"letters needs answer, which .*plain\.jsonl, line 1 does not have"):
        train(folder, "refused", 2, f"--data.path={folder}/plain.jsonl")
    with pytest.raises(ConfigError, match=r"rl\.reference=nowhere is not a folder of a run"):
        train(folder, "refused", 2, "--rl.reference=nowhere")
    assert not (folder / "refused" / "metrics.jsonl").exists()


def test_defaults_follow_the_loss():
    assert RLConfig().bounds == (0.2, 0.2)
    assert RLConfig(loss="dapo").bounds == (0.2, 0.28)
    assert RLConfig(loss="gspo").bounds == (3e-4, 4e-4)
    assert RLConfig(loss="cispo").bounds[1] == 5
    assert (RLConfig().attempts, RLConfig(loss="dapo").attempts, replace(RLConfig(), redraws=2).attempts) == (1, 4, 3)


@pytest.mark.matrix
def test_a_loaded_run_evaluates_what_it_has_logged_and_its_steps_are_not_run_again(folder):
    records = train(folder, "loaded", 2, "--rl.kl_weight=0.1", "--train.eval_every=2")
    logged = [record["eval_loss"] for record in records if "eval_loss" in record][-1]
    run = jaxstack.load(folder / "loaded")
    assert run.evaluate().loss == pytest.approx(logged, abs=1e-5)
    chats = replace(run.config.data, source="chat")
    assert np.isfinite(run.evaluate(chats).loss)
    with pytest.raises(ConfigError, match="learns from completions that it samples"):
        replay.Replay(run.config)
