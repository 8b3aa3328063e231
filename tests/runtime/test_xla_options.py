"""XLA's options for several GPUs and for generation: jaxlib has them, and the user's XLA_FLAGS win."""

import os
import subprocess
import sys

import jax
import pytest
from jax.sharding import AbstractMesh

from jaxstack.config import ConfigError, MeshConfig
from jaxstack.runtime import platform, xla_options
from jaxstack.runtime.xla_options import CACHE_OPTION, GPU_OPTIONS, XlaOptions, select_decode_options, select_options


@pytest.fixture(autouse=True)
def no_flags(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)


def mesh(devices):
    return AbstractMesh((devices,), ("data",))


def test_every_option_exists_in_the_installed_jaxlib():
    """An option under a name that jaxlib lacks is an error of the compiler, so this would fail after a renaming."""
    used, left_out = select_options("gpu", mesh(8))
    assert len(used) == len(GPU_OPTIONS) == 4
    assert not left_out
    doubled = jax.jit(lambda x: 2 * x, compiler_options=used)
    assert doubled(21) == 42


def test_one_device_and_other_platforms_need_none():
    assert (
        select_options("gpu", mesh(1))
        == select_options("tpu", mesh(8))
        == select_options("cpu", mesh(8))
        == XlaOptions({}, {})
    )
    assert select_options("gpu", None) == XlaOptions({}, {})


def test_a_pipeline_does_without_gathers_a_turn_ahead():
    """XLA notes no trip count for a loop over ticks that it pipelines, and the host would be asked before each tick."""
    assert not [name for name in select_options("gpu", AbstractMesh((2, 2), ("pipe", "data"))).used if "gather" in name]
    assert select_options("gpu", AbstractMesh((1, 2), ("pipe", "data"))) == select_options("gpu", mesh(2))


def test_turns_of_several_layers_do_without_collectives_a_turn_ahead():
    """XLA would keep the weights of all layers of a turn, and their float32 gradients, for one turn more."""
    one, several = (select_options("gpu", mesh(8), several).used for several in (False, True))
    assert one.keys() == several.keys()
    changed = [name for name in one if one[name] != several[name]]
    assert [name.rsplit("_", 2)[-2:] for name in changed] == [["all", "gather"], ["reduce", "scatter"]]
    assert all(several[name] in (False, "COLLECTIVE_PIPELINING_MODE_OFF") for name in changed)
    assert jax.jit(lambda x: 2 * x, compiler_options=several)(21) == 42


@pytest.mark.parametrize("in_file", [False, True])
def test_flags_of_the_user_win(in_file, monkeypatch, tmp_path):
    """A flag may have any name that some jaxlib gives an option; XLA_FLAGS may be the path of a file."""
    flags = "--xla_gpu_enable_latency_hiding_scheduler=false --xla_gpu_pipeline_all_gather=off --xla_dump_to=/x"
    (tmp_path / "flags").write_text(flags)
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "flags") if in_file else flags)
    found = select_options("gpu", mesh(8))
    assert [name.rsplit("_", 2)[-2:] for name in found.used] == [["reduce", "scatter"], ["all", "reduce"]]
    assert found.explain() == (
        "XLA_FLAGS is set, so jaxstack leaves out xla_gpu_enable_latency_hiding_scheduler, xla_gpu_pipeline_all_gather"
    )


def test_an_option_that_jaxlib_lacks_is_left_out(monkeypatch):
    names = (("xla_gpu_never_existed", True), ("xla_gpu_enable_latency_hiding_scheduler", "no boolean"))
    monkeypatch.setattr(xla_options, "GPU_OPTIONS", {"x": names})
    found = select_options("gpu", mesh(2))
    assert found.used == {}
    assert found.explain() == "this jaxlib lacks it, so jaxstack leaves out xla_gpu_never_existed"


@pytest.mark.parametrize(
    ("flags", "said"), [("--xla_cpu_multi_thread_eigen=false", False), ("--xla_cpu_enable_fast_math=true", True)]
)
def test_flags_of_the_user_replace_those_for_cpus(flags, said, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    platform.configure(MeshConfig(data=2), 2)
    line = "XLA_FLAGS is set, so jaxstack leaves out xla_cpu_multi_thread_eigen=false"
    assert select_options("cpu", mesh(2)).explain() == line * said
    assert not select_options("cpu", mesh(1)).left_out


def test_generation_on_a_cpu_has_an_option_unless_the_user_sets_it(monkeypatch):
    assert select_decode_options("cpu") == {CACHE_OPTION: True}
    assert select_decode_options("gpu") == select_decode_options("tpu") == {}
    monkeypatch.setenv("XLA_FLAGS", f"--{CACHE_OPTION}=false")
    assert select_decode_options("cpu") == {}


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--xla_bogus=1", "Unknown flag in XLA_FLAGS: --xla_bogus=1"),
        ("--xla_cpu_multi_thread_eigen=false --xla_bogus", "Unknown flag in XLA_FLAGS: --xla_bogus"),
        ("--xla_cpu_multi_thread_eigen=maybe", "Couldn't interpret value maybe for flag xla_cpu_multi_thread_eigen"),
        ("no_file", 'Could not open file "no_file" to read flags for environment variable "XLA_FLAGS"'),
    ],
)
def test_a_flag_that_xla_refuses_is_named_before_xla_ends_the_process(monkeypatch, flags, reason):
    monkeypatch.setenv("XLA_FLAGS", flags)
    with pytest.raises(ConfigError) as error:
        platform.check_xla_flags()
    assert str(error.value) == (f"XLA_FLAGS={flags} is refused by XLA: {reason}. Correct the flag, or unset XLA_FLAGS.")


def test_flags_that_xla_has_accepted_are_not_checked_again(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    monkeypatch.setenv(platform.ACCEPTED_FLAGS, "")
    asked = []
    run = subprocess.run
    monkeypatch.setattr(
        platform.subprocess, "run", lambda *args, **options: asked.append(args) or run(*args, **options)
    )
    for _ in range(2):
        platform.check_xla_flags()
    assert len(asked) == 1
    monkeypatch.setenv("XLA_FLAGS", " ")
    platform.check_xla_flags()
    assert len(asked) == 1


def test_a_command_ends_with_one_line_and_code_2():
    env = {**os.environ, "XLA_FLAGS": "--xla_bogus=1"}
    words = ["train", "--run.dir=unused", "--print_shardings"]
    ended = subprocess.run([sys.executable, "-m", "jaxstack", *words], env=env, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "train: error: XLA_FLAGS=--xla_bogus=1 is refused" in ended.stderr
    assert ended.stderr.count("\n") <= 2
    shown = subprocess.run(
        [sys.executable, "-m", "jaxstack", "schedule", "1f1b", "--stages=2"], env=env, capture_output=True
    )
    assert shown.returncode == 0, "a command that compiles nothing does not ask"
