"""Converts small models with jax2onnx, and compares the logits of onnxruntime with the model: `python
benchmarks/onnx_outputs.py`

It needs `pip install --no-deps jax2onnx onnx onnx-ir onnxruntime equinox jaxtyping wadler_lindig einops` beside this
package: jax2onnx asks for an older orbax-checkpoint than jaxstack does, but works with this one. Writes
results/onnx_outputs.json.
"""

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ |= {"JAX_PLATFORMS": "cpu"}  # before JAX is imported

import jax
import jax.numpy as jnp
import numpy as np
from record import record

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import families as shapes

from jaxstack import families
from jaxstack.models import params
from jaxstack.models.context import Context

MODELS = ("gpt2", "llama3", "qwen3", "gemma2")
ROWS, LENGTH = 2, 32


def compare(name: str) -> dict[str, Any]:
    """Returns the largest logit of a model, and its largest difference in onnxruntime."""
    import jax2onnx
    import onnxruntime

    model = shapes.FAMILIES[name]
    family = families.of(model)
    values = params.init(jax.random.key(0), families.spec(model))

    def logits(tokens: jax.Array) -> jax.Array:
        hidden, _ = family.hidden_states(model, values, {"tokens": tokens}, Context())
        return family.logits(model, values, hidden, Context())

    try:
        made = jax2onnx.to_onnx(logits, [jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)])
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(made.SerializeToString(), options)
    except Exception as error:  # of a converter, of any type
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    tokens = np.random.default_rng(0).integers(0, model.vocab, (ROWS, LENGTH)).astype(np.int32)
    (found,) = session.run(None, {session.get_inputs()[0].name: tokens})
    expected = np.asarray(jax.jit(logits)(tokens))
    return {"largest": float(np.abs(expected).max()), "difference": float(np.abs(found - expected).max())}


if __name__ == "__main__":
    packages = {name: version(name) for name in ("jax2onnx", "onnx", "onnxruntime", "orbax-checkpoint")}
    rows = {}
    for name in MODELS:
        rows[name] = compare(name)
        print(name, rows[name], flush=True)
    record("onnx_outputs", {"packages": packages, "models": rows})
