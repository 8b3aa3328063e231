"""Predicts the time of a training step by part: operations, recomputation, exposed communication, pipeline bubble.

The model is fitted to steps that others have published; each prediction has an interval. It takes the configuration of
`jaxstack train`. With --program it predicts what the program of another stack takes for the same step.
"""

from typing import TYPE_CHECKING

from jsonargparse import Namespace

from jaxstack.cli.plan_target import Plan, add_network, add_target, add_tokens
from jaxstack.common.counts import plural
from jaxstack.config.bounds import PositiveFloat
from jaxstack.config.reading.parse import Parser

if TYPE_CHECKING:  # JAX must start after the environment is set
    from jaxstack.planner.step_time import StepTime, Work


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    add_target(parser)
    add_network(parser)
    add_tokens(parser)
    parser.add_argument("--price", type=PositiveFloat | None, help="price of a device for an hour")
    parser.add_argument(
        "--program", metavar="NAME", type=str | None,
        help="stack whose program to predict, such as megatron or torchtitan; null means jaxstack",
    )  # fmt: skip
    parser.add_config()


def main(args: Namespace) -> None:
    """Prints the tables, and writes the files that are asked for.

    Raises:
      ConfigError: the target does not exist, or the configuration does not fit it.
    """
    import os

    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from jaxstack.planner.beside import time_beside
    from jaxstack.planner.figures import copy_figures, outside_fit, published_errors, time_figures, traffic_figures
    from jaxstack.planner.step_time import step_time

    plan = Plan(args)
    work, assumed = work_of_program(args.program, plan)
    time = step_time(plan.job, plan.limits, work=work)
    budget = plan.budget(args.tokens)
    parts = time_figures(plan.job, plan.limits, time, work)
    # What is sent, and what is beside a step, is known of our program only.
    sent = [] if assumed else traffic_figures(plan.job, plan.limits)
    more = [] if assumed else time_beside(plan.job, plan.limits, time)
    whole = time.total + sum(figure.value for figure in more)
    plan.table(f"time of a step on {plan.devices} {plan.chip}", parts, "ms", 1e-3, total=True, key="parts")
    if more:
        plan.table("beside each step", more, "ms", 1e-3, total=True, key="beside")
    if sent:
        plan.table("sent by a device in a step", sent, "MB", 1e6)
    if copied := copy_figures(plan.job, plan.limits):
        plan.table("copied to the host in a step, and back", copied, "MB", 1e6)
    each = time.tokens_per_s / plan.devices
    low, high = (time.tokens / seconds / plan.devices for seconds in reversed(time.interval))
    days = budget / time.tokens * whole / 86400
    plan.say(f"{each:,.0f} tokens/s a device, in nine of ten cases {low:,.0f} to {high:,.0f}")
    plan.say(f"{time.tokens_per_s:,.0f} tokens/s; {days:,.4g} days for {budget:.4g} tokens")
    if more:
        plan.say(f"tokens/s are of the step; the days include what is beside it: {whole * 1e3:,.4g} ms for each step")
    cost = None
    if args.price:
        cost = args.price * plan.devices * 24 * days
        plan.say(f"{cost:,.0f} for them, {1e6 * cost / budget:.4g} for a million tokens, at {args.price:g} an hour")
    say_utilisation(plan, time, f"{budget:.6g} tokens / {plural(time.tokens, 'token')} a step x {whole:.6g} s / 86400")
    if not assumed:
        plan.say(f"attention by {plan.job.ctx.ops.attention}")
    plan.say(published_errors())
    warning = outside_fit(plan.job.cfg.model, plan.chip)
    if warning:
        plan.say(warning)
    plan.write(
        tokens_per_s_per_device=each, low=low, high=high, mfu=time.mfu.full, mfu_causal=time.mfu.causal, hfu=time.hfu,
        step_s=time.total, tokens_per_s=time.tokens_per_s, tokens=budget, days=days, cost=cost, with_beside_s=whole,
        attention=work.kernel if assumed else plan.job.ctx.ops.attention, within_fit=not warning,
        program=args.program, assumed=assumed,
    )  # fmt: skip
    if plan.plot:
        from jaxstack.planner import plan_plot

        plan_plot.draw_time(time, plan.plot)
        plan.say(f"wrote {plan.plot}")


def say_utilisation(plan: Plan, time: "StepTime", days: str) -> None:
    """Prints the utilisation of the chips, and with `--explain` its formula and the formula of the days."""
    mfu = time.mfu
    peak = f"({time.total:.6g} s x {time.peak:.6g} FLOP/s)"
    plan.say(f"MFU {mfu.full:.1%} (full attention), {mfu.causal:.1%} (causal); with recomputation {time.hfu:.1%}")
    if plan.explain:
        plan.say(f"  MFU = {time.model_flops.full:.6g} FLOPs / {peak}; HFU = {time.hardware_flops:.6g} FLOPs / {peak}")
        plan.say(f"  days = {days}")


def work_of_program(name: str | None, plan: Plan) -> "tuple[Work, list[str]]":
    """Returns what a device does in a step of a program, and what is assumed of it, which is printed.

    Args:
      name: value of `--program`; `None` means ours, of which nothing is assumed.

    Raises:
      ConfigError: there is no such program.
    """
    from jaxstack.planner import programs
    from jaxstack.planner.step_time import work_of

    if name is None:
        return work_of(plan.job, plan.limits), []
    program = programs.named(name, plan.job, plan.limits)
    work = programs.work_of(program, plan.job, plan.limits)
    assumed = programs.assumptions(program, plan.job, work)
    plan.say(f"not our program, but the program of {', '.join(program.stacks)}; assumed are")
    plan.say("\n".join(f"  {line}" for line in [*assumed, *(f"source: {url}" for url in program.source)]))
    plan.say("")
    return work, assumed
