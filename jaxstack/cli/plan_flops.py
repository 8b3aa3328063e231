"""Prints the FLOPs of a training step by every convention, with recomputation, and the days at the chips' peak.

It takes the configuration of `jaxstack train`.
"""

from typing import Literal

from jsonargparse import Namespace

from jaxstack.cli.plan_target import STYLES, Plan, add_network, add_target, add_tokens
from jaxstack.common.counts import plural
from jaxstack.config.reading.parse import Parser


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    add_target(parser, plot=False)
    add_network(parser)
    parser.add_argument(
        "--style", type=Literal[*STYLES], default="jaxstack",
        help="megatron-fp16 counts recomputation (train.remat) as Megatron-LM does: attention, or whole layers",
    )  # fmt: skip
    add_tokens(parser)
    parser.add_config()


def main(args: Namespace) -> None:
    """Prints the table, and writes the file that is asked for.

    Raises:
      ConfigError: the target does not exist, or the configuration does not fit it.
    """
    plan = Plan(args)

    from jaxstack.planner.figures import flops_figures
    from jaxstack.planner.step_time import step_time

    time = step_time(plan.job, plan.limits)
    budget = plan.budget(args.tokens)
    *found, days = flops_figures(plan.job, time, budget, args.style == "megatron-fp16")
    plan.table(f"FLOPs of a step of {plural(time.tokens, 'token', spec=',')}", found, "TFLOP", 1e12)
    plan.say(f"{found[-1].value / time.tokens * budget:.4g} FLOPs for {budget:.4g} tokens")
    whole = f"{days.value * plan.devices:,.6g} device-days"
    plan.say(f"{days.value:,.4g} days on {plan.devices} {plan.chip} at their peak, {whole}")
    if plan.explain:
        plan.say(f"  days = {days.explanation}")
    plan.write(tokens=budget, days_at_peak=days.value, style=args.style)
