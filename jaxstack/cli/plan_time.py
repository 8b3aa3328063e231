"""Predicts the time of a training step by part: operations, recomputation, exposed communication, pipeline bubble.

By default programs reach the fractions of the data sheet that Megatron-LM reached on A100s. It takes the
configuration of `jaxstack train`.
"""

from jsonargparse import Namespace

from jaxstack.cli.plan_target import Plan, add_network, add_target, add_tokens
from jaxstack.config.bounds import PositiveFraction
from jaxstack.config.reading.parse import Parser


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    add_target(parser)
    add_network(parser)
    for name, what in (("matmul", "peak that matmuls"), ("bandwidth", "memory's bandwidth that the other operations"),
                       ("link", "links' bandwidth that collectives")):  # fmt: skip
        parser.add_argument(
            f"--{name}_efficiency", type=PositiveFraction | None,
            help=f"fraction of the {what} reach; null means the calibrated one",
        )  # fmt: skip
    add_tokens(parser)
    parser.add_config()


def main(args: Namespace) -> None:
    """Prints the tables, and writes the files that are asked for.

    Raises:
      ConfigError: the target does not exist, or the configuration does not fit it.
    """
    import os

    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from jaxstack.planner.figures import outside_fit, published_errors, time_figures, traffic_figures
    from jaxstack.planner.step_time import CALIBRATED, step_time

    given = (args.matmul_efficiency, args.bandwidth_efficiency, args.link_efficiency)
    reached = [value or default for value, default in zip(given, CALIBRATED, strict=True)]
    plan = Plan(args, reached)
    time = step_time(plan.job, plan.limits)
    budget = plan.budget(args.tokens)
    parts = time_figures(plan.job, plan.limits, time)
    sent = traffic_figures(plan.job, plan.limits)
    plan.table(f"time of a step on {plan.devices} {plan.chip}", parts, "ms", 1e-3, total=True)
    if sent:
        plan.table("sent by a device in a step", sent, "MB", 1e6)
    days = budget / time.tokens_per_s / 86400
    mfu = time.mfu
    peak = f"({time.total:.6g} s x {time.peak:.6g} FLOP/s)"
    print(f"{time.tokens_per_s:,.0f} tokens/s; {days:,.4g} days for {budget:.4g} tokens")
    print(f"MFU {mfu.full:.1%} (full attention), {mfu.causal:.1%} (causal); with recomputation {time.hfu:.1%}")
    if plan.explain:
        print(f"  MFU = {time.model_flops.full:.6g} FLOPs / {peak}; HFU = {time.hardware_flops:.6g} FLOPs / {peak}")
        print(f"  days = {budget:.6g} tokens / {time.tokens_per_s:.6g} tokens/s / 86400")
    print("reached: {:.1%} of the peak, {:.1%} of the memory's bandwidth, {:.1%} of the links'".format(*reached))
    print(published_errors())
    if warning := outside_fit(plan.job.cfg.model, plan.job.ctx, plan.chip):
        print(warning)
    plan.write(seconds=time.total, tokens_per_s=time.tokens_per_s, mfu=mfu._asdict(), hfu=time.hfu, tokens=budget,
               days=days, bubble=time.bubble, within_fit=not warning)  # fmt: skip
    if plan.plot:
        from jaxstack.planner import plan_plot

        plan_plot.draw_time(time, plan.plot)
        print(f"wrote {plan.plot}")
