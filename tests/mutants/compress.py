"""Mutants of training with rounded matrices, and of products with codes."""

from mutants.rows import mistakes

QAT = "training/test_qat.py"

mistakes(
    "compress", "training/gradients.py", QAT + " -k rounded_matrices",
    ("values = round_params(cfg, values)", "values = values"),
)  # fmt: skip

mistakes(
    "compress", "training/state.py", QAT + " -k evaluation",
    ("return round_arrays(cfg, values)", "return values"),
)  # fmt: skip

mistakes(
    "compress", "models/params.py", QAT + " -k rounded_matrices",
    ('return p.kind == "matrix" and "lora" not in p.axes', 'return p.kind == "matrix"'),
)  # fmt: skip

mistakes(
    "compress", "kernels/rounding.py", QAT + " -k compression_stores",
    ("inputs = prod(w.shape[batch_axes : batch_axes + in_axes])", "inputs = w.shape[batch_axes]"),
)  # fmt: skip

mistakes(
    "compress", "kernels/int8_weight.py", "kernels/test_int8_weight.py -k 'rounded or training'",
    ("low = jnp.zeros_like(high) if rounds_inputs else", "low = jnp.zeros_like(high) if not rounds_inputs else"),
    ("coarse += fine * (1 / 254)", "coarse += fine * (1 / 127)"),
    ("if not rounds_inputs:\n        coarse", "if rounds_inputs:\n        coarse"),
)  # fmt: skip

mistakes(
    "compress", "hf/compressed.py", "hf/test_compressed.py -k 'inputs'",
    ('"symmetric": True, "strategy": "token", "dynamic": True}', '"symmetric": True, "strategy": "tensor", "dynamic": True}'),
)  # fmt: skip
