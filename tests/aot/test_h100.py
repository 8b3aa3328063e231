"""The training step, compiled for 8 and 64 H100 by the CUDA plugin on a machine that has none."""

import numpy as np
import pytest

pytest.importorskip("jax_cuda13_plugin", reason="the CUDA compiler is not installed: pip install -e '.[test,cuda13]'")

from cases import ATTENTION, attention, attention_step, check, report

from jaxstack.aot import hlo


@pytest.mark.parametrize("name", ["h100_8", "h100_64"])
def test_dense(name):
    """FSDP over 4, tensor with sequence parallelism over 2, and on 8 hosts 8 replicas that sum their parts."""
    sent = check(name)
    within = {(axes, kind) for axes in ("fsdp", "tensor") for kind in ("all-gather", "reduce-scatter")}
    assert set(sent) == within | ({("data", "all-reduce")} if name == "h100_64" else set())
    predicted = hlo.sent(report(name).expected)
    for kind, value in sent.items():
        # Scalars and gradients of norms apart, XLA moves what the model says.
        np.testing.assert_allclose(value, predicted[kind], rtol=0.01, err_msg=str(kind))


@pytest.mark.parametrize("name", ["h100_stages_8", "h100_stages_64"])
def test_stages(name):
    """A pipeline beside FSDP and tensor parallelism: two permutes a tick; weights gathered and scattered once."""
    sent = check(name)
    assert ("pipe", "collective-permute") in sent
    found, predicted = report(name).collectives, hlo.sent(report(name).expected)
    assert all(c.times == 1 for c in found if {"data", "fsdp"} & set(c.axes))
    for kind, value in sent.items():
        np.testing.assert_allclose(value, predicted[kind], rtol=0.02, err_msg=str(kind))


def test_hosts_hold_whole_groups_of_the_inner_axes():
    """Only replicas talk across hosts: each group of fsdp and tensor lies within one."""
    from cases import CASES

    from jaxstack import aot

    target, cfg = CASES["h100_64"]
    mesh = aot.placed(cfg, target)[0].mesh
    hosts = np.vectorize(lambda device: device.process_index)(mesh.devices)
    assert (hosts == hosts[:, :, :1, :1, :1, :1]).all()
    assert len(set(hosts.ravel())) == 8


@pytest.mark.parametrize(
    ("name", "implementation", "calls"),
    [(name, "pallas_gpu", "xla.gpu.triton") for name in ATTENTION]
    + [("llama", "cudnn", "__cudnn$fmhaSoftmaxBackward")],
)
def test_attention_kernels(name, implementation, calls):
    """Beside its arrays a kernel needs a number or two a row; scores of all pairs would be 2 GiB in bfloat16."""
    compiled = attention(name, implementation, "h100:1x1x1")
    assert calls in compiled.as_text()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    print(f"{name}, {implementation}: {temporary / 2**20:.1f} MiB")
    assert temporary <= 8 << 20


@pytest.mark.parametrize("implementation", ["pallas", "cudnn"])
def test_a_step_with_attention_kernels(implementation):
    """In the one manual region, whose types are checked."""
    found, scores = attention_step(implementation, "h100:1x1x4", fsdp=2, tensor=2)
    print(f"{implementation}: {found.temporary / 2**20:.1f} MiB, and scores would be {scores / 2**20:.1f}")
    assert found.temporary < scores
