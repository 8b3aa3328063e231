"""Runs a step of a run again, on its mesh, and says which operation made its first value that is not finite."""

import importlib.util
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxstack import data, sharding
from jaxstack.checkpoint import manifest, run_dir, store, verify
from jaxstack.common import inputs as input_files
from jaxstack.common.counts import plural
from jaxstack.common.tree import Batch, flatten
from jaxstack.config import Config, ConfigError, MeshConfig
from jaxstack.data.loader import DataLoader
from jaxstack.debug import rules, search
from jaxstack.debug.describe import describe
from jaxstack.debug.devices import alone, communicates
from jaxstack.debug.guide import RunGuide
from jaxstack.debug.statistics import is_bad, statistics
from jaxstack.debug.update import explain_update
from jaxstack.families.context import make_context
from jaxstack.models.context import Context
from jaxstack.models.params import Params
from jaxstack.planner import estimate, pipeline_costs
from jaxstack.planner.job import Job
from jaxstack.training.assemble import jit_train_step, make_gradients, objective_of
from jaxstack.training.features.loss_scale import with_scale
from jaxstack.training.services import init_from
from jaxstack.training.services.checkpoint_layout import checkpoint_layout
from jaxstack.training.state import Recipe, TrainState, abstract_state, make_state
from jaxstack.training.step import dropout_key


def mesh_of(mesh: MeshConfig, microbatch_size: int) -> Mesh:
    """Returns the mesh of a run, on the devices that are there.

    Raises:
      ConfigError: there are fewer devices than the run had.
    """
    devices = sharding.find_devices()
    needed = math.prod(mesh.sizes.values())
    if mesh.open_axis is None and len(devices) < needed:
        raise ConfigError(
            f"the run has a mesh of {plural(needed, 'device')}, and there are {len(devices)}. To simulate them on the "
            f"CPU, set JAX_PLATFORMS=cpu and JAX_NUM_CPU_DEVICES={needed}."
        )
    return sharding.make_mesh(mesh, microbatch_size, devices if mesh.open_axis else devices[:needed])


class Replay:
    """A run whose state before any step is computed again, on its mesh."""

    def __init__(self, run: Config) -> None:
        """Reads the data of a run; `run` is its configuration with its present folder in `run.dir`."""
        if run.learned_rewards is not None:
            raise ConfigError(
                f"{run.run.dir} learns from completions that it samples, which are not stored, so its steps "
                f"cannot be run again. Lower optim.lr, or check the rewards of these steps in metrics.jsonl."
            )
        # The values do not depend on it, and what is examined must be on the device.
        run = replace(run, train=replace(run.train, offload="none"))
        self.mesh = mesh_of(run.mesh, run.microbatch_size)
        self.context = make_context(pipeline_costs.resolve_partition(run, self.mesh), self.mesh)
        self.cfg = estimate.resolve_split(Job(run, self.context))[0].cfg
        self._dataset = data.load_for(self.cfg.model, self.cfg.data, self.cfg.aim)
        self._loader = DataLoader(self.cfg, self._dataset, self.context.layout.sharding(self.context.layout.batch))
        self._teach = init_from.open_teacher(self.cfg, self._dataset.tokenizer, self.mesh)
        self._refer = init_from.open_reference(self.cfg, self._dataset.tokenizer, self.mesh, self.context)

    def before(self, step: int) -> tuple[TrainState, Batch, int]:
        """Returns the state before a step, the batch of the step, and from which saved step the state was computed.

        Raises:
          ConfigError: the newest checkpoint before the step is damaged, or batches were other ones at the step.
        """
        cfg = self.cfg
        ctx = self.context
        saved = run_dir.checkpoints(Path(cfg.run.dir))
        start = max((number for number in manifest.steps(saved) if number < step), default=0)
        abstract = abstract_state(Recipe.of(cfg), ctx)
        next_batch = 0
        if start:
            layout = checkpoint_layout(Recipe.of(cfg), ctx, abstract)
            if why := verify.corruption(saved, start, layout.abstract):
                raise ConfigError(f"step {start} in {saved} is damaged: {why}. Remove it, or restore a copy.")
            state = layout.unpack(store.restore(saved, start, layout.abstract))
            metadata = store.metadata(saved, start)
            next_batch = metadata["next_batch"]
            self._loader.resume(next_batch, metadata)
        elif cfg.run.init_from:
            state = init_from.init_state_from(cfg, ctx, abstract, self._dataset.tokenizer)
        else:
            state = make_state(Recipe.of(cfg), ctx, abstract)
        count = step - 1 - start
        self._require_same_batches(saved, step, next_batch + count)
        batches = self._loader.iterate(next_batch, count + 1)
        if count:
            train_step = jit_train_step(cfg, ctx, abstract)
            for _ in range(count):
                state, _ = train_step(state, self._complete(state, next(batches)))
        objective = objective_of(cfg.model, cfg.aim)
        return state, with_scale(state, objective, self._complete(state, next(batches))), start

    def _complete(self, state: TrainState, batch: data.Batch) -> Batch:
        """Returns the global batch as the step reads it."""
        return self._refer(state.params, self._teach(self._loader.to_devices(batch)))

    def _require_same_batches(self, saved: Path, step: int, index: int) -> None:
        """Makes sure that the configuration of the run has the batches of a step.

        Raises:
          ConfigError: the run has read other batches since.
        """
        newest = max(manifest.complete_steps(saved), default=0)
        metadata = store.metadata(saved, newest) if newest else {}
        begin = (metadata.get("position") or {}).get("start_batch", 0)
        if index < begin and metadata["config"]["data"] == json.loads(json.dumps(asdict(self.cfg.data))):
            raise ConfigError(
                f"step {step} of {self.cfg.run.dir} had other batches than its config.yaml has: its sizes, weights or "
                f"texts changed at batch {begin}. Set these keys of the group data in config.yaml as they were then."
            )

    def explain(self, state: TrainState, batch: Batch) -> search.Finding | None:
        """Returns the operation of a step that made the first value that is not finite, or `None` if all are finite."""
        key = dropout_key(self.cfg.model, self.cfg.run.seed, state.step)
        return explain(self.cfg, self.context, state.params, batch, key)

    def describe_batch(self, index: int) -> str:
        """Returns one line that lists where a batch was read."""
        return self._loader.describe_batch(index)


