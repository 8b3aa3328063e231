"""Makes the run OUT with a part of a run's layers, heads, hidden units, experts and channels, or with zeros.

OUT/model is a run of its own that has the smaller model at step 0. The commands `generate`, `export` and `train` take
OUT like any other run. OUT/importance.json and OUT/importance.png have the importance of every part.
"""

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from jsonargparse import Namespace

from jaxstack.checkpoint import run_dir
from jaxstack.cli.compress_quantize import (
    add_calibration_arguments,
    add_run_arguments,
    calibration,
    check_mesh,
    print_losses,
    settings_of,
    write_layers,
)
from jaxstack.common.counts import plural
from jaxstack.config import Config, ConfigError
from jaxstack.config.bounds import PositiveInt
from jaxstack.config.reading import parse
from jaxstack.config.reading.parse import Parser
from jaxstack.config.training import TAUGHT_FAMILIES
from jaxstack.loaded import load_run

if TYPE_CHECKING:  # these import JAX, for which help must not wait
    import numpy as np

    from jaxstack.common.tree import Batch
    from jaxstack.compress.importance import Importance
    from jaxstack.compress.prune import Losses
    from jaxstack.compress.sparsify import Settings
    from jaxstack.compress.unfinished import Unfinished
    from jaxstack.families.surgery import Kept
    from jaxstack.loaded.trained_run import TrainedRun

SIZES = {
    "layers": "layers that stay; in a model with an encoder and a decoder, layers of the decoder",
    "encoder_layers": "layers that stay of an encoder beside a decoder, or of the tower for pictures; null means as "
    "many as --layers if model.encoder_layers is null, or else all",
    "text_layers": "layers that stay in a diffusion model's stack for texts",
    "caption_layers": "layers that stay in a contrastive model's stack for captions",
    "heads": "query heads that stay in each layer",
    "kv_heads": "key and value heads that stay; null means that each keeps its number of query heads if possible",
    "d_ff": "hidden units of each MLP, or of each expert, that stay",
    "experts": "experts that stay in each layer",
    "d_model": "channels of the residual stream that stay",
}


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    add_run_arguments(parser)
    for name, text in SIZES.items():
        parser.add_argument(f"--{name}", type=PositiveInt | None, default=None, help=text)
    parser.add_argument(
        "--layers_by",
        type=Literal["loss", "cosine", "order"],
        default="loss",
        help="which layers to remove: loss removes one by one the layer without which the loss is lowest, cosine those "
        "that change their input least, order those that the file of --order names first",
    )
    parser.add_argument(
        "--experts_by",
        type=Literal["output", "load", "order"],
        default="output",
        help="which experts to keep: output those with the largest outputs, load those that get most tokens, order "
        "those that the file of --order names last",
    )
    parser.add_argument(
        "--order",
        type=str | None,
        default=None,
        help="file of `jaxstack compress order`, for --layers_by=order and --experts_by=order",
    )
    parser.add_argument(
        "--sparsity",
        type=str | None,
        default=None,
        help="share of the weights of each matrix that become zero, or N:M to keep N of M neighbouring weights",
    )
    parser.add_argument(
        "--method",
        type=Literal["sparsegpt", "wanda", "magnitude"],
        default="sparsegpt",
        help="with --sparsity: method that chooses the zeros; sparsegpt also corrects the other weights",
    )
    add_calibration_arguments(parser)


def main(args: Namespace) -> None:
    """Makes the run directory and prints the held-out loss before and after.

    Raises:
      ConfigError: a run, sizes or mesh that do not fit together, or a folder that exists.
    """
    opened = open_run(args)
    out = Path(args.out)

    from jaxstack import families
    from jaxstack.compress import unfinished
    from jaxstack.models import params

    needed = bool(_given(args)) or args.method != "magnitude"
    batches = calibration(opened, args.sequences if needed else 0)
    new, report = (opened, None) if _given(args) == {} else smaller(opened, args, batches)
    if args.sparsity is not None:
        names = ("layers_by", "experts_by", "order", "sparsity", "method", "sequences", *SIZES)
        store = unfinished.open_folder(out, settings_of(args, opened, names))
        new = with_zeros(new, settings(args), batches, store)
        write(Path(args.run), new, report, out, keep_zeros=True)
        store.remove()
    else:
        write(Path(args.run), new, report, out, keep_zeros=False)
    if report is not None:
        before, after = (params.count(families.spec(one.model)) for one in (opened, new))
        print(f"{plural(before, 'parameter', spec=',')} before, {after:,} after ({after / before - 1:+.1%})")
    print_losses(opened.evaluate(), new.evaluate(), opened.model.objective.unit)
    teacher = f" --distill.teacher={args.run}" if new.model.family in TAUGHT_FAMILIES else ""
    print(f"wrote {out}; train it with `jaxstack train --config={out}/config.yaml{teacher}`")


