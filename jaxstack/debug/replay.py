"""Runs a step of a run again, on one device, and says which operation made its first value that is not finite."""

import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack import data, sharding
from jaxstack.checkpoint import manifest, run_dir, store, verify
from jaxstack.common.tree import Batch, flatten
from jaxstack.config import Config, ConfigError, MeshConfig, PipelineConfig
from jaxstack.data.loader import DataLoader
from jaxstack.debug import search
from jaxstack.models import family
from jaxstack.models.context import Context
from jaxstack.models.params import Params
from jaxstack.training import init_from, teacher
from jaxstack.training.checkpoint_layout import checkpoint_layout
from jaxstack.training.gradients import make_gradients
from jaxstack.training.state import TrainState, abstract_state, make_state
from jaxstack.training.step import jit_train_step

LAYERS_SHOWN = 8
"""Layers before a bad one whose values are described."""


def on_one_device(cfg: Config) -> Config:
    """Returns the configuration of the same computation without a mesh, a pipeline and recomputation."""
    model = replace(cfg.model, pad_vocab_to=None)
    return replace(
        cfg,
        model=model,
        mesh=MeshConfig(data=1),
        pipeline=PipelineConfig(),
        train=replace(cfg.train, remat="none"),
    )


class Replay:
    """A run on one device, whose state before any step is computed again."""

    def __init__(self, run: Config) -> None:
        """Reads the data of a run; `run` is its configuration with its present folder in `run.dir`."""
        self.cfg = on_one_device(run)
        self._mesh = sharding.make_mesh(self.cfg.mesh, self.cfg.microbatch_size, sharding.find_devices()[:1])
        made = Context.create(self.cfg, self._mesh)
        self._context = replace(made, layers="scan")
        self._dataset = data.load_for(self.cfg)
        self._loader = DataLoader(self.cfg, self._dataset, made.sharding(made.batch))
        self._teach = teacher.open_teacher(self.cfg, self._dataset.tokenizer, self._mesh)

    def before(self, step: int) -> tuple[TrainState, Batch, int]:
        """Returns the state before a step, the batch of the step, and from which saved step the state was computed.

        Raises:
          ConfigError: the newest checkpoint before the step is damaged.
        """
        cfg, ctx = self.cfg, self._context
        saved = run_dir.checkpoints(Path(cfg.run.dir))
        start = max((number for number in manifest.steps(saved) if number < step), default=0)
        abstract = abstract_state(cfg, ctx)
        next_batch = 0
        if start:
            layout = checkpoint_layout(cfg, ctx, abstract)
            if why := verify.corruption(saved, start, layout.abstract):
                raise ConfigError(f"step {start} in {saved} is damaged: {why}. Remove it, or restore a copy.")
            state = layout.unpack(store.restore(saved, start, layout.abstract))
            next_batch = store.metadata(saved, start)["next_batch"]
        elif cfg.run.init_from:
            state = init_from.init_state_from(cfg, ctx, abstract, self._dataset.tokenizer)
        else:
            state = make_state(cfg, ctx, abstract)
        count = step - 1 - start
        batches = self._loader.iterate(next_batch, count + 1)
        if count:
            train_step = jit_train_step(cfg, ctx, abstract)
            for _ in range(count):
                state, _ = train_step(state, self._teach(self._loader.to_devices(next(batches))))
        return state, self._teach(self._loader.to_devices(next(batches))), start

    def explain(self, state: TrainState, batch: Batch) -> search.Finding | None:
        """Returns the operation of a step that made the first value that is not finite, or `None` if all are finite."""
        key = jax.random.fold_in(jax.random.key(self.cfg.run.seed), state.step) if self.cfg.model.dropout else None
        return explain(self.cfg, replace(self._context, mesh=None), state.params, batch, key)

    def describe_batch(self, index: int) -> str:
        """Returns one line that lists where a batch was read."""
        return self._loader.describe_batch(index)


