"""Configures the tests: eight simulated CPU devices, random inputs from `--seed`, and time limits."""

import atexit
import gc
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# Compilation dominates the time of a test. Complete runs (tests/test_train.py) use the full optimisation of XLA.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
if version("jaxlib").startswith("0.10."):  # its new fusion emitters take four times as long to compile
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
os.environ["JAXSTACK_ACCEPTED_XLA_FLAGS"] = os.environ["XLA_FLAGS"]  # the runs that tests start need not ask XLA
# All processes share one compilation cache: the workers of pytest-xdist and the runs that tests start.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jaxstack-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

# A shell's background jobs ignore interrupts, and so would the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import numpy as np
import pytest
from other_seeds import seed_of_commit

SLOW_LIMIT_S = 3000
"""The time limit of slow tests and of those that compile ahead of time. pyproject.toml has the limit of the others."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed",
        type=int,
        default=int(os.environ.get("JAXSTACK_TEST_SEED", "0")),
        help="the seed of all random inputs, 0 or more (default: JAXSTACK_TEST_SEED, else 0)",
    )
    parser.addoption(
        "--minutes",
        type=float,
        help="run slow tests in an order of the commit, those of `matrix` last, and begin none after this time",
    )
    parser.addoption("--record-failed", type=Path, help="write the name of each failed test to this file, a line each")
    parser.addoption("--record-skipped", type=Path, help="write the names of skipped tests, and files, to this file")
    parser.addoption("--only", type=Path, help="run only tests and files that this file names, from --record-skipped")


def pytest_report_header(config: pytest.Config) -> str:
    return f"random inputs: --seed={config.option.seed}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(f"The tests took their random inputs from --seed={config.option.seed}.")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.only:
        names = config.option.only.read_text().splitlines()
        config.args = sorted({str(config.rootpath / name.partition("::")[0]) for name in names})
    # Workers of pytest-xdist report to this process, which also reports a test whose worker died.
    for outcome in ("failed", "skipped"):
        path = config.getoption(f"--record-{outcome}")
        if path and not hasattr(config, "workerinput"):
            config.pluginmanager.register(Recorder(outcome, path))


class Recorder:
    """Writes the names of the tests with an outcome to a file: of those that failed, or of those that were skipped.

    A file that is skipped as a whole, for example because a package is missing, has its own name there.
    """

    def __init__(self, outcome: str, path: Path) -> None:
        self.outcome = outcome
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.record(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if self.outcome == "skipped":
            self.record(report)

    def record(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.outcome == self.outcome:
            with self.path.open("a") as file:
                file.write(f"{report.nodeid}\n")


def one_of_many(item: pytest.Item) -> bool:
    """Returns whether a test is one of a matrix, and none that `matrix(quick=...)` names by words of its parameters."""
    marker = item.get_closest_marker("matrix")
    if marker is None:
        return item.path.parent.name == "aot"
    return not any(word in item.name for word in marker.kwargs.get("quick", ()))


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if one_of_many(item) and item.path.parent.name != "aot":
            item.add_marker("slow")
        slow = item.get_closest_marker("slow") or item.path.parent.name == "aot"
        if slow and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT_S))
        if {"rng", "seed"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("random")
    if items and items[0].config.option.only:
        names = set(items[0].config.option.only.read_text().splitlines())
        items[:] = [item for item in items if item.nodeid in names or item.nodeid.partition("::")[0] in names]
    if items and items[0].config.option.minutes:
        random.Random(seed_of_commit()).shuffle(items)
        items.sort(key=one_of_many)


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and tests live as long as this process: the collector need not visit them again


BEGAN = time.monotonic()


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.option.minutes
    if minutes and (one_of_many(item) or item.get_closest_marker("slow")):
        if not one_of_many(item):
            minutes *= 2 / 3  # the rest belongs to the matrices
        if time.monotonic() - BEGAN > 60 * minutes:
            pytest.skip("the time of --minutes is over; the order depends on the commit")


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Undoes what commands that run in this process change in `os.environ`, which later tests' processes inherit."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def entropy(node: pytest.Item | pytest.Collector) -> list[int]:
    """Returns the seed of a generator, from the run's seed and the node's name, so that tests are independent."""
    folders, _, test = node.nodeid.partition("::")
    name = f"tests/{Path(folders).name}::{test}"  # without its folder, so that a file keeps its inputs when it moves
    return [node.config.option.seed, *name.encode()]


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Returns a generator for this test, with the same numbers in every run with the same `--seed`."""
    return np.random.default_rng(entropy(request.node))


@pytest.fixture(scope="module")
def seed(request: pytest.FixtureRequest) -> int:
    """Returns a seed for inputs that the tests of one file share, such as their reference values."""
    return int(np.random.SeedSequence(entropy(request.node)).generate_state(1)[0])