def _given(args: Namespace) -> dict[str, int]:
    """Returns the sizes that the command line names."""
    return {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}


def open_run(args: Namespace) -> "TrainedRun":
    """Checks the arguments, and returns the run on the mesh of the calibration.

    Raises:
      ConfigError: see `main`.
    """
    run = Path(args.run)
    out = Path(args.out)
    cfg, tokenizer = load_run.read_run(run)
    if out.exists():
        raise ConfigError(f"{out} exists and is never overwritten. Name another folder.")
    if args.sparsity is None and not _given(args):
        raise ConfigError(f"the command names nothing to remove. Use --{', --'.join(SIZES)} or --sparsity.")
    check_mesh(args.mesh)
    _check_order(args)

    def check(on_mesh: Config, placement: object) -> None:
        from jaxstack.compress import calibrate, prune, sparsify
        from jaxstack.families import surgery

        small = cfg.model.base
        if _given(args) or cfg.model.family in surgery.COUNTS:
            sizes = prune.smaller_sizes(cfg.model, _given(args))
            for each in (cfg, on_mesh):  # the mesh of the run, and the mesh of the calibration
                replace(_without_adapters(each), model=prune.smaller_model(each.model.base, sizes))
            small = prune.smaller_model(small, sizes)
        if args.sparsity is not None:
            sparsify.check_groups(small, settings(args).pattern)
            if args.method != "magnitude":
                calibrate.require_inputs(small, "--method=magnitude")

    plain = replace(cfg, model=replace(cfg.model, pad_vocab_to=None))
    opened = load_run.open_run(run, plain, tokenizer, args.mesh, args.step, check=check)
    return replace(opened, config=_without_adapters(opened.config))


def _check_order(args: Namespace) -> None:
    """Checks that a choice of parts, the parts and the file of an order are named together.

    Raises:
      ConfigError: one is named without the others.
    """
    given = _given(args)
    for flag, default, fewer in (
        ("layers_by", "loss", any(name.endswith("layers") for name in given)),
        ("experts_by", "output", "experts" in given),
    ):
        value = getattr(args, flag)
        if value != default and not fewer:
            parts = flag.removesuffix("_by")
            raise ConfigError(
                f"--{flag}={value} is not used, because no {parts} are removed. Set --{parts}, or leave it out."
            )
    uses = [f"--{flag}=order" for flag in ("layers_by", "experts_by") if getattr(args, flag) == "order"]
    if uses and args.order is None:
        raise ConfigError(f"{uses[0]} needs a measured order. Set --order to the file of `jaxstack compress order`.")
    if args.order is not None and not uses:
        raise ConfigError(f"--order={args.order} is not used. Set --layers_by=order or --experts_by=order.")


def read_order(args: Namespace) -> dict[str, object]:
    """Returns the order of `--order`; without the flag it is empty.

    Raises:
      ConfigError: not such a file, or parts were quantised and not removed.
    """
    if args.order is None:
        return {}
    from jaxstack.common import files

    found = files.read_json(Path(args.order).expanduser(), "Make it with `jaxstack compress order`.")
    if not isinstance(found, dict) or found.get("by") != "removed":
        raise ConfigError(
            f"--order={args.order} is not an order of parts that were removed. Make one with `jaxstack compress order`."
        )
    return found


def _without_adapters(cfg: Config) -> Config:
    """Returns a configuration for parameters with adapters merged."""
    return cfg.with_model(cfg.model.base)


def settings(args: Namespace) -> "Settings":
    """Returns which weights become zero."""
    from jaxstack.compress.sparsify import Settings
    from jaxstack.compress.sparsity import parse_pattern

    return Settings(parse_pattern(args.sparsity), args.method)


class Report(NamedTuple):
    """What was measured, and what stays.

    Attributes:
      found: importance of every part.
      kept: the parts that stay.
      losses: losses of the model without each layer, if they were measured.
    """

    found: "Importance"
    kept: "Kept"
    losses: "Losses | None"


