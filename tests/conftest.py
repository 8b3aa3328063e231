"""Every test runs on eight simulated CPU devices, whatever the machine has."""

import atexit
import os
import shutil
import tempfile
from importlib.metadata import version

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# Most of a test's time is compilation. Whole runs (tests/test_train.py) take XLA as users do, fully optimised.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
if version("jaxlib").startswith("0.10."):  # fusions as newer XLA writes them compile for four times as long
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
# What one process has compiled, the others read: the workers of pytest-xdist and the runs that tests start inherit it.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jaxstack-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import numpy as np
import pytest


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Fresh random inputs in every run; the seed is shown when the test fails."""
    seed = int.from_bytes(os.urandom(4), "little")
    request.node.add_report_section("setup", "random seed", str(seed))
    return np.random.default_rng(seed)