def explain_step(again: Replay, step: int, out: Path) -> Iterator[str]:
    """Runs a step of a run again on its mesh, and yields the lines that say what was found.

    Steps count from 1. The operation is saved to `out`, see `save`.
    """
    state, batch, start = again.before(step)
    origin = f"the checkpoint of step {start}" if start else "the beginning"
    kind = again.mesh.devices.flat[0].device_kind
    count = again.mesh.size
    yield f"step     {step} of {again.cfg.run.dir}, from {origin}, on {count} x {kind}"
    if lines := bad_inputs(state.params, batch):
        yield from (f"before   not finite already: {line}" for line in lines)
        return
    finding = again.explain(state, batch)
    if finding is None:
        gradients = make_gradients(again.cfg, again.context)
        lines = [*explain_update(Recipe.of(again.cfg), gradients, again.context, state, batch)]
        yield from lines or ["result   loss and gradients are finite here, and so is the update"]
        return
    yield from describe(finding, RunGuide(again.cfg.model, again.cfg.train.grad_accum, again.context.layout.pipeline))
    simulated = again.mesh.devices.flat[0].platform == "cpu" and needs_mesh(finding)
    devices = f"JAX_NUM_CPU_DEVICES={again.mesh.size} " if simulated else ""
    if out.exists():
        yield f"kept     {out}/, which was saved before"
    elif save(finding, out):
        yield f"saved    {out}/: run the operation again with"
        yield f"         {devices}python -c \"from jaxstack.debug.replay import repeat; print(repeat('{out}'))\""
    else:
        yield f"saved    the inputs in {out}/; with `pip install 'jaxstack[debug]'` the operation is saved, too"


def explain(
    cfg: Config, ctx: Context, params: Params, batch: Batch, key: jax.Array | None = None
) -> search.Finding | None:
    """Returns the operation that made the first bad value of the loss, or of gradients; `None` if all are finite.

    Without a mesh in `ctx`, everything runs on one device. `batch` is the global batch; `key` is for dropout.
    """
    if ctx.layout.pipeline is not None:
        # The phases of static loops run the same units; the guide reads one loop over ticks.
        ctx = replace(ctx, layout=replace(ctx.layout, pipeline=replace(ctx.layout.pipeline, static=False)))
    flat, tree = jax.tree.flatten((params, batch, key))
    gradients = make_gradients(cfg, ctx)

    def program(*flat: jax.Array) -> Any:
        loss, grads, _ = gradients(*jax.tree.unflatten(tree, flat))
        return loss, grads

    with rules.own_lines():
        traced = jax.make_jaxpr(program)(*flat)
    return search.find(traced, flat, RunGuide(cfg.model, cfg.train.grad_accum, ctx.layout.pipeline))


