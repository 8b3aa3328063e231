"""Prints the memory of a training step on one device by part, for every policy of recomputation, and of generation.

Nothing is compiled; `jaxstack plan` compiles the step. It takes the configuration of `jaxstack train`.
"""

from typing import Literal

from jsonargparse import Namespace

from jaxstack.cli.plan_target import STYLES, Plan, add_target
from jaxstack.config.reading.parse import Parser

GIB = 2**30


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    add_target(parser)
    parser.add_argument(
        "--style", type=Literal[*STYLES], default="jaxstack",
        help="megatron-fp16 counts as Megatron-LM does: fp16 with float32 main parameters, attention writes its scores",
    )  # fmt: skip
    parser.add_argument(
        "--bytes_per_parameter", type=Literal[16, 18], default=18,
        help="with megatron-fp16: 18 sums gradients in float32, 16 keeps them in fp16",
    )  # fmt: skip
    parser.add_config()


def main(args: Namespace) -> None:
    """Prints the tables, and writes the files that are asked for.

    Raises:
      ConfigError: the target does not exist, or the configuration does not fit it.
    """
    plan = Plan(args)

    from jaxstack.planner import beside, figures

    classic = args.bytes_per_parameter if args.style == "megatron-fp16" else None
    policies = figures.memory_by_policy(plan.job, classic)
    parts = policies[plan.job.cfg.train.remat]
    there = plan.limits.chip.hbm_bytes
    plan.table(f"memory of one of {plan.devices} {plan.chip}", parts, "GiB", GIB, total=True)
    rollout = [] if classic else beside.rollout_memory(plan.job, parts)
    if rollout:
        plan.table("a rollout, before the step", rollout, "GiB", GIB, total=True, key="rollout")
    needed = max(sum(figure.value for figure in of_phase) for of_phase in (parts, rollout))
    verdict = "fits by this formula" if needed <= there else "does NOT fit by this formula"
    plan.say(f"{plan.chip} has {there / GIB:.1f} GiB: the {'run' if rollout else 'step'} {verdict}.\n")
    plan.table("activations that the layers save", figures.saved_figures(plan.job, policies), "GiB", GIB)
    generation = [] if rollout else figures.generation_figures(plan.job)
    if generation:
        plan.table("generation", generation, "GiB", GIB, total=True)
    plan.write(hbm_bytes=there, style=args.style)
    if plan.plot:
        from jaxstack.planner import plan_plot

        plan_plot.draw_memory(policies, there, plan.plot)
        plan.say(f"wrote {plan.plot}")
