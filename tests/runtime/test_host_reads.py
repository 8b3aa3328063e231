"""Under `train.debug`, a read of a device's array in the middle of a step is an error that names the line."""

import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxstack.config import ConfigError
from jaxstack.runtime.host_reads import HostReads

HERE = f"tests/runtime/{Path(__file__).name}"
READS = {
    "float": lambda x: float(x[0]),
    "bool": lambda x: bool(x[0] > 0),
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "asarray": lambda x: np.asarray(x),
    "array": lambda x: np.array(x),
    "device_get": lambda x: jax.device_get(x),
    "print": lambda x: f"{x}",
}


def arrays(devices):
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    return jax.device_put(jnp.arange(4.0), NamedSharding(mesh, PartitionSpec("data")))


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("how", READS)
def test_a_read_is_refused_and_named(how, devices):
    x, read = arrays(devices), READS[how]
    with HostReads(active=True) as reads:
        reads.forbid()
        with pytest.raises(ConfigError, match="in the middle of a step") as caught:
            read(x)
        reads.allow()
        read(x)
        reads.forbid()
    read(x)
    line = read.__code__.co_firstlineno
    assert str(caught.value).startswith(f"{HERE}:{line} in <lambda> reads an array of the devices, ")
    assert "train.debug=false" in caught.value.advice


def test_what_is_no_read_of_a_step_is_allowed():
    """Constants of programs, computations, copies between devices, other threads, and NumPy's own arrays."""
    x, constant, two, found = arrays(2), jnp.arange(3.0) + 1, jnp.float32(2), []
    with HostReads(active=True) as reads:
        reads.forbid()
        np.testing.assert_array_equal(np.asarray([1, 2]), np.array((1, 2)))
        y = jax.jit(lambda x: x[:3] * constant)(x)
        jax.device_put(x, jax.devices()[3])
        jnp.linalg.norm(y + np.arange(3.0))
        thread = threading.Thread(target=lambda: found.append(np.asarray(y)))
        thread.start()
        thread.join()
        jax.jit(lambda x: x * float(two))(x)
    np.testing.assert_array_equal(found[0], [0, 2, 6])
    with HostReads(active=False) as reads:
        reads.forbid()
        float(x[0])


def test_callbacks_in_a_step_are_refused():
    def send(x):
        return io_callback(lambda x: np.asarray(x), jax.ShapeDtypeStruct((), "float32"), x)

    def compute(x):
        return jax.pure_callback(lambda x: np.asarray(x), jax.ShapeDtypeStruct((), "float32"), x)

    def show(x):
        jax.debug.print("{}", x)
        return x

    with HostReads(active=True) as reads:
        reads.forbid()
        for f, name in ((send, "io_callback"), (compute, "pure_callback")):
            with pytest.raises(ConfigError, match=f"in {f.__name__} calls {name}, which sends values") as caught:
                jax.jit(f)(jnp.ones(()))
            assert str(caught.value).startswith(f"{HERE}:{f.__code__.co_firstlineno + 1} ")
        jax.jit(show)(jnp.ones(()))
    assert jax.jit(lambda x: compute(x))(jnp.ones(())) == 1
