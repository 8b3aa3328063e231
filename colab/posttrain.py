# %% [markdown]
# # Rewards: can a model learn from its own answers?
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxstack/jaxstack/blob/main/colab/posttrain.ipynb)
#
# A small model has learned from examples to sort digits, and is right about every other time. From here on nobody shows
# it a right answer. It only tries, eight times for each prompt, and a function says which tries are right. Is that enough to
# get better? Reinforcement learning from rewards says yes, and GRPO (Shao et al. 2024) is one of its simplest forms.
#
# This notebook trains the model, looks at its tries, computes by hand what GRPO learns from them, and trains again. You need no
# accelerator, and no data to download.

# %%
# include parts/install.py

# %% [markdown]
# ## A model that is sometimes right
#
# The task is `Sort 3 1 2 9`, with the answer `1 2 3 9`. The model reads bytes. It learns from conversations, a prompt with its
# right answer, which `task:sorting:4` generates. This training stops early, so that something is left to learn. `train.main` is
# what the command `jaxstack train` runs.

# %%
import json
from dataclasses import replace
from pathlib import Path

from jaxstack import train
from jaxstack.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    SampleConfig,
    TrainConfig,
)  # fmt: skip
from jaxstack.config.training import RLConfig
from jaxstack.runtime import platform

TASK = "task:sorting:4"

supervised = Config(
    run=RunConfig(dir="runs/examples", log_every=50),
    model=ModelConfig(num_layers=3, d_model=64, num_heads=4, d_ff=192),
    data=DataConfig(source="chat", path=TASK, seq_len=64, batch_size=32),
    train=TrainConfig(steps=130, eval_every=130, eval_steps=2),
    optim=OptimConfig(name="muon", lr=3e-3, warmup_steps=20, schedule="constant"),
    sample=SampleConfig(prompts=()),
)
platform.configure(supervised.mesh, supervised.data.batch_size)  # one device per CPU core
train.main(supervised)

# %% [markdown]
# ## Eight tries for each prompt
#
# Each row below is a prompt that the model has never seen, and each square is one try. A dark square is a right try, with the
# reward 1; a light square is a wrong one, with the reward 0. Reinforcement learning needs rows with both: there the model can
# sort the digits, but does not do so each time.

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxstack as js
from jaxstack.common.drawing import BLUE, GRAY, ORANGE, STYLE
from jaxstack.evaluate import answers
from jaxstack.posttrain import losses

GROUP = 8
plt.rcParams.update(STYLE)


def tries(run_dir: str) -> tuple[list[str], list[list[str]], np.ndarray]:
    """Returns prompts, the answers to each, and their rewards [prompts, GROUP]."""
    run = js.load(run_dir, mesh={"data": 1})
    groups = answers.answer(run, TASK, RLConfig(), completions=GROUP, context=64, tokens=12, limit=64, rows=64)
    texts = [[one.text for one in group] for group in groups]
    return [group[0].row.text for group in groups], texts, np.array([[one.reward for one in group] for group in groups])


def show(rewards: np.ndarray, prompts: list[str], title: str) -> None:
    """Draws the rewards of the first prompts."""
    _, axis = plt.subplots(figsize=(4.6, 4.2))
    axis.pcolormesh(rewards[:16], cmap="Blues", vmin=-0.3, vmax=1.4, edgecolors="white", linewidth=1)
    axis.invert_yaxis()
    axis.set(xlabel="try", xticks=[], title=f"{title}: {rewards.mean():.0%} of {rewards.size} tries are right")
    axis.set_yticks(np.arange(16) + 0.5, prompts[:16], fontsize=8, family="monospace")
    plt.show()


prompts, texts, before = tries("runs/examples")
show(before, prompts, "before")
for text, reward in zip(texts[0], before[0], strict=True):
    print(f"{prompts[0]}  ->  {text!r:14} reward {reward:.0f}")

# %% [markdown]
# ## What a group teaches
#
# GRPO compares a try with the other tries for the same prompt, its *group*. The *advantage* of a try is its reward minus the
# group's mean reward, divided by the standard deviation of the group's rewards. A right try in a group of failures counts much,
# and a right try among other right tries counts little (left picture). If all tries of a group have the same reward, all
# advantages are zero, and the group teaches nothing. The right picture counts the groups above by their right tries.

# %%
counts = np.arange(GROUP + 1)  # how many tries of a group are right
groups = (np.arange(GROUP) < counts[:, None]).astype(np.float32)  # the right ones are first
advantages = np.asarray(losses.group_advantages(jnp.asarray(groups), scale=True))
by_hand = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + 1e-6)
print("largest difference from the formula by hand:", np.abs(advantages - by_hand).max())

right = [advantages[count, 0] if count else np.nan for count in counts]
wrong = [advantages[count, -1] if count < GROUP else np.nan for count in counts]
seen = np.bincount(before.sum(1).astype(int), minlength=GROUP + 1)
figure, (left, other) = plt.subplots(1, 2, figsize=(9, 3.2))
left.plot(counts, right, "o-", color=BLUE, label="a right try")
left.plot(counts, wrong, "o-", color=ORANGE, label="a wrong try")
left.axhline(0, color=GRAY, linewidth=0.8)
left.set(xlabel=f"right tries in a group of {GROUP}", ylabel="advantage")
left.legend()
other.bar(counts, seen, color=[GRAY, *[BLUE] * (GROUP - 1), GRAY])
other.set(xlabel=f"right tries in a group of {GROUP}", ylabel="number of groups", title="gray groups teach nothing")
plt.show()