def smaller(run: "TrainedRun", args: Namespace, batches: list["Batch"]) -> tuple["TrainedRun", Report]:
    """Returns the run with the parts that matter most."""
    from jaxstack import families
    from jaxstack.compress import prune
    from jaxstack.compress.calibrate import Walk
    from jaxstack.compress.importance import measure
    from jaxstack.compress.order import read_experts_of, read_layers_of
    from jaxstack.families.context import make_context

    sizes = prune.smaller_sizes(run.model, _given(args))
    found = measure(Walk.of(run.model, run.context), run.params, batches)
    order = read_order(args)
    if args.experts_by == "load":
        found = _by_experts(found, {name: own.load for name, own in found.stacks.items() if own.experts.size})
    if args.experts_by == "order":
        routed = {name: stack for name, stack in Walk.of(run.model, run.context).stacks.items() if "moe" in stack.spec}
        found = _by_experts(found, read_experts_of(order, routed, run.model.moe.num_experts))
    small = prune.smaller_model(run.model, sizes)
    stacks = families.of(run.model).stacks(run.model)
    stay = {name: own.depth // own.period for name, own in families.of(small).stacks(small).items()}
    fewer = {name: count for name, count in stay.items() if count < stacks[name].depth // stacks[name].period}
    steps = {}
    losses = None
    if fewer and args.layers_by == "order":
        above = read_layers_of(order, stacks)
        summed = {name: own.reshape(-1, stacks[name].period).sum(-1) for name, own in above.items()}
        steps = {name: prune.largest(own, stay[name]) for name, own in summed.items()}
    if fewer and args.layers_by == "loss":
        search = prune.LayerSearch(run.config, run.context, run.params, batches)
        steps, losses = search.leave_out(fewer, partial(print, flush=True))
    kept = prune.choose(run.model, sizes, found, steps)
    cfg = run.config.with_model(small)
    assert run.context.layout.mesh is not None
    context = make_context(cfg, run.context.layout.mesh)
    values = prune.keep(run.model, small, context, run.params, kept)
    return replace(run, config=cfg, context=context, params=values), Report(found, kept, losses)


def _by_experts(found: "Importance", experts: "dict[str, np.ndarray]") -> "Importance":
    """Returns the importance with another importance of experts, by the name of their stack."""
    return replace(
        found,
        stacks={
            name: replace(own, experts=experts[name]) if name in experts else own for name, own in found.stacks.items()
        },
    )


def with_zeros(run: "TrainedRun", how: "Settings", batches: list["Batch"], store: "Unfinished") -> "TrainedRun":
    """Returns the run with zeros in the matrices of its layers."""
    from jaxstack.compress import quantize, sparsify
    from jaxstack.compress.calibrate import Walk

    walk = Walk.of(run.model, run.context)
    if how.method == "magnitude":
        batches = []
    layers = write_layers(sparsify.sparsify(walk, run.params, batches, how, store.read), store, run)
    return replace(run, params=quantize.join(run.model, run.params, layers))


def write(source: Path, run: "TrainedRun", report: Report | None, out: Path, keep_zeros: bool) -> None:
    """Writes the run directory, with a run in its folder `model` that has the parameters at step 0."""
    from jaxstack import data
    from jaxstack.checkpoint import store
    from jaxstack.compress import draw, prune
    from jaxstack.hf import safetensors
    from jaxstack.training.state import Recipe, abstract_state, make_state, start_from

    old, _ = load_run.read_run(source)
    model = replace(run.model, pad_vocab_to=old.model.pad_vocab_to)
    begin = replace(old.run, dir=str(out), init_from=str((out / "model").resolve()), init_adapter=None)
    cfg = replace(old, run=begin, model=model, optim=replace(old.optim, keep_zeros=keep_zeros or old.optim.keep_zeros))
    alone = replace(
        run.config,
        run=replace(begin, dir=str(out / "model"), init_from=None),
        model=run.model,
        optim=replace(old.optim, keep_zeros=False),
    )
    state = make_state(Recipe.of(alone), run.context, abstract_state(Recipe.of(alone), run.context))
    state = start_from(alone.model, state, run.params)
    metadata = {"config": asdict(alone), "versions": store.versions(), "next_batch": 0}
    metadata["data"] = data.load_for(alone.model, alone.data, alone.aim).fingerprint
    with safetensors.new_folder(out) as made:
        for folder, its in ((made, cfg), (made / "model", alone)):
            folder.mkdir(exist_ok=True)
            (folder / "config.yaml").write_text(parse.to_yaml(its))
            (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
        with store.Checkpoints(alone.checkpoint, run_dir.checkpoints(made / "model")) as checkpoints:
            checkpoints.save(0, state, metadata)
        if report is not None:
            described = prune.describe(report.found, report.kept, report.losses)
            (made / "importance.json").write_text(json.dumps({"run": str(source)} | described) + "\n")
            draw.draw(report.found, report.kept, report.losses, made / "importance.png")
