"""Tests that compile for chips that are not here. Not part of `pytest`: `pytest -n 0 tests/aot/test_tpu.py` (extra
`[tpu]`) and `pytest -n 0 tests/aot/test_h100.py` (extra `[cuda13]`, an environment of its own); `.ci/run` runs both."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"  # what is for other chips cannot be read back here
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ.pop("XLA_FLAGS", None)  # tests/conftest.py has XLA compile quickly and badly; here the program counts
