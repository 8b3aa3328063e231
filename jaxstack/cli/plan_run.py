"""Plans a run for a budget of FLOPs, time or money: model, tokens, batch, learning rate, mesh, time, energy and cost.

The scaling law gives the size, and published rules give the rest. `--config` names the model's family and the data.
"""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from jsonargparse import Namespace
from rich.console import Console
from rich.table import Table

from jaxstack.cli.plan import with_vocabulary
from jaxstack.common import files
from jaxstack.common.counts import plural
from jaxstack.config import Config, ConfigError, flat
from jaxstack.config.bounds import NonNegativeFloat, PositiveFloat, PositiveFraction
from jaxstack.config.reading.parse import Parser, given_keys, user_path
from jaxstack.planner.scaling_law import BESIROGLU, HOFFMANN, Fit, published

if TYPE_CHECKING:  # JAX must start after the environment is set
    from jaxstack.planner.run_plan import Machine, RunPlan


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    optional = PositiveFloat | None
    parser.add_argument("--budget", type=optional, metavar="FLOPS", help="training FLOPs, 6 N D, such as 1e21")
    parser.add_argument("--days", type=optional, help="days of training on --target")
    parser.add_argument("--dollars", type=optional, help="money for training on --target, with --price")
    parser.add_argument("--target", type=str | None, metavar="CHIP:TOPOLOGY", help="chip and number, such as h100:8x8")
    parser.add_argument("--price", type=optional, help="price of one device for an hour")
    parser.add_argument("--watts", type=optional, help="watts of one device, with its share of the machine")
    parser.add_argument(
        "--mfu",
        type=PositiveFraction | None,
        help="fraction of the peak that training reaches on --target; null means what `plan time` predicts",
    )
    parser.add_argument(
        "--served",
        type=NonNegativeFloat,
        default=0.0,
        metavar="TOKENS",
        help="tokens of later use, whose FLOPs count too; with more, a smaller model is trained for longer",
    )
    parser.add_argument(
        "--tokens_per_parameter",
        type=optional,
        metavar="RATIO",
        help="training tokens per parameter, in place of the best ratio",
    )
    parser.add_argument(
        "--out", type=user_path, metavar="FILE", help="configuration to write, for jaxstack train --config"
    )
    parser.add_argument("--json", type=user_path, metavar="FILE", help="file to write with all figures")
    parser.add_argument("--plot", type=user_path, metavar="FILE", help="picture of the loss against compute")
    parser.add_config("llama3_8b")


def main(args: Namespace) -> None:
    """Plans, prints the tables and writes the files that are asked for.

    Raises:
      ConfigError: the budget is missing or too small, nothing fits, or a file cannot be written.
    """
    _check(args)
    out = files.writable("--out", args.out, (".yaml", ".yml")) if args.out else None
    if out and out.exists():
        raise ConfigError(f"--out={out} exists, and is not overwritten. Name a new file.")
    tables = files.writable("--json", args.json, (".json",)) if args.json else None
    picture = files.writable("--plot", args.plot, files.PICTURES) if args.plot else None
    base = with_vocabulary(args.cfg)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before JAX is imported: the target's chips are not here

    from jaxstack.planner import run_plan

    machine = _machine(args)
    sizes = run_plan.served_sizes(args.served)
    if args.tokens_per_parameter:
        sizes = run_plan.ratio_sizes(args.tokens_per_parameter)
    given = given_keys(args.words, flat(Config()))
    if args.budget:
        found = run_plan.plan_budget(base, given, args.budget, sizes, machine)
    else:
        assert machine is not None
        hours = args.days * 24 if args.days else args.dollars / args.price / machine.devices
        found = run_plan.plan_time(base, given, hours * 3600, sizes, machine)
    law = published()
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
    console.print(sizes_table(law, found))
    console.print(plan_table(found))
    if args.served:
        console.print(served_line(found, args.served))
    for warning in found.warnings:
        console.print(warning, style="yellow")
    if out:
        with out.open("x", encoding="utf-8") as file:
            file.write(as_yaml(found, out, args))
        print(f"wrote    {out}")
    if tables:
        files.write_atomic(tables, json.dumps(as_json(law, found), indent=1) + "\n")
        print(f"wrote    {tables}")
    if picture:
        from jaxstack.planner import plot

        plot.draw_budget(law, found.flops, (found.parameters, found.tokens), picture)
        print(f"picture  {picture}")


