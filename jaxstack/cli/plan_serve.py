"""Predicts what serving a decoder takes: memory, largest batch, latency and throughput, cost of a million tokens.

Without flags for the mesh, every way to put copies of the model on the devices is compared: one card for a copy, or
several. The model of time is fitted to published figures of servers. It takes the configuration of `jaxstack train`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from jsonargparse import Namespace

from jaxstack.cli.plan import add_chips, with_vocabulary
from jaxstack.cli.plan_target import add_network
from jaxstack.common import files
from jaxstack.common.counts import plural
from jaxstack.common.errors import ConfigError
from jaxstack.config.bounds import PositiveFloat, PositiveInt
from jaxstack.config.reading.parse import Parser, given_keys, user_path

if TYPE_CHECKING:  # JAX must start after the environment is set
    from jaxstack.planner.serving import Served, Server

WEIGHTS = ("bfloat16", "fp8", "int8")
CACHES = ("bfloat16", "fp8", "int8")
SPLIT = ("mesh.tensor", "mesh.expert")
"""Axes that split a copy of the model."""


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    from typing import Literal

    add_chips(parser)
    add_network(parser)
    parser.add_argument("--prompt", type=PositiveInt, default=1024, help="tokens of a prompt")
    parser.add_argument("--tokens", type=PositiveInt, default=256, help="new tokens of a sequence")
    parser.add_argument(
        "--batch", type=list[int], default=[], metavar="[N,...]",
        help="sequences that a copy of the model serves at once, such as [1,8,64]; by default powers of two that fit",
    )  # fmt: skip
    parser.add_argument(
        "--weights", type=Literal[*WEIGHTS], default="bfloat16",
        help="format of the matrices of layers; fp8 also multiplies in 8 bits",
    )  # fmt: skip
    parser.add_argument("--cache", type=Literal[*CACHES], default="bfloat16", help="format of keys and values")
    parser.add_argument("--price", type=PositiveFloat | None, help="price of a device for an hour")
    parser.add_argument("--explain", action="store_true", help="print the formula of each part with its numbers")
    parser.add_argument(
        "--json", metavar="FILE", type=user_path, nargs="?", const="-",
        help="file to write all figures to; without a name, one object is printed in place of the tables",
    )  # fmt: skip
    parser.add_config()


def main(args: Namespace) -> None:
    """Prints the tables, and writes the file that is asked for.

    Raises:
      ConfigError: the target does not exist, no copy is possible, or none fits.
    """
    import json
    import os
    from pathlib import Path

    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if not args.target:
        raise ConfigError("--target is missing. Name a chip and a number, such as --target h100:8.")
    if min(args.batch, default=1) < 1:
        raise ConfigError(f"--batch={args.batch} has a batch without sequences. Use numbers from 1.")
    written = files.writable("--json", args.json, (".json",)) if args.json and args.json != "-" else None
    family = args.cfg.model.family
    if family != "decoder":
        raise ConfigError(f"model.family={family} is not served with a cache of keys and values. Plan a decoder.")
    cfg = with_vocabulary(args.cfg)

    from jaxstack.planner import serving
    from jaxstack.planner.figures import limits_of

    assert get_args(serving.Weights) == WEIGHTS
    assert get_args(serving.CacheFormat) == CACHES
    link, network = (1e9 * value if value else None for value in (args.link, args.network))
    chip, devices, limits = limits_of(args.target, link, network)
    given = given_keys(args.words, SPLIT)
    sizes = cfg.mesh.sizes
    kept = {key.partition(".")[2]: sizes[key.partition(".")[2]] for key in given}
    servers = serving.servers(cfg.model, limits, devices, args.weights, args.cache, kept)
    if not servers:
        shown = " ".join(f"--mesh.{axis}={size}" for axis, size in kept.items())
        raise ConfigError(
            f"no number of copies of the model {f'with {shown} ' if shown else ''}fits on {plural(devices, 'device')} "
            f"({args.target}). Use sizes that divide the devices, the heads and the experts."
        )
    slots = args.prompt + args.tokens
    fitting = [server for server in servers if server.largest_batch(slots)]
    if not fitting:
        raise ConfigError(_too_large(servers, args.target, slots))
    whole = [_figures(server, args.prompt, args.tokens, args.batch, args.price) for server in servers]
    best = max(fitting, key=lambda s: serving.serve(s, s.largest_batch(slots), args.prompt, args.tokens).tokens_per_s)
    found = {
        "chip": chip, "devices": devices, "prompt": args.prompt, "tokens": args.tokens, "weights": args.weights,
        "cache": args.cache, "price": args.price, "copies": whole, "best": servers.index(best),
    }  # fmt: skip
    text = json.dumps(found, indent=1)
    if args.json == "-":
        print(text)
        return
    print(f"{devices} {chip}; {_traffic(args.prompt, args.tokens)};", end=" ")
    print(f"weights in {args.weights}, cache in {args.cache}\n")
    print(_copies_table(whole, args.price))
    _print_best(best, whole[servers.index(best)]["batches"], args)
    print(f"\n{serving.published_errors(limits.chip.platform)}")
    if written:
        files.write_atomic(Path(written), text + "\n")
        print(f"wrote {written}")


def _print_best(best: "Server", batches: Sequence[Mapping[str, Any]], args: Namespace) -> None:
    """Prints memory, batches and, with `--explain`, the parts of the way with the highest throughput."""
    from jaxstack.planner.serving import serve

    slots = args.prompt + args.tokens
    largest = best.largest_batch(slots)
    print(f"\nmemory of a device with {best}, GiB")
    print(_memory_table(best, slots))
    print(f"\nbatches of {best}")
    print(_batches_table(batches, args.price))
    if larger := sorted(n for n in args.batch if n > largest):
        print(f"{', '.join(map(str, larger))} sequences do not fit: the largest batch is {largest:,}")
    if args.explain:
        one = serve(best, largest, args.prompt, args.tokens)
        print(f"\nparts of the largest batch, {plural(one.batch, 'sequence')} of a copy\n{_explained(one)}")


def _figures(server: "Server", prompt: int, tokens: int, batches: list[int], price: float | None) -> dict[str, Any]:
    """Returns all figures of one way to split a copy. `batches` are those to show; none means powers of two."""
    from jaxstack.planner.serving import serve

    largest = server.largest_batch(prompt + tokens)
    powers = [2**k for k in range(0, 20, 2) if 2**k < largest]
    shown = sorted({*(n for n in batches if n <= largest), *([] if batches else [*powers, largest][:largest])})
    found = {
        "name": str(server), "copies": server.copies, "tensor": server.tensor, "expert": server.expert,
        "weight_bytes": server.weight_bytes, "cache_bytes_of_a_sequence": server.cache_bytes(prompt + tokens),
        "usable_bytes": server.room, "largest_batch": largest,
    }  # fmt: skip
    rows = [serve(server, n, prompt, tokens) for n in shown]
    return found | {"batches": [_row(one, price) for one in rows]}


def _row(one: "Served", price: float | None) -> dict[str, Any]:
    """Returns the figures of a batch."""
    low, high = one.interval
    return {
        "batch": one.batch, "first_token_s": one.first_token, "token_s": one.each_token,
        "token_s_low": low * one.each_token, "token_s_high": high * one.each_token, "sequence_s": one.seconds,
        "tokens_per_s": one.tokens_per_s, "tokens_per_s_per_device": one.tokens_per_s / one.server.devices,
        "tokens_per_s_low": one.tokens_per_s / high, "tokens_per_s_high": one.tokens_per_s / low,
        "cost_per_million_tokens": one.cost(price) if price else None,
        "parts": {"prefill": dict(one.prefill), "token": dict(one.step)},
    }  # fmt: skip


def _traffic(prompt: int, tokens: int) -> str:
    """Returns the lengths of prompt and answer of a request, for users."""
    return f"prompts of {plural(prompt, 'token', spec=',')}, {plural(tokens, 'new token', spec=',')}"


def _too_large(servers: list["Server"], target: str, slots: int) -> str:
    """Returns the error that no copy fits, with the memory that the smallest needs."""
    least = min(servers, key=lambda s: s.weight_bytes + s.cache_bytes(slots))
    need = (least.weight_bytes + least.cache_bytes(slots)) / 2**30
    return (
        f"no copy of the model fits {target}: with {least} the weights and the cache of one sequence of "
        f"{plural(slots, 'token')} need {need:.4g} GiB, and {least.room / 2**30:.4g} GiB of a device are used. Use "
        f"more devices, --weights=int8, or fewer tokens."
    )


def _cells(rows: list[list[str]]) -> str:
    """Returns rows of cells as aligned lines; the first column is aligned to the left."""
    first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        aligned = [cell.rjust(width) for cell, width in zip(cells, others, strict=True)]
        lines.append("  ".join([name.ljust(first), *aligned]))
    return "\n".join(lines)


def _copies_table(whole: Sequence[Mapping[str, Any]], price: float | None) -> str:
    """Returns one line for each way to split a copy."""
    rows = [["copies", "GiB of weights", "largest batch", "ms a token, one", "most tokens/s a device"]]
    if price:
        rows[0].append("least cost of a million")
    for one in whole:
        line = [one["name"], f"{one['weight_bytes'] / 2**30:,.2f}"]
        if not one["batches"]:
            line += ["does not fit"] + ["-"] * (3 if price else 2)
        else:
            most = max(one["batches"], key=lambda row: row["tokens_per_s"])
            line += [f"{one['largest_batch']:,}", f"{1e3 * one['batches'][0]['token_s']:.2f}"]
            line += [f"{most['tokens_per_s_per_device']:,.0f}"]
            if price:
                line.append(f"{min(row['cost_per_million_tokens'] for row in one['batches']):.3g}")
        rows.append(line)
    return _cells(rows)


def _memory_table(server: "Server", slots: int) -> str:
    """Returns the memory of a device by part."""
    gib = 2**30
    rows = [
        ["weights", f"{server.weight_bytes / gib:,.3f}"],
        [f"cache of a sequence of {plural(slots, 'token', spec=',')}", f"{server.cache_bytes(slots) / gib:,.4f}"],
        ["used of the device, nine tenths", f"{server.room / gib:,.3f}"],
    ]
    return _cells(rows)


def _batches_table(batches: Sequence[Mapping[str, Any]], price: float | None) -> str:
    """Returns one line for each batch."""
    header = ["batch", "first token ms", "token ms", "in nine of ten cases", "tokens/s", "tokens/s a device"]
    rows = [[*header, *(["cost of a million"] if price else [])]]
    for row in batches:
        low = 1e3 * row["token_s_low"]
        high = 1e3 * row["token_s_high"]
        line = [f"{row['batch']:,}", f"{1e3 * row['first_token_s']:,.1f}", f"{1e3 * row['token_s']:.2f}"]
        line += [f"{low:.2f} to {high:.2f}", f"{row['tokens_per_s']:,.0f}", f"{row['tokens_per_s_per_device']:,.0f}"]
        rows.append([*line, *([f"{row['cost_per_million_tokens']:.3g}"] if price else [])])
    return _cells(rows)


def _explained(one: "Served") -> str:
    """Returns the seconds of each part of a prefill and of a token, with the formula."""
    from jaxstack.planner.serving import explain

    lines = []
    for title, work in (("prefill", one.prefill_work), ("token", one.step_work)):
        for name, seconds, formula in explain(work, one.server.limits.chip.platform):
            lines.append([f"{title}, {name}", f"{1e3 * seconds:,.4f} ms", formula])
    widths = [max(len(line[i]) for line in lines) for i in range(2)]
    return "\n".join(f"{a:<{widths[0]}}  {b:>{widths[1]}}  = {c}" for a, b, c in lines)
