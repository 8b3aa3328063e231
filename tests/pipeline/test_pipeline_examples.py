"""The pipelines of docs/examples learn, and their gradients equal those of autodiff on one device."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
sys.path.insert(0, str(EXAMPLES))

PIPELINES = ["pipeline_nnx", "pipeline_linen", "pipeline_zero_bubble"]
each = pytest.mark.parametrize("name", PIPELINES)


@pytest.mark.matrix
@pytest.mark.parametrize("name", [*PIPELINES, "pipeline_unet", "own_family", "own_layer"])
def test_the_examples_learn(name):
    ours = {"JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS"}  # as for a user who has set nothing
    env = {key: value for key, value in os.environ.items() if key not in ours}
    env["PYTHONPATH"] = str(EXAMPLES.parent.parent)
    command = [sys.executable, f"{name}.py"]
    run = subprocess.run(command, cwd=EXAMPLES, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", run.stdout)]
    assert losses[-1] < 0.5 < 1 < losses[0]
    assert not run.stderr, run.stderr  # XLA complains there of layouts that it has to copy


@pytest.mark.matrix(quick=["zero_bubble"])
@each
def test_their_gradients_are_those_of_plain_autodiff(name, rng):
    example = importlib.import_module(name)
    if name == "pipeline_nnx":
        tokens = rng.integers(0, example.VOCAB, (2, example.BATCH, example.LENGTH), np.int32)
        batch = {"tokens": tokens[0], "targets": tokens[1]}
    elif name == "pipeline_zero_bubble":
        draw = rng.normal(size=(example.BATCH, 5)).astype(np.float32)
        batch = {"x": draw[:, :4], "y": draw[:, 4]}
    else:
        images = rng.normal(size=(example.BATCH, example.SIZE, example.SIZE, 3)).astype(np.float32)
        batch = {"images": images, "labels": rng.integers(0, example.CLASSES, example.BATCH, np.int32)}

    def plain(shared, stacked):
        x, _ = jax.lax.scan(lambda x, weights: (example.layer(weights, x), None), example.embed(shared, batch), stacked)
        return example.loss_fn(shared, x, batch)

    loss, grads = jax.jit(example.gradients)(example.shared, example.stacked, batch)
    expected, expected_grads = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(example.shared, example.stacked)
    # float32 sums in another order; a unit that is missing, doubled or misplaced is of the order of one.
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for (path, a), b in zip(jax.tree.leaves_with_path(grads), jax.tree.leaves(expected_grads), strict=True):
        assert np.linalg.norm(np.ravel(a - b)) <= 1e-5 * np.linalg.norm(np.ravel(b)), jax.tree_util.keystr(path)


def test_the_gradients_of_the_unet_are_those_of_plain_autodiff(rng):
    """Flax modules of different shapes, with skips, on five devices."""
    example = importlib.import_module("pipeline_unet")
    shape = (12, example.SIZE, example.SIZE, 1)
    batch = {name: rng.normal(size=shape).astype(np.float32) for name in ("noisy", "clean")}

    def plain(params):
        x = batch
        for stage, tree in zip(example.stages, params, strict=True):
            x = stage(tree, x)
        return example.loss_fn(x, batch)

    packed = example.pack_stages(example.params, example.mesh, replicas=example.replicas)
    loss, grads = jax.jit(example.gradients)(packed, batch)
    expected, expected_grads = jax.jit(jax.value_and_grad(plain))(example.params)
    # float32 sums in another order, as above.
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for (path, a), b in zip(jax.tree.leaves_with_path(grads.unpack()), jax.tree.leaves(expected_grads), strict=True):
        assert np.linalg.norm(np.ravel(a - b)) <= 1e-5 * np.linalg.norm(np.ravel(b)), jax.tree_util.keystr(path)


def test_the_page_quotes_the_examples():
    """Every block of docs/pipelines.md that names a file is in that file."""
    page = (EXAMPLES.parent / "pipelines.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, re.S)
    assert {name for name, _ in blocks} == {f"{name}.py" for name in [*PIPELINES, "pipeline_unet"]}
    for name, block in blocks:
        for part in block.split("...\n"):
            assert part.strip() in (EXAMPLES / name).read_text(encoding="utf-8"), name
