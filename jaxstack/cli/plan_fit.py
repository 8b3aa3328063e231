"""Fits the scaling law of loss to finished runs, and prints its constants with intervals and the best size for budgets.

Each run counts with its parameters, the tokens of all its steps, and its last held-out loss.
"""

import json
from pathlib import Path

from jsonargparse import Namespace
from rich.console import Console
from rich.table import Table

from jaxstack.common import files
from jaxstack.config import ConfigError
from jaxstack.config.reading.parse import Parser, user_path
from jaxstack.planner import scaling_law
from jaxstack.report import runs


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    parser.add_argument("runs", metavar="RUN", type=user_path, nargs="+", help="run directory")
    parser.add_argument(
        "--budget", type=float, nargs="+", default=[], metavar="FLOPS", help="training FLOPs to find the best size for"
    )
    parser.add_argument("--plot", type=user_path, metavar="FILE", help="picture to draw, such as chart.png")
    parser.add_argument("--json", type=user_path, metavar="FILE", help="file to write with every run and constant")


def main(args: Namespace) -> None:
    """Prints the constants and the best sizes, and writes the files that are asked for.

    Raises:
      ConfigError: a run cannot be read or has no held-out loss, the runs do not determine a law, or a file cannot be
        written.
    """
    if any(budget <= 0 for budget in args.budget):
        raise ConfigError(f"--budget={min(args.budget):g} is not positive. Name training FLOPs, such as 1e17.")
    picture = None if args.plot is None else files.writable("--plot", args.plot, files.PICTURES)
    points = [point(run) for run in runs.read_runs([Path(run) for run in args.runs])]
    parameters, tokens, losses = zip(*points, strict=True)
    try:
        fitted = scaling_law.fit(parameters, tokens, losses)
    except ValueError as error:
        raise ConfigError(f"{error}. Train more runs of other sizes and lengths, and name them all.") from None
    console = Console(highlight=False, soft_wrap=True)
    console.print(constants(fitted))
    largest = max(6 * n * d for n, d, _ in points)
    if args.budget:
        console.print(best_sizes(fitted, args.budget))
    for budget in args.budget:
        if budget > 10 * largest:
            console.print(
                f"{budget:.3g} FLOPs is {budget / largest:.0f} times the largest run: the law was not shown there.",
                style="yellow",
            )
    if picture:
        from jaxstack.planner import plot  # imported here because it imports JAX

        plot.draw_scaling_law(fitted, points, args.budget, picture)
        print(f"picture  {picture}")
    if args.json:
        files.write_atomic(Path(args.json), json.dumps(as_json(fitted, points), indent=1) + "\n")
        print(f"wrote    {args.json}")


def point(run: runs.LoggedRun) -> tuple[float, float, float]:
    """Returns the parameters, training tokens and last held-out loss of a run, in nats per token.

    Raises:
      ConfigError: the run lacks one of them, or has experts, whose active and total parameters the law does not tell
        apart.
    """
    steps, losses = run.series("eval_loss")
    counts = run.series("parameters")[1]
    batch = run.config.get("data.batch_size")
    length = run.config.get("data.seq_len")
    if not losses.size or not counts.size or not batch or not length:
        raise ConfigError(
            f"{run.path} has no held-out loss or no config.yaml. Train it with train.eval_every, and name it again."
        )
    if run.config.get("model.moe.num_experts"):
        raise ConfigError(f"{run.path} is a mixture of experts, which the law does not describe. Name dense runs.")
    return float(counts[-1]), float(steps[-1] * batch * length), float(losses[-1])


def constants(fitted: scaling_law.Fit) -> Table:
    """Returns the table of constants, beside the constants of Besiroglu et al."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("L = E + A / N^alpha + B / D^beta", "fitted", "95% interval", "Besiroglu et al. 2024"):
        table.add_column(heading, justify="left" if heading.startswith("L") else "right")
    for name, value, low, high, published in zip(
        ("E", "A", "alpha", "B", "beta"), fitted.law, *fitted.interval(), scaling_law.BESIROGLU, strict=True
    ):
        table.add_row(name, f"{value:.4g}", f"{low:.4g} to {high:.4g}", f"{published:.4g}")
    return table


def best_sizes(fitted: scaling_law.Fit, budgets: list[float]) -> Table:
    """Returns the table of the best parameters and tokens for each budget."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("training FLOPs", "parameters", "95% interval", "tokens", "tokens a parameter", "loss, nats"):
        table.add_column(heading, justify="right")
    for budget in budgets:
        n, d = fitted.law.optimum(budget)
        low, high = fitted.optimum_interval(budget)
        loss = fitted.law.loss(n, d)
        table.add_row(
            f"{budget:.3g}", f"{n:.3g}", f"{low:.3g} to {high:.3g}", f"{d:.3g}", f"{d / n:.1f}", f"{loss:.4f}"
        )
    return table


def as_json(fitted: scaling_law.Fit, points: list[tuple[float, float, float]]) -> dict[str, object]:
    """Returns everything that the fit is made from, and its result."""
    low, high = fitted.interval()
    return {
        "runs": [{"parameters": n, "tokens": d, "loss": loss} for n, d, loss in points],
        "objective": fitted.objective,
        "law": fitted.law._asdict(),
        "low": low._asdict(),
        "high": high._asdict(),
    }