def _check(args: Namespace) -> None:
    named = [f"--{name}={getattr(args, name):g}" for name in ("budget", "days", "dollars") if getattr(args, name)]
    if len(named) != 1:
        found = f"{' and '.join(named)} are given" if named else "no budget is given"
        raise ConfigError(f"{found}. Name one of --budget=1e21, --days=7 and --dollars=50000.")
    if not args.budget and not args.target:
        raise ConfigError(f"{named[0]} needs a machine. Name it, such as --target h100:8x8.")
    if args.dollars and not args.price:
        raise ConfigError(f"{named[0]} needs the price of one device for an hour. Add it, such as --price 2.5.")
    if args.served and args.tokens_per_parameter:
        raise ConfigError(
            f"--served={args.served:g} and --tokens_per_parameter={args.tokens_per_parameter:g} both set how long a "
            f"model is trained. Use one of them."
        )


def _machine(args: Namespace) -> "Machine | None":
    if not args.target:
        return None
    from jaxstack.planner import figures, run_plan

    _, devices, limits = figures.limits_of(args.target)
    return run_plan.Machine(args.target, limits.chip, devices, args.mfu, args.watts, args.price)


def sizes_table(law: Fit, found: "RunPlan") -> Table:
    """Returns the best size for the plan's FLOPs by two laws, with the interval of the first, beside the plan."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for i, name in enumerate((f"{found.flops:.3g} FLOPs", "this plan", "Besiroglu 2024", "95% interval",
                              "Hoffmann 2022")):  # fmt: skip
        table.add_column(name, justify="right" if i else "left")
    c = found.flops
    n = found.parameters
    d = found.tokens
    rows = {
        "parameters": (n, lambda one: one.optimum(c)[0]),
        "tokens": (d, lambda one: one.optimum(c)[1]),
        "tokens a parameter": (d / n, lambda one: one.optimum(c)[1] / one.optimum(c)[0]),
        "loss at the best size, nats": (None, lambda one: one.loss(*one.optimum(c))),
        "loss of this plan, nats": (None, lambda one: one.loss(n, d)),
    }
    for name, (value, figure) in rows.items():
        low, high = law.interval_of(figure)
        table.add_row(name, "" if value is None else f"{value:.3g}", f"{figure(BESIROGLU):.4g}",
                      f"{low:.4g} to {high:.4g}", f"{figure(HOFFMANN):.4g}")  # fmt: skip
    return table


def figures(found: "RunPlan") -> dict[str, str]:
    """Returns the lines of the plan's table."""
    m = found.cfg.model
    optim = found.cfg.optim
    machine = found.machine
    heads = plural(m.num_heads, "head") + (f" ({m.kv_heads} of keys)" if m.kv_heads != m.num_heads else "")
    mlp = f"MLP {m.ff_width}"
    if m.moe.num_experts:
        mlp = f"{plural(m.moe.num_experts, 'expert')} of width {m.expert_width}, {m.moe.choices} for a token"
    lines = {
        "parameters": f"{found.stored_parameters:,}"
        + (f", of which a token uses {found.parameters:,}" if m.moe.num_experts else ""),
        "model": f"{plural(m.num_layers, 'layer')}, width {m.d_model}, {heads}, {mlp}",
        "batch": f"{plural(found.batch, 'token', spec=',')}, {plural(found.cfg.data.batch_size, 'sequence')} "
        f"(nanochat's rule)",
        "steps": f"{found.cfg.train.steps:,}, {found.tokens:.4g} tokens",
        "learning rate": f"{optim.lr:g}, b2 {optim.b2:g}, "
        f"warm-up {plural(optim.warmup_steps, 'step')} (square-root rule)",
    }
    if machine is None or found.seconds is None or found.need is None:
        return lines
    sizes = ", ".join(f"{axis} {n}" for axis, n in found.cfg.mesh.sizes.items() if n > 1) or "one device"
    hours = found.seconds / 3600
    each = found.seconds / found.cfg.train.steps
    whole = f"{hours / 24:.3g} days" if hours >= 48 else f"{hours:.3g} hours"
    train = found.cfg.train
    lines["mesh"] = f"{sizes}; grad_accum {train.grad_accum}, remat {train.remat} on {machine.name}"
    room = machine.chip.hbm_bytes / 2**30
    lines["memory"] = f"{found.need.formula / 2**30:.1f} GiB by formula of {room:.0f} GiB on a device"
    lines["time"] = f"{whole} ({each:.3g} s a step) at {machine.mfu:.0%} MFU"
    if machine.watts:
        lines["energy"] = f"{energy(found):,.4g} MWh at {machine.watts:g} W a device"
    if machine.price:
        lines["cost"] = f"{cost(found):,.0f} at {machine.price:g} for a device and hour"
    return lines