def folder(cfg: Config, step: int) -> Path:
    """Returns where the operation of a step is saved."""
    return Path(cfg.run.dir) / "debug" / f"step_{step}"


def explain_step(cfg: Config, step: int, out: Path) -> Iterator[str]:
    """Runs a step of a run again on one device, and yields the lines that say what was found.

    Args:
      cfg: the run, with its present folder.
      step: its number, from 1 on.
      out: folder to which the operation is saved, see `save`.
    """
    again = Replay(cfg)
    state, batch, start = again.before(step)
    origin = f"the checkpoint of step {start}" if start else "the beginning"
    yield f"step     {step} of {cfg.run.dir}, from {origin}, on one device"
    if lines := bad_inputs(state.params, batch):
        yield from (f"before   not finite already: {line}" for line in lines)
        return
    found = again.explain(state, batch)
    if found is None:
        yield "result   loss and gradients are finite here"
        if cfg.mesh.sizes != again.cfg.mesh.sizes:
            yield "         The run has a mesh: one of its devices, or what they send each other, may be at fault."
        return
    yield from describe(again.cfg, found)
    if out.exists():
        yield f"kept     {out}/, which was saved before"
    elif save(found, out):
        yield f"saved    {out}/: run the operation again with"
        yield f"         python -c \"from jaxstack.debug.replay import repeat; print(repeat('{out}'))\""
    else:
        yield f"saved    the inputs in {out}/; with `pip install 'jaxstack[debug]'` the operation is saved, too"


def explain(
    cfg: Config, ctx: Context, values: Params, batch: Batch, key: jax.Array | None = None
) -> search.Finding | None:
    """Returns the operation that made the first bad value of the loss, or of gradients; `None` if all are finite.

    Args:
      cfg: the run, without mesh and pipeline.
      ctx: execution context without a mesh, in which the layers are a loop.
      values: the parameters.
      batch: the global batch.
      key: for dropout.
    """
    flat, tree = jax.tree.flatten((values, batch, key))
    gradients = make_gradients(cfg, ctx)

    def program(*flat: jax.Array) -> Any:
        loss, grads, _ = gradients(*jax.tree.unflatten(tree, flat))
        return loss, grads

    return search.find(jax.make_jaxpr(program)(*flat), flat)


def bad_inputs(values: Params, batch: Batch) -> list[str]:
    """Returns a line for each parameter, and each array of a batch, that is not finite before the step."""
    named = {f"the parameter {path}": a for path, a in flatten(values).items()}
    named |= {f"the batch's {name}": a for name, a in batch.items()}
    lines = []
    for name, a in named.items():
        if search.is_bad(a):
            first = np.argwhere(~np.isfinite(np.asarray(a, np.float32)))[0].tolist()
            lines.append(f"{name}, first at {first}: {search.statistics(a)}")
    return lines


def describe(cfg: Config, found: search.Finding) -> list[str]:
    """Returns what a user reads about a finding: layer, direction, operation, place in the code, and statistics."""
    of = "the loss, in the forward pass" if not found.result else "gradients; the loss is finite"
    lines = [f"first    {found.equation.primitive.name}, for {of}"]
    if where := place(cfg, found):
        lines.append(f"where    {where}")
    own = [frame for frame in found.frames if "/jaxstack/debug/" not in frame[0]]
    for i, (file, line, function) in enumerate(own[:3]):
        lines.append(f"{'code' if i == 0 else 'called':<9}{_short(file)}:{line} in {function}")
    for loop in found.loops:
        if _is_stack(loop):
            what = "gradient of what it returns" if loop.reverse else "what it reads"
            size = _layers_of_step(found)[1]
            lines += [f"layer {i * size:<3}{what}: {text}" for i, text in loop.carried[:LAYERS_SHOWN]]
    lines += [f"input    {search.statistics(value)}" for value in found.inputs]
    lines += [f"output   {search.statistics(value)}" for value in found.outputs]
    return lines


