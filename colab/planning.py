# %% [markdown]
# # Plan a run: GPT-3, and one for this machine
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxstack/jaxstack/blob/main/colab/planning.ipynb)
#
# Does a model fit in memory? How long does it train, and which size is best for a budget? The planner answers by formula,
# without a device. First you plan GPT-3 on 1,024 A100s and compare the planner's figures with published ones. Then you plan a
# run of two minutes for this machine, write its configuration, and train the first steps.
#
# You need no accelerator, and no data to download.

# %%
import os

os.environ["JAX_PLATFORMS"] = "cpu"  # JAX reads this when it is imported: every step below runs on the CPU

# %%
# include parts/install.py

# %%
import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Image, display

from jaxstack.cli import parser
from jaxstack.cli.plan import with_vocabulary
from jaxstack.common.drawing import BLUE, GRAY, ORANGE, STYLE
from jaxstack.common.hardware import CHIPS
from jaxstack.config.reading.parse import parse_config
from jaxstack.planner import figures, measure, megatron, memory, plot
from jaxstack.planner.job import Job
from jaxstack.planner.scaling_law import BESIROGLU, published
from jaxstack.planner.step_time import step_time

plt.rcParams.update(STYLE)


def jaxstack(command: str) -> None:
    """Runs a command as a shell does, in this process."""
    parser.execute(shlex.split(command))


# %% [markdown]
# ## GPT-3: does it fit?
#
# `configs/models/gpt3.yaml` has GPT-3 with 175 billion parameters, in the shapes that NVIDIA trained with Megatron-LM. Classic
# mixed precision stores 16 bytes for each parameter: weights and gradients in fp16, and in float32 the main weights and two
# moments of Adam.

# %%
GPT3 = "--config gpt3 --mesh.data=8 --mesh.pipe=16 --mesh.tensor=8"
A100 = CHIPS["a100"]

cfg = with_vocabulary(parse_config(shlex.split(GPT3)))
one = replace(cfg, mesh=replace(cfg.mesh, data=1, pipe=1, tensor=1))  # everything on one imaginary device
*state, activations = megatron.memory(Job(one, memory.context(one, 1, "gpu")), bytes_per_parameter=16)
for figure in state:
    print(f"{figure.name:26} {figure.value / 1e12:6.3f} TB = {figure.explanation}")
total = sum(figure.value for figure in state)
print(f"{'sum':26} {total / 1e12:6.3f} TB, the memory of {total / 80e9:.1f} A100 of 80 GB, without activations")

# The published figures are 2.8 TB, and more than 35 A100 of 80 GB (Rajbhandari et al. 2021, Narayanan et al. 2021).
assert abs(total / 2.8e12 - 1) < 0.005
assert total + activations.value > 35 * 80e9

# %% [markdown]
# So the model must be divided. Eight devices share each matrix (`tensor`), and such a group is one of sixteen stages that share
# the layers (`pipe`). Eight copies of this pipeline share the batch (`data`). The command prints what one device stores. Its
# picture has one bar for each recomputation policy, and a dashed line for the device's memory.

# %%
jaxstack(f"plan memory --target a100:128x8 {GPT3} --style megatron-fp16 --bytes_per_parameter=16 --plot memory.png")
display(Image("memory.png"))

# %% [markdown]
# The formulas are functions, so you can ask for one figure: here the activations that a device stores. `explanation` is the
# figure's formula with the numbers put in.

# %%
CONTEXT = memory.context(cfg, 1024, "gpu")
saved = megatron.activations(Job(cfg, CONTEXT))
print(saved.explanation, f"= {saved.value / 2**30:.2f} GiB")
policies = figures.memory_by_policy(Job(cfg, CONTEXT), bytes_per_parameter=16)
needs = {name: sum(figure.value for figure in parts) for name, parts in policies.items()}
assert needs["full"] < A100.hbm_bytes < needs["none"]  # without recomputation it does not fit

# %% [markdown]
# ## GPT-3: how long does it take?
#
# GPT-3 is trained for 95,000 steps of 1,536 sequences. These are about 300 billion tokens. Megatron-LM computes the forward
# pass of the layers twice, to store fewer activations. The training takes 430 ZFLOPs; a ZFLOP is 10^21 FLOPs. One A100 would
# need 16,000 days for it at its peak.

