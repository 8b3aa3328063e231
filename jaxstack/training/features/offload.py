"""The optimizer's state in the host's memory (`train.offload`): devices have a few arrays of it at a time.

The update runs over groups of parameters. A group's arrays are copied to the device, updated and copied back, while
the copies of the next group run. So a device needs memory for two groups, and the update takes as long as the copies.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxstack import families
from jaxstack.common.tree import PyTree, flatten, path_of
from jaxstack.config import ConfigError, TrainConfig
from jaxstack.models.context import Context
from jaxstack.models.params import Spec, flat_spec, map_spec, partition
from jaxstack.training.optimizer import updates_are_bounded
from jaxstack.training.state import HOST, Recipe, host_paths, make_optimizer

AT_ONCE = 2
"""Groups whose arrays may be on a device at the same time."""


def check_memory(train: TrainConfig, devices: Sequence[jax.Device]) -> str | None:
    """Returns a line for the user of a CPU, whose devices have no memory of their own.

    Raises:
      ConfigError: the devices cannot read the host's memory.
    """
    if train.offload == "none":
        return None
    kinds = {memory.kind for memory in devices[0].addressable_memories()}
    if HOST not in kinds:
        raise ConfigError(
            f"train.offload={train.offload} needs devices that read the host's memory, but {devices[0].device_kind} "
            f"has only {', '.join(sorted(kinds)) or 'its own'}. Use train.offload=none."
        )
    if devices[0].platform == "cpu":
        return f"offload  train.offload={train.offload} saves nothing on a CPU: the host's memory is the device's"
    return None


def groups(spec: Spec) -> list[Spec]:
    """Returns the declarations once for each group of parameters that are updated together; all others are frozen.

    A group has parameters that follow each other, with at most as many elements as the largest parameter has.

    Args:
      spec: declarations of the trained parameters.
    """
    sizes = {path: prod(p.shape) for path, p in flat_spec(spec).items()}
    largest = max(sizes.values())
    members: list[list[str]] = []
    total = largest
    for path, size in sizes.items():
        if total + size > largest:
            members.append([])
            total = 0
        members[-1].append(path)
        total += size

    def only(paths: Collection[str]) -> Spec:
        names = iter(sizes)
        return map_spec(lambda p: replace(p, frozen=next(names) not in paths), spec)

    return [only(paths) for paths in members]


def in_turn(recipe: Recipe, ctx: Context) -> optax.GradientTransformationExtraArgs:
    """Builds a run's optimizer with its state in the host's memory before and after each update.

    Its update has the argument `good`: whether the step is good. If it is not, the state stays as it was.

    Raises:
      ConfigError: a step must check its update, which would need the complete state on the device.
    """
    optim = recipe.optim
    if not updates_are_bounded(optim, recipe.train.steps):
        raise ConfigError(
            f"train.offload={recipe.train.offload} cannot check whether an update is finite, as optim.eps={optim.eps}, "
            f"optim.lr={optim.lr} and optim.clip_norm={optim.clip_norm} need.",
            "Use the defaults of optim.eps and optim.clip_norm, or train.offload=none.",
        )
    spec, _ = partition(families.spec(recipe.model), families.spec(recipe.model))
    parameters = tuple(flat_spec(spec))
    # Gradients are clipped by the norm of all of them, before any group.
    clip = optax.clip_by_global_norm(optim.clip_norm) if optim.clip_norm else optax.identity()
    unclipped = recipe._replace(optim=replace(optim, clip_norm=None))
    parts = [(group, make_optimizer(unclipped, ctx, group)) for group in groups(spec)]

    def update(
        grads: PyTree, state: PyTree, params: PyTree = None, *, good: jax.Array, **_: Any
    ) -> tuple[PyTree, PyTree]:
        grads, _ = clip.update(grads, clip.init(params))
        before = flatten(state)
        new = dict(before)
        on_host = host_paths(state, parameters)
        changes: dict[str, jax.Array] = {}
        finished: list[list[str]] = []
        for group, part in parts:
            own_grads, own_params = (partition(group, tree)[0] for tree in (grads, params))
            template = jax.eval_shape(part.init, own_params)
            old = {path: before[path] for path in flatten(template)}
            moved = [path for path in old if path in on_host]
            # The copies wait for the gradients, and then for the group before the last one to be back on the host.
            # Otherwise XLA starts all of them with the step, and stores the whole state beside the activations.
            earlier = finished[-AT_ONCE] if len(finished) >= AT_ONCE else []
            names = (*moved, *earlier)
            *arrays, _ = jax.lax.optimization_barrier((*(new[path] for path in names), good))
            new |= dict(zip(names, arrays, strict=True))
            old |= {path: jax.device_put(new[path], jax.memory.Space.Device) for path in moved}
            change, updated = part.update(own_grads, _like(template, old), own_params)
            changes |= flatten(change)
            for path, array in flatten(updated).items():
                kept = jnp.where(good, array, old[path])
                new[path] = jax.device_put(kept, jax.memory.Space.Host) if path in on_host else kept
            finished.append(moved)
        return _like(grads, changes), _like(state, new)

    return optax.GradientTransformationExtraArgs(make_optimizer(recipe, ctx).init, update)


def _like(tree: PyTree, leaves: dict[str, jax.Array]) -> PyTree:
    return jax.tree_util.tree_map_with_path(lambda keys, _: leaves[path_of(keys)], tree)