def energy(found: "RunPlan") -> float | None:
    """Returns the energy of the run in MWh, if the power is known."""
    if found.machine is None or found.machine.watts is None or found.seconds is None:
        return None
    return found.seconds / 3600 * found.machine.devices * found.machine.watts / 1e6


def cost(found: "RunPlan") -> float | None:
    """Returns the price of the run, if the price of a device for an hour is known."""
    if found.machine is None or found.machine.price is None or found.seconds is None:
        return None
    return found.seconds / 3600 * found.machine.devices * found.machine.price


def plan_table(found: "RunPlan") -> Table:
    """Returns the plan, a line for each figure."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for name, text in figures(found).items():
        table.add_row(name, text)
    return table


def served_line(found: "RunPlan", served: float) -> str:
    """Returns how the FLOPs of training and use compare with the FLOPs of a model that is best for training alone."""
    total = found.flops + 2 * found.parameters * served
    n, d = BESIROGLU.optimum(BESIROGLU.training_flops(BESIROGLU.loss(found.parameters, found.tokens)))
    plain = 6 * n * d + 2 * n * served
    return (
        f"training and {served:.3g} tokens of use take {total:.3g} FLOPs. The same loss with the fewest FLOPs of "
        f"training ({n:.3g} parameters, {d:.3g} tokens) takes {plain:.3g}."
    )


def as_yaml(found: "RunPlan", out: Path, args: Namespace) -> str:
    """Returns the configuration as YAML: every value that is not the default, after comments with the plan."""
    values = flat(found.cfg)
    if "run.dir" not in given_keys(args.words, flat(Config())):
        values["run.dir"] = f"runs/{out.stem}"
    nested: dict[str, object] = {}
    for key, default in flat(Config()).items():
        if values[key] != default:
            *path, name = key.split(".")
            group = nested
            for part in path:
                group = group.setdefault(part, {})  # type: ignore[assignment]
            value = values[key]
            group[name] = list(value) if isinstance(value, tuple) else value
    lines = [f"jaxstack train --config {out}", *(f"{name}: {text}" for name, text in figures(found).items())]
    lines.append(
        f"predicted loss: {BESIROGLU.loss(found.parameters, found.tokens):.4g} nats (the law's data and tokenizer)"
    )
    return "".join(f"# {line}\n" for line in lines) + yaml.safe_dump(nested, sort_keys=False, allow_unicode=True)


def as_json(law: Fit, found: "RunPlan") -> dict[str, object]:
    """Returns all figures of the plan."""
    n = found.parameters
    d = found.tokens
    c = found.flops
    machine = found.machine
    return {
        "flops": c,
        "parameters": n,
        "stored_parameters": found.stored_parameters,
        "tokens": d,
        "loss": BESIROGLU.loss(n, d),
        "loss_interval": law.interval_of(lambda one: one.loss(n, d)),
        "best": {"besiroglu_2024": BESIROGLU.optimum(c), "hoffmann_2022": HOFFMANN.optimum(c)},
        "best_parameters_interval": law.optimum_interval(c),
        "steps": found.cfg.train.steps,
        "batch_tokens": found.batch,
        "seconds": found.seconds,
        "predicted_seconds_of_a_step": found.predicted_step,
        "devices": machine and machine.devices,
        "mfu": machine and machine.mfu,
        "memory_bytes": found.need and found.need.formula,
        "energy_mwh": energy(found),
        "cost": cost(found),
        "warnings": found.warnings,
        "config": {k: list(v) if isinstance(v, tuple) else v for k, v in flat(found.cfg).items()},
    }