# %%
flops = cfg.train.steps * megatron.hardware_flops(Job(cfg, CONTEXT))
days = flops / A100.flops["bfloat16"] / 86400
print(f"{flops / 1e21:.1f} ZFLOPs, {days:,.0f} A100-days at the peak")
assert abs(flops / 430e21 - 1) < 0.01
assert abs(days / 16_000 - 1) < 0.01

# %% [markdown]
# No program reaches the peak. `plan time` has a formula for the time of a step, fitted to published step times. The formula adds
# collectives and the idle time of the pipeline. The picture is one step: what a device computes, and what it waits for. Gray
# bars are communication beside the operations, for which no device waits. Compare the days with Narayanan et al. 2021, who
# estimate 34 days for the same tokens. The last lines of the output say how wrong such predictions are.

# %%
jaxstack(f"plan time --target a100:128x8 {GPT3} --tokens 300e9 --plot time.png")
display(Image("time.png"))

# %% [markdown]
# Which mesh is best? Here four meshes divide GPT-3 over the same devices. A bar is one step, and blue is the part in which a
# device computes. At the end of a bar is the MFU: the model's FLOPs per second, divided by the peak of the devices. The command
# `jaxstack plan mesh` searches all meshes, which takes some minutes for 1,024 devices.

# %%
_, count, limits = figures.limits_of("a100:128x8")
utilisation = {}
figure, axes = plt.subplots(figsize=(7, 2.4))
for pipe, tensor in ((16, 8), (8, 8), (32, 4), (8, 16)):
    mesh = replace(cfg.mesh, data=count // pipe // tensor, pipe=pipe, tensor=tensor)
    other = with_vocabulary(replace(cfg, mesh=mesh))
    time = step_time(Job(other, memory.context(other, count, "gpu")), limits)
    utilisation[pipe, tensor] = time.mfu.full
    waits = sum(time.exposed.values())
    parts = {
        "computes": time.total - time.bubble - waits,
        "waits for communication": waits,
        "has no microbatch": time.bubble,
    }
    name, left = f"data {mesh.data}, pipe {pipe}, tensor {tensor}", 0.0
    for (what, seconds), color in zip(parts.items(), (BLUE, ORANGE, GRAY), strict=True):
        axes.barh(name, seconds, left=left, color=color, label=what if len(utilisation) == 1 else None)
        left += seconds
    axes.text(left, name, f" MFU {time.mfu.full:.0%}", va="center")
axes.invert_yaxis()
axes.margins(x=0.12)
axes.set(xlabel="seconds of a step")
figure.legend(loc="outside upper center", ncols=3)
plt.show()
assert utilisation[8, 16] == min(utilisation.values())  # 16 devices exchange activations over the network

# %% [markdown]
# ## GPT-3: was it the right size?
#
# The scaling law of Besiroglu et al. 2024 predicts the loss of a model from its parameters and its tokens. For the FLOPs of
# GPT-3 the law prefers a smaller model and more tokens. The curve is the lowest loss for each number of FLOPs. The star
# (`this plan`) is GPT-3, and it is above the curve.

# %%
parameters, tokens = 175e9, 300e9
budget = 6 * parameters * tokens
best = BESIROGLU.optimum(budget)
plot.draw_budget(published(), budget, (parameters, tokens), Path("loss.png"))
display(Image("loss.png"))
print(f"GPT-3         {parameters:.3g} parameters, {tokens:.3g} tokens: {BESIROGLU.loss(parameters, tokens):.3f} nats")
print(f"the law's best {best[0]:.3g} parameters, {best[1]:.3g} tokens: {BESIROGLU.loss(*best):.3f} nats")
assert best[0] < parameters / 2
assert BESIROGLU.loss(*best) < BESIROGLU.loss(parameters, tokens)

# %% [markdown]
# `plan run` turns such a budget into a configuration. Without `--target` it leaves the mesh open. The picture has the best size
# and the best number of tokens for budgets from a laptop to a datacenter: both grow with about the square root of the budget.
# The stars are GPT-3.

# %%
jaxstack(f"plan run --budget {budget} --config gpt3")

budgets = np.geomspace(1e13, 1e25, 60)
sizes, lengths = np.transpose([BESIROGLU.optimum(each) for each in budgets])
figure, axes = plt.subplots(figsize=(6, 3))
axes.plot(budgets, lengths, color=ORANGE, label="best number of tokens")
axes.plot(budgets, sizes, color=BLUE, label="best number of parameters")
axes.plot(budget, tokens, "*", color=ORANGE, markersize=11)
axes.plot(budget, parameters, "*", color=BLUE, markersize=11)
axes.annotate("GPT-3", (budget, (parameters * tokens) ** 0.5), xytext=(8, -10), textcoords="offset points")
axes.set(xscale="log", yscale="log", xlabel="training FLOPs")
axes.legend()
plt.show()

# %% [markdown]
# ## A run for this machine
#
# What can this machine train in two minutes? A large matrix product shows how many FLOPs the machine computes per second at
# best. The plan takes three tenths of that rate, because a small model has small matrices. `--config quickstart` names the
# model's family and the data: bytes of Python's standard library.

# %%
MINUTES, REACHED = 2, 0.3

peak = measure.this_chip(jax.devices()[0], "float32").flops["float32"]
budget = MINUTES * 60 * REACHED * peak
print(f"{peak / 1e9:.0f} GFLOP/s in a matrix product, so {budget:.3g} FLOPs in {MINUTES} minutes")

Path("laptop.yaml").unlink(missing_ok=True)  # `--out` never overwrites a file
jaxstack(f"plan run --budget {budget} --config quickstart --model.vocab_size=256 --out laptop.yaml")

# %% [markdown]
# The lines below the table warn of an extrapolation: the law was fitted to much larger runs, with other data and another
# tokenizer. The predicted losses mean nothing for bytes, but the size and the number of tokens are a place to start.
#
# The written file has every value that is not the default. You can read it and change it:

# %%
plan = parse_config(["--config=laptop.yaml"])
print(Path("laptop.yaml").read_text())

# %% [markdown]
# `jaxstack train --config laptop.yaml` trains the planned model. Here the command stops after three steps.

# %%
STEPS = 3
shutil.rmtree("runs/laptop", ignore_errors=True)
short = (
    f"--train.steps={STEPS} --optim.warmup_steps=1 --run.log_every=1 --train.eval_steps=1 --train.ngram_baseline=false"
)
jaxstack(f"train --config laptop.yaml {short} --sample.prompts=[]")

# %% [markdown]
# The loss falls from ln 256 = 5.55 (the dashed line), where every byte is equally probable. The measured time of a step shows
# whether the plan is right for this machine.

# %%
lines = list(map(json.loads, Path("runs/laptop/metrics.jsonl").read_text().splitlines()))
losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
planned, measured = (
    MINUTES * 60 / plan.train.steps,
    [line["step_time_s"] for line in lines if "step_time_s" in line][-1],
)
print(f"planned  {planned:.2f} s a step, {plan.train.steps:,} steps")
print(f"measured {measured:.2f} s a step, {plan.train.steps * measured / 60:.1f} minutes for all of them")

figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.6))
left.plot(list(losses), list(losses.values()), "o-", color=BLUE)
left.axhline(np.log(256), color=GRAY, linestyle="--")
left.set(xticks=list(losses), xlabel="step", ylabel="loss (nats per byte)")
right.bar(["planned", "measured"], [planned, measured], color=[GRAY, BLUE])
right.set(ylabel="seconds of a step")
plt.show()
assert max(losses) == STEPS < plan.train.steps
assert losses[STEPS] < losses[1] < 6

# %% [markdown]
# ## Exercise
#
# GPT-3 takes 16,000 days of one A100 at its peak. You reach 40% of the peak. How many A100 do you need to train it in 30 days?
# The cell below checks your number.
#
# <details><summary>Answer</summary>
#
# 16,000 / (0.4 x 30) = 1,333, so 167 machines with eight of them.
#
# </details>

# %%
# @title Check your answer { display-mode: "form" }
answer = None  # @param {type: "raw"}
right = days / (0.4 * 30)
if answer is not None:
    print("Right." if abs(answer / right - 1) < 0.02 else "Not yet.")
assert abs(right / 1_333 - 1) < 0.01

# %% [markdown]
# ## Where to go next
#
# - Train all steps of the plan: `jaxstack train --config laptop.yaml --run.dir=runs/whole`.
# - Plan for an amount of money: `jaxstack plan run --dollars 50000 --price 2.5 --target h100:8x8`.
# - Search all meshes: `jaxstack plan mesh --target h100:8 --config llama3_8b`. With the extra `[cuda13]` or `[tpu]` the command
#   compiles the best ones.
# - Fit the law to runs of your own: `jaxstack plan fit`
#   ([planning](https://github.com/jaxstack/jaxstack/blob/main/docs/planning.md)).
