"""Quantises the matrices of a run's layers, and makes the run OUT with the result.

OUT/model is a Hugging Face folder in the layout of bitsandbytes for nf4, and of compressed-tensors for other formats.
vLLM and transformers load both. For GPT-2, and for models that are not decoders, OUT/model has codes that jaxstack
alone reads. The commands `generate`, `export` and `train` take OUT like any other run. Embedding, head, norms, biases
and routers stay as they are.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jsonargparse import Namespace

from jaxstack.checkpoint import manifest, run_dir
from jaxstack.cli.export_model import write_tokenizer
from jaxstack.common.counts import plural
from jaxstack.config import Config, ConfigError, LoraConfig, MeshConfig, ModelConfig
from jaxstack.config.bounds import PositiveInt
from jaxstack.config.reading import parse
from jaxstack.config.reading.parse import Parser, user_path
from jaxstack.config.scheme import Name, Scheme
from jaxstack.loaded import load_run

if TYPE_CHECKING:  # these import JAX, for which help must not wait
    import numpy as np

    from jaxstack.common.tree import Batch
    from jaxstack.compress.calibrate import Walk
    from jaxstack.compress.quantize import Codes, QuantizedLayer, Settings
    from jaxstack.compress.unfinished import Unfinished
    from jaxstack.loaded.trained_run import Evaluation, TrainedRun


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    add_run_arguments(parser)
    parser.add_argument("--weights", type=Name, default="int4", help="format of the matrices")
    parser.add_argument(
        "--group",
        type=PositiveInt | None,
        default=64,
        help="inputs that share a scale; null means all inputs of an output, as fp8 needs",
    )
    parser.add_argument(
        "--method",
        type=Literal["gptq", "awq", "rtn"],
        default="gptq",
        help="gptq and awq keep outputs on calibration text as they were; rtn rounds to the nearest and needs no text",
    )
    parser.add_argument(
        "--activations",
        type=Literal["none", "int8"],
        default="none",
        help="format of the inputs of the matrices, with a scale for each token; int8 needs --weights=int8 "
        "--group=null",
    )
    parser.add_argument(
        "--dtype",
        type=Literal["float32", "bfloat16"],
        default="float32",
        help="dtype of the scales and of the parameters that are not quantised",
    )
    parser.add_argument(
        "--int4_experts",
        type=PositiveInt | None,
        default=None,
        help="with --weights=int8: number of experts of each layer that get 4 bits; --experts_by chooses them",
    )
    parser.add_argument(
        "--experts_by",
        type=Literal["load", "order"],
        default="load",
        help="with --int4_experts: take the experts that get fewest tokens, or the first ones of the file of --order",
    )
    parser.add_argument(
        "--order",
        type=str | None,
        default=None,
        help="file of `jaxstack compress order`, for --experts_by=order",
    )
    add_calibration_arguments(parser)


def add_run_arguments(parser: Parser) -> None:
    """Declares the run and the run to make, for both commands of compression."""
    parser.add_argument("run", metavar="RUN", type=user_path, help="run directory")
    parser.add_argument("out", metavar="OUT", type=user_path, help="run directory to make")


def add_calibration_arguments(parser: Parser) -> None:
    """Declares the arguments of the calibration, for both commands of compression."""
    parser.add_argument(
        "--sequences", type=PositiveInt, default=128, help="sequences of the run's training data for the calibration"
    )
    parser.add_argument("--step", type=int, default=None, help="step of the checkpoint; null means the newest")
    parser.add_class_arguments(MeshConfig, "mesh")
    parser.set_defaults({"mesh.data": 1})


def check_mesh(mesh: MeshConfig) -> None:
    """Checks that a mesh can run one layer at a time, with all of its experts on each device.

    Raises:
      ConfigError: it has stages, or splits experts.
    """
    for axis in ("pipe", "expert"):
        if (size := getattr(mesh, axis)) > 1:
            raise ConfigError(
                f"mesh.{axis}={size} cannot be used: one layer runs at a time, with all of its experts on each "
                f"device. Use --mesh.data, --mesh.fsdp or --mesh.tensor."
            )


def main(args: Namespace) -> None:
    """Makes the run directory and prints the held-out loss before and after.

    Raises:
      ConfigError: a run, method, format or mesh that do not fit together, or a folder that exists.
    """
    run = Path(args.run)
    out = Path(args.out)
    cfg, tokenizer = load_run.read_run(run)
    if out.exists():
        raise ConfigError(f"{out} exists and is never overwritten. Name another folder.")
    check_mesh(args.mesh)
    # With train.qat, the matrices are rounded here, from the master weights, and not before.
    cfg = replace(cfg, model=replace(cfg.model, pad_vocab_to=None), train=replace(cfg.train, qat="none"))
    opened = load_run.open_run(run, cfg, tokenizer, args.mesh, args.step)

    from jaxstack.compress import quantize, unfinished
    from jaxstack.hf import safetensors
    from jaxstack.models import folding

    safetensors.import_safetensors()  # the result is written with this library
    own_layout = quantize.why_own_layout(opened.model)
    check_method(args, opened.model, own_layout)
    how = settings(args)
    quant = cfg.train.quant if how.scheme.inputs == "none" else how.scheme.inputs
    if opened.model.moe.num_experts:
        check_experts(how.scheme, f"{run} has model.moe.num_experts={opened.model.moe.num_experts}")
    # The layers after a layer read what its rounded inputs make.
    rounding = replace(opened.context, ops=replace(opened.context.ops, quant=quant))
    walk = quantize.Walk.of(opened.model, rounding)
    if args.method == "awq":
        folding.shared_inputs(walk.cfg)
    check_int4_experts(args, opened.model)
    names = ("sequences", "method", "weights", "activations", "dtype", "int4_experts", "experts_by", "order")
    scales = describe(walk, how.scheme)  # raises an error, where it does, before there is a folder
    store = unfinished.open_folder(out, settings_of(args, opened, names) | {"group": how.scheme.group})
    print(scales)
    by_load = args.int4_experts is not None and args.experts_by == "load"
    batches = calibration(opened, 0 if args.method == "rtn" and not by_load else args.sequences)
    if args.int4_experts is not None:
        how = replace(how, int4_experts=lower_experts(args, walk, opened, batches))
        own_layout = "transformers' layouts have one format for all experts of a layer"
    if args.method == "rtn":
        batches = []
    layers = write_layers(quantize.quantize(walk, opened.params, batches, how, store.read), store, opened)
    values = quantize.join(opened.model, opened.params, layers)
    computed = replace(opened.config, train=replace(opened.config.train, quant=quant))
    made = replace(opened, params=values, context=rounding, config=computed)
    if own_layout is None:
        write(made, quantize.hf_codes(opened.model, layers), how, out)
    else:
        print(f"{out / 'model'} has codes that jaxstack alone reads: {own_layout}")
        write_coded(made, quantize.stacked_codes(opened.model, layers), how, out)
    stored = sum(path.stat().st_size for path in (out / "model").glob("*.safetensors"))
    print(f"{out / 'model'} has {stored / 1e6:,.3f} MB of parameters")
    store.remove()
    print_losses(opened.evaluate(), made.evaluate(), opened.model.objective.unit)
    print(f"wrote {out}: {args.weights} by {args.method}; {next_command(out, opened.model)}")


def next_command(out: Path, model: ModelConfig) -> str:
    """Returns what to do with a run of rounded weights: write with it, or train it if it cannot write."""
    if model.family in ("decoder", "encoder_decoder", "diffusion") and not model.reward_head:
        return f"try it with `jaxstack generate {out} ...`"
    return f"train it with `jaxstack train --config={out / 'config.yaml'}`"


def check_method(args: Namespace, model: ModelConfig, own_layout: str | None) -> None:
    """Raises a ConfigError for a format or a method that the model cannot have. `own_layout` is why only we read it."""
    from jaxstack.compress import calibrate

    if args.weights == "nf4" and own_layout is not None:
        raise ConfigError(f"--weights=nf4 is stored as bitsandbytes does, but {own_layout}. Use int4, int8 or fp8.")
    if args.method != "rtn":
        calibrate.require_inputs(model, "--method=rtn")
    if args.method == "awq" and model.family != "decoder":
        raise ConfigError(
            f"--method=awq moves factors between the parts of a decoder's layer, but model.family={model.family}. "
            "Use gptq."
        )


def settings(args: Namespace) -> "Settings":
    """Returns how the matrices are quantised."""
    from jaxstack.compress.quantize import Settings

    return Settings(Scheme.of(args.weights, args.group, args.activations), args.method, args.dtype)


def check_int4_experts(args: Namespace, model: ModelConfig) -> None:
    """Checks that some experts of a model can have 4 bits.

    Raises:
      ConfigError: they cannot, or a flag is not used.
    """
    count = args.int4_experts
    by_order = args.experts_by == "order"
    if count is None:
        if by_order or args.order is not None:
            flag = "--experts_by=order" if by_order else f"--order={args.order}"
            raise ConfigError(f"{flag} chooses the experts that have 4 bits.", "Set --int4_experts, too.")
        return
    experts = model.moe.num_experts
    if not experts:
        raise ConfigError(f"--int4_experts={count}, but model.moe.num_experts=0.", "Leave --int4_experts out.")
    if args.weights != "int8":
        raise ConfigError(
            f"--int4_experts={count} gives 4 bits to some of the experts, and --weights={args.weights} is not int8.",
            "Use --weights=int8.",
        )
    if count >= experts:
        raise ConfigError(
            f"--int4_experts={count} leaves none of the {plural(experts, 'expert')} of a layer with 8 bits.",
            f"Use at most {experts - 1}, or --weights=int4 for all matrices.",
        )
    if by_order != (args.order is not None):
        raise ConfigError(
            f"--experts_by={args.experts_by} with --order={args.order} is not complete.",
            "Set --experts_by=order and --order to the file of `jaxstack compress order`, or none of them.",
        )


def lower_experts(args: Namespace, walk: "Walk", run: "TrainedRun", batches: "Sequence[Batch]") -> "np.ndarray":
    """Returns which experts have 4 bits, bool [layers of all stacks, E], and prints them.

    Raises:
      ConfigError: `--order` is not the order of the experts of this run.
    """
    from jaxstack.common import files
    from jaxstack.compress import order, quantize

    if args.experts_by == "load":
        scores = order.measure_loads(walk, run.params, batches)
    else:
        found = files.read_json(Path(args.order).expanduser(), "Make it with `jaxstack compress order`.")
        if not isinstance(found, dict):
            raise ConfigError(
                f"--order={args.order} is not a JSON object.", "Make it with `jaxstack compress order --by=int4`."
            )
        scores = order.read_experts_of(found, walk.stacks, run.model.moe.num_experts)
    chosen = quantize.least_used(scores, args.int4_experts)
    start = 0
    for name, table in scores.items():
        for layer, row in enumerate(table):
            its = chosen[start + layer].nonzero()[0]
            says = ", ".join(f"{e} ({row[e]:.1%} of the tokens)" if args.experts_by == "load" else f"{e}" for e in its)
            print(f"{name} {layer}: experts with 4 bits: {says}")
        start += len(table)
    return chosen


def check_experts(scheme: Scheme, given: str) -> None:
    """Checks that experts can have a format.

    Args:
      given: says which run has experts.

    Raises:
      ConfigError: they cannot.
    """
    if scheme.inputs != "none":
        raise ConfigError(
            f"--activations={scheme.inputs} does not round the inputs of experts, and {given}. Use --activations=none."
        )
    if scheme.kind == "normal":
        raise ConfigError(
            f"--weights=nf4 has no layout for experts that transformers loads, and {given}. Use --weights=int4."
        )


def describe(walk: "Walk", scheme: Scheme) -> str:
    """Returns one line about the scales of the matrices.

    Raises:
      ConfigError: nf4 whose group does not divide the inputs of a matrix.
    """
    several = len(walk.stacks) > 1
    matrices = {
        f"{name}/{path}" if several else path: p for name in walk.stacks for path, p in walk.matrices_of(name).items()
    }
    inputs = {path: prod(p.shape[p.batch_axes : p.batch_axes + p.in_axes]) for path, p in matrices.items()}
    bits = plural(scheme.bits, "bit")
    group = "each output" if scheme.group is None else f"each {plural(scheme.group, 'input')}"
    whole = [
        f"{path} ({size})"
        for path, size in inputs.items()
        if scheme.groups(size) == 1 and size != scheme.group  # a group may be all inputs
    ]
    if not whole or len(whole) == len(inputs):
        why = f", because --group={scheme.group} divides the inputs of no matrix" if whole else ""
        return f"{bits}, one scale for {'each output' if whole else group}{why}"
    return (
        f"{bits}, one scale for {group}; one scale for each output of matrices whose number of inputs "
        f"{scheme.group} does not divide: {', '.join(whole)}"
    )


def calibration(run: "TrainedRun", sequences: int) -> list["Batch"]:
    """Returns the first training batches of a run with this many sequences or a few more, on its devices."""
    from jaxstack import data
    from jaxstack.data.loader import DataLoader

    if not sequences:
        return []
    cfg = run.config
    loader = DataLoader(
        cfg, data.load_for(cfg.model, cfg.data, cfg.aim), run.context.layout.sharding(run.context.layout.batch)
    )
    return [loader.to_devices(batch) for batch in loader.iterate(0, -(-sequences // cfg.data.batch_size))]


def settings_of(args: Namespace, run: "TrainedRun", names: Sequence[str]) -> dict[str, object]:
    """Returns on what finished layers depend: the run, its step, and the arguments with these names."""
    # The newest step may be another one when the command continues.
    newest = max(manifest.complete_steps(run_dir.checkpoints(Path(run.config.run.dir))), default=None)
    step = newest if args.step is None else args.step
    return {name: getattr(args, name) for name in names} | {"run": str(Path(args.run).resolve()), "step": step}


def write_layers(layers: "Iterable[QuantizedLayer]", store: "Unfinished", run: "TrainedRun") -> "list[QuantizedLayer]":
    """Returns all layers. Each is stored and printed as soon as it is finished, with its largest error if known."""
    from jaxstack import families

    finished = []
    depth = sum(stack.depth for stack in families.of(run.model).stacks(run.model).values())
    for index, layer in enumerate(layers):
        store.write(index, layer)
        finished.append(layer)
        error = ""
        if layer.errors:
            path = max(layer.errors, key=lambda path: layer.errors[path])
            error = f": outputs off by at most {layer.errors[path] ** 0.5:.2%} (root mean square, {path})"
        print(f"layer {index + 1} of {depth}{error}", flush=True)
    return finished


def write(run: "TrainedRun", codes: "Codes", how: "Settings", out: Path) -> None:
    """Writes the run directory with the Hugging Face folder in it."""
    import jax

    from jaxstack import hf
    from jaxstack.data.tokenizers import read_saved_tokenizer
    from jaxstack.hf import safetensors

    cfg = run.config
    saved = read_saved_tokenizer(Path(cfg.run.dir)).to_json()
    with safetensors.new_folder(out) as made:
        folder = made / "model"
        folder.mkdir()
        ids = write_tokenizer(saved, folder, cfg.model, cfg.data)
        plain = replace(run.model, pad_vocab_to=None)
        quantized = how.scheme, codes
        hf.save_pretrained(folder, plain, jax.device_get(run.params), how.dtype, cfg.data.seq_len, ids, quantized)
        (made / "tokenizer.json").write_text(json.dumps(saved))
        kernels = cfg.kernels
        if replace(how.scheme, inputs="none") == Scheme(8):  # new tokens read the codes themselves
            kernels = replace(kernels, decode_weights="int8")
        (made / "config.yaml").write_text(parse.to_yaml(_final(replace(cfg, kernels=kernels), out)))


def _final(cfg: Config, out: Path) -> Config:
    """Returns the configuration of the run to make, which begins with the parameters of its folder `model`."""
    begin = replace(cfg.run, dir=str(out), init_from=str((out / "model").resolve()), init_adapter=None)
    return replace(cfg, run=begin, model=replace(cfg.model, lora=LoraConfig(), pad_vocab_to=None), mesh=MeshConfig())


def write_coded(run: "TrainedRun", codes: "Codes", how: "Settings", out: Path) -> None:
    """Writes the run directory with a folder of codes in it that jaxstack alone reads."""
    import jax

    from jaxstack.compress.quantize import by_stack
    from jaxstack.hf import coded_folder, safetensors

    cfg = run.config
    tokenizer = (Path(cfg.run.dir) / "tokenizer.json").read_bytes()
    final = _final(cfg, out)
    with safetensors.new_folder(out) as made:
        folder = made / "model"
        folder.mkdir()
        scheme = how.scheme
        values = jax.device_get(run.params)
        lower = None if how.int4_experts is None else by_stack(final.model, how.int4_experts)
        coded_folder.write(folder, final.model, values, codes, scheme.bits, scheme.kind, how.dtype, lower)
        for each, its in ((made, final), (folder, replace(final, run=replace(final.run, init_from=None)))):
            (each / "config.yaml").write_text(parse.to_yaml(its))
            (each / "tokenizer.json").write_bytes(tokenizer)


def print_losses(before: "Evaluation", after: "Evaluation", unit: str) -> None:
    """Prints the held-out loss before and after: bits per byte where the tokenizer keeps the text, else `unit`."""
    from math import isnan

    losses = (before.bits_per_byte, after.bits_per_byte)
    if not isnan(before.bits_per_byte):
        unit = "bits per byte"
    else:
        losses = (before.loss, after.loss)
    a, b = losses
    print(f"held-out loss: {a:.4f} before, {b:.4f} after ({b / a - 1:+.2%}), in {unit}")