# %% [markdown]
# The loss of a token is minus its advantage times the *ratio*: its probability now, divided by its probability when it was
# sampled. At first the ratio is exactly 1, because the sampler here gives the same bits as the trainer. If you take several steps
# with the same tries, the ratio moves. GRPO then clips it, so that no token is pushed further than 20% by one rollout. Below, the
# gradient vanishes where a curve is flat.

# %%
ratios = np.linspace(0.5, 1.5, 201, dtype=np.float32)
figure, axis = plt.subplots(figsize=(4.6, 3.2))
for sign, color in ((1.0, BLUE), (-1.0, ORANGE)):
    log_ratios = jnp.log(jnp.asarray(ratios))[:, None]
    each = losses.clipped(log_ratios, jnp.zeros_like(log_ratios), jnp.full(ratios.size, sign), low=0.2, high=0.2)
    axis.plot(ratios, np.asarray(each)[:, 0], color=color, label=f"advantage {sign:+.0f}")
axis.set(xlabel="ratio", ylabel="loss of a token")
axis.legend()
plt.show()

# %% [markdown]
# ## Learning from rewards
#
# Now the model trains on other data: prompts in place of conversations. Their answers are never shown. In each step the model
# answers eight prompts eight times, and the optimizer changes the parameters once.

# %%
rewarded = replace(
    supervised,
    run=RunConfig(dir="runs/rewards", init_from="runs/examples", log_every=1),
    data=DataConfig(source="prompts", path=TASK, seq_len=64, batch_size=64),
    train=TrainConfig(steps=40, eval_every=40, eval_steps=1),
    optim=OptimConfig(name="muon", lr=5e-4, warmup_steps=0, schedule="constant", weight_decay=0.0),
    rl=RLConfig(loss="grpo", group=GROUP, tokens=12),
)
train.main(rewarded)

# %%
records = [json.loads(line) for line in Path("runs/rewards/metrics.jsonl").read_text().splitlines()]
steps = [record for record in records if "reward" in record and "grad_norm" in record]
figure, axes = plt.subplots(1, 3, figsize=(9, 2.6))
for axis, names in zip(axes, (["reward"], ["groups_without_spread"], ["ratio_max", "ratio_min"]), strict=True):
    for name in names:
        axis.plot([record["step"] for record in steps], [record[name] for record in steps], label=name)
    axis.set(xlabel="step", ylim=(0, 1.1))
    axis.legend(loc="lower right")
plt.show()
assert all(record["ratio_max"] == record["ratio_min"] == 1 for record in steps), (
    "sampler and trainer have the same bits"
)

# %% [markdown]
# The mean reward of a step rises. `groups_without_spread` is the share of the groups whose tries all have the same reward. This
# share jumps about, because a step has only eight groups. The largest and the smallest ratio are exactly 1 in every step.
#
# Here the trained model answers the same prompts as above; no run has seen their answers. `pass@1` is the share of the tries
# that are right, and `pass@8` the share of the prompts with at least one right try:

# %%
prompts, texts, after = tries("runs/rewards")
show(after, prompts, "after")
print(f"pass@1 {before.mean():.1%} before, {after.mean():.1%} after")
print(f"pass@{GROUP} {before.max(1).mean():.1%} before, {after.max(1).mean():.1%} after")
assert 0.05 < before.mean() < 0.75
assert after.mean() > before.mean() + 0.2

# %% [markdown]
# Compare `pass@1` after with `pass@8` before: for most prompts that the model now answers right, one of its eight tries before
# was right already. The rewards have shown the model nothing new. They have taught it to do each time what it could do
# sometimes.

# %% [markdown]
# ## Exercise
#
# Shuffle the rewards of each step among its 64 tries, so that a try gets the reward of another try. The mean reward of a step
# does not change. What is now the mean advantage of the tries that are right, over many shuffles? The cell below checks your
# number. What happens to `pass@1`, and why? What does a model that is never right need before it can learn from rewards?
#
# <details><summary>Answer</summary>
#
# The mean is zero, and `pass@1` does not rise. The advantage of a try is now independent of what the try says, so the mean of the
# gradient is zero. Only noise remains: the model drifts, and noise makes a good model worse. `benchmarks/reinforcement.py`
# measures training with shuffled rewards for three seeds, see
# [docs/reinforcement.md](https://github.com/jaxstack/jaxstack/blob/main/docs/reinforcement.md). A model that is never right has
# groups of equal rewards, whose advantages are zero, and learns nothing. It needs examples first, an easier task, or a reward
# for a part of the answer, such as the share of digits in their place.
#
# </details>

# %%
# @title Check your answer { display-mode: "form" }
answer = None  # @param {type: "raw"}
shuffle = np.random.default_rng(0).permutation
shuffled = [shuffle(before.ravel()).reshape(before.shape).astype(np.float32) for _ in range(200)]
found = np.mean([np.asarray(losses.group_advantages(jnp.asarray(one), scale=True)) for one in shuffled], axis=0)
mean = found[before == 1].mean()
if answer is not None:
    print("Right." if abs(answer - mean) < 0.05 else "Not yet.", f"It is {mean:.3f} after 200 shuffles.")
assert abs(mean) < 0.05

# %% [markdown]
# ## Things to try
#
# - Another loss: `RLConfig(loss="dr_grpo")`, `"dapo"`, `"gspo"`, `"rloo"` or `"cispo"`.
# - A reward of your own: `rewards=("rewards.py:short",)` names a Python function of the completion and the row's fields.
# - A harder task: `task:countdown:3` asks for a formula, and has many right answers.
# - All steps from a tokenizer to a chat page in the browser:
#   [docs/chat_model.md](https://github.com/jaxstack/jaxstack/blob/main/docs/chat_model.md).