def place(cfg: Config, found: search.Finding) -> str:
    """Returns layer and microbatch of a finding in words; empty outside of both."""
    parts = []
    for loop in found.loops:
        function = loop.frames[0][2].rpartition(".")[2] if loop.frames else ""
        if _is_stack(loop):
            parts.append(_layer(cfg, found, loop))
        elif function == "work" and loop.length == cfg.train.grad_accum:
            parts.append(f"microbatch {loop.step} of {loop.length}")
        else:
            of = "" if loop.length is None else f" of {loop.length}"
            parts.append(f"step {loop.step}{of} of the loop at {_short(loop.frames[0][0])}:{loop.frames[0][1]}")
    if after := re.search(r"after_(\d+)_steps", found.scopes):  # see `blocks.scan_stack`
        inner, size = _layers_of_step(found)
        number = int(after[1]) * size + inner
        parts.append(f"layer {number} ({number + 1} of {cfg.model.num_layers})")
    return ", ".join(parts)


def _is_stack(loop: search.Loop) -> bool:
    """Returns whether a loop runs over the layers of a stack."""
    return bool(loop.frames) and loop.frames[0][2].rpartition(".")[2] == "scan_stack"


def _layer(cfg: Config, found: search.Finding, loop: search.Loop) -> str:
    stacks = family.of(cfg.model).stacks(cfg.model)
    names = [name for name in stacks if f"stack_{name}" in found.scopes]
    name = names[-1] if names else next(iter(stacks))
    assert loop.length is not None
    inner, size = _layers_of_step(found)
    number = loop.step * size + inner
    of = f" of {name}" if len(stacks) > 1 else ""
    return f"layer {number}{of} ({number + 1} of {loop.length * size})"


def _layers_of_step(found: search.Finding) -> tuple[int, int]:
    """Returns the number of the layer within its step of the loop over layers, and how many layers a step has."""
    parts = re.findall(r"layer_(\d+)_of_(\d+)", found.scopes)
    inner, size = map(int, parts[-1]) if parts else (0, 1)
    return inner, size


def _short(file: str) -> str:
    """Returns the path of a file below the folder that the user is in, or below that of its package."""
    path = Path(file)
    for base in (Path.cwd(), Path(__file__).parents[2]):
        if path.is_relative_to(base):
            return str(path.relative_to(base))
    return file


def save(found: search.Finding, folder: Path) -> bool:
    """Writes the operation and its inputs to a new folder, for `repeat`.

    Returns:
      Whether the operation was written, for which JAX needs the package flatbuffers.
    """
    equation = found.equation
    program, inputs = search.alone(equation, found.inputs)
    exported = jax.export.export(jax.jit(program))(*inputs)
    folder.mkdir(parents=True)
    arrays = [np.asarray(value) for value in inputs]
    names = [str(array.dtype) for array in arrays]
    raw = {f"input_{i}": a.view(f"u{a.dtype.itemsize}") if a.dtype.kind == "V" else a for i, a in enumerate(arrays)}
    np.savez(folder / "inputs.npz", **raw)  # type: ignore[arg-type]
    (folder / "operation.json").write_text(json.dumps({"operation": str(equation), "dtypes": names}, indent=1))
    if importlib.util.find_spec("flatbuffers") is None:
        return False
    (folder / "operation.bin").write_bytes(exported.serialize())
    return True


def repeat(folder: str | Path) -> tuple[list[jax.Array], list[jax.Array]]:
    """Runs an operation that `save` has written again; returns its inputs and its outputs."""
    folder = Path(folder)
    names = json.loads((folder / "operation.json").read_text())["dtypes"]
    with np.load(folder / "inputs.npz", allow_pickle=False) as arrays:
        inputs = [jnp.asarray(arrays[f"input_{i}"].view(jnp.dtype(name))) for i, name in enumerate(names)]
    exported = jax.export.deserialize(bytearray((folder / "operation.bin").read_bytes()))
    return inputs, [*exported.call(*inputs)]