def bad_inputs(params: Params, batch: Batch) -> list[str]:
    """Returns a line for each parameter, and each array of a batch, that is not finite before the step."""
    named = {f"the parameter {path}": a for path, a in flatten(params).items()}
    named |= {f"the batch's {name}": a for name, a in batch.items()}
    lines = []
    for name, a in named.items():
        if is_bad(a):
            first = np.argwhere(~np.isfinite(np.asarray(a, np.float32)))[0].tolist()
            lines.append(f"{name}, first at {first}: {statistics(a)}")
    return lines


def needs_mesh(finding: search.Finding) -> bool:
    """Returns whether the operation communicates, or needs the place of its device."""
    return finding.devices.mesh is not None and communicates(finding.equation)


def save(finding: search.Finding, folder: Path) -> bool:
    """Writes the operation and its inputs to a new folder, for `repeat`.

    An operation that communicates is saved with the inputs of all devices. Another operation is saved with the inputs
    of the first device on which an output is bad.

    Returns:
      Whether the operation was written, for which JAX needs the package flatbuffers.
    """
    equation = finding.equation
    devices = finding.devices
    mesh: dict[str, int] = {}
    if needs_mesh(finding):
        assert devices.mesh is not None
        mesh = dict(devices.mesh.shape)
        program, variables, inputs = alone(equation, finding.everywhere)
        function = devices.compile(program, devices.specs(variables), devices.specs(equation.outvars))
    else:
        program, _, inputs = alone(equation, finding.inputs)
        function = jax.jit(program)
    folder.mkdir(parents=True)
    arrays = [np.asarray(value) for value in inputs]
    names = [str(array.dtype) for array in arrays]
    raw = {f"input_{i}": a.view(f"u{a.dtype.itemsize}") if a.dtype.kind == "V" else a for i, a in enumerate(arrays)}
    np.savez(folder / "inputs.npz", **raw)  # type: ignore[arg-type]
    (folder / "operation.json").write_text(
        json.dumps({"operation": str(equation), "dtypes": names, "mesh": mesh}, indent=1)
    )
    if importlib.util.find_spec("flatbuffers") is None:
        return False
    exported = jax.export.export(function)(*inputs)  # type: ignore[arg-type]
    (folder / "operation.bin").write_bytes(exported.serialize())
    return True


def repeat(folder: str | Path) -> tuple[list[jax.Array], list[jax.Array]]:
    """Runs an operation that `save` has written again; returns its inputs and its outputs.

    Inputs and outputs of an operation that communicates have the entries of devices in a leading dimension.

    Raises:
      ConfigError: there are fewer devices than the operation needs.
    """
    folder = Path(folder)
    try:
        written = input_files.read_json(folder / "operation.json")
        names = written["dtypes"]
        mesh = written["mesh"]
        arrays = input_files.read_npz(folder / "inputs.npz", [f"input_{i}" for i in range(len(names))])
        inputs = [jnp.asarray(arrays[f"input_{i}"].view(jnp.dtype(name))) for i, name in enumerate(names)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder} does not hold an operation: {error}. Run `jaxstack debug` again.") from None
    exported = jax.export.deserialize(bytearray((folder / "operation.bin").read_bytes()))
    if mesh:
        if (count := len(jax.devices())) < (needed := math.prod(mesh.values())):
            raise ConfigError(
                f"the operation in {folder} needs {plural(needed, 'device')}, and there are {count}. Set "
                f"JAX_PLATFORMS=cpu and JAX_NUM_CPU_DEVICES={needed}."
            )
        grid = np.array(jax.devices()[:needed]).reshape([*mesh.values()])
        shardings = exported.in_shardings_jax(Mesh(grid, [*mesh], axis_types=(AxisType.Auto,) * len(mesh)))
        inputs = [jax.device_put(x, sharding) for x, sharding in zip(inputs, shardings, strict=True)]
    return inputs, [*jax.jit(exported.call)(*inputs)]
