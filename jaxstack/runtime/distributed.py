"""Runs of several processes: how they join and agree, and which rows of a batch each of them reads.

`jaxstack.runtime.launchers` detects the processes. Functions that need JAX import it themselves, since it must start
after `jaxstack.runtime.platform.configure`.

After `join`, a failure of one process ends all of them: `jaxstack.runtime.watchdog` detects it, and JAX's own heartbeat
is a second line of defense.
"""

import contextlib
import os
import socket
import sys
import threading
import time
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from jaxstack.common import errors
from jaxstack.common.errors import Exit, RunError
from jaxstack.common.jax_private import private_module
from jaxstack.config import ConfigError, DistributedConfig
from jaxstack.runtime.launchers import Processes

if TYPE_CHECKING:
    import jax

    from jaxstack.common.tree import PyTree

HEARTBEAT_S = 40
"""Seconds without a heartbeat, beyond `distributed.lost_s`, after which JAX ends the processes, without a clear
message."""

SHUTDOWN_S = 30
"""Seconds that a process waits for the others when it ends, even after an error."""

ending = threading.Event()
"""Set once this process ends with an error of its own. It then gets more time, such as for its last uploads."""

_ENDED = "jaxstack/ended/"


def join(processes: Processes | None, cfg: DistributedConfig) -> None:
    """Starts `jax.distributed`, and returns once every process has joined. For `None` it does nothing.

    A process that cannot join within `cfg.timeout_s` prints an error and exits with `Exit.NOT_JOINED`. JAX would abort
    with a C++ stack trace that cannot be caught, so our timer fires before JAX's.

    Raises:
      RunError: another program has the coordinator's port on this host.
    """
    if processes is None:
        return
    if processes.index == 0 and processes.coordinator:
        _require_free_port(processes)
    import jax

    timeout_s = cfg.timeout_s
    timer = threading.Timer(timeout_s, _give_up, (processes, f"waited {timeout_s} s"))
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            processes.coordinator,
            processes.count,
            processes.index,
            local_device_ids=processes.local_devices,
            # JAX must not override values that we have already found.
            cluster_detection_method="deactivate" if processes.coordinator else None,
            initialization_timeout=timeout_s + 60,
            heartbeat_timeout_seconds=cfg.lost_s + HEARTBEAT_S,
            shutdown_timeout_seconds=SHUTDOWN_S,
        )
    except (RuntimeError, ValueError, OSError) as error:
        _give_up(processes, f"failed ({str(error).splitlines()[0]})")
    finally:
        timer.cancel()


def _require_free_port(processes: Processes) -> None:
    """Checks that process 0 can listen at the coordinator's port, since JAX ends with a segmentation fault otherwise.

    Raises:
      RunError: the port cannot be used. Its code lets `jaxstack supervise` try again, as the last run may be ending.
    """
    port = int(str(processes.coordinator).rpartition(":")[2])
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
    except OSError as error:
        raise RunError(
            Exit.NOT_JOINED,
            f"error: port {port} of the coordinator {processes.coordinator} (from {processes.source}) cannot be used "
            f"on this host: {error.strerror}. Stop the program that has it, or give all processes another port.",
        ) from None


def _give_up(processes: Processes, action: str) -> NoReturn:
    """Prints one line to stderr, and ends this process whatever its threads are doing.

    Args:
      processes: that should have joined.
      action: "waited ..." or "failed ...".
    """
    this = "this process" if processes.index is None else f"process {processes.index} of {processes.count}"
    where = processes.coordinator or "the coordinator that JAX found"
    advice = "Check the logs of all processes, and that all use the same coordinator and number of processes"
    if processes.index == 0 or processes.coordinator is None:
        state = "some processes did not join"
    elif is_listening(processes.coordinator):
        state = "process 0 is reachable, but some processes did not join"
    else:
        state = "nothing is listening there"
        advice = "Check the log of process 0, that it runs on that host, and that its port is reachable from here"
    print(
        f"{errors.program()}: error: {this} {action} to join the run at {where} (from {processes.source}): {state}. "
        f"{advice}. Raise --distributed.timeout_s to wait longer, or set --distributed.num_processes=1 to run alone.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(Exit.NOT_JOINED)


def has_others() -> bool:
    """Returns whether this is one of several processes that have joined."""
    global_state = private_module("distributed").global_state

    return global_state.client is not None and (global_state.num_processes or 1) > 1


def announce_end(index: int, code: int, reason: str) -> None:
    """Tells the other processes that this one ends with an error. The first announcement counts.

    Args:
      index: index of this process.
      code: exit code of this process.
      reason: why it ends; only the first line is sent.
    """
    first = next(iter(reason.strip().splitlines()), "")
    with contextlib.suppress(RuntimeError):  # it has been announced, or the coordinator is lost
        _coordinator().key_value_set(f"{_ENDED}{index}", f"{int(code)} {first.encode(errors='replace').decode()}")


def announced_ends() -> dict[int, tuple[int, str]]:
    """Returns exit code and reason of the processes that have ended with an error, by their indices.

    Raises:
      RuntimeError: the coordinator is lost.
    """
    entries = _coordinator().key_value_dir_get(_ENDED)
    parsed = ((key.rsplit("/", 1)[1], value.partition(" ")) for key, value in entries)
    return {int(index): (int(code), reason) for index, (code, _, reason) in parsed}


def cause(index: int) -> tuple[int, int, str] | None:
    """Returns another process that has ended with an error of its own: index, exit code and reason; or `None`.

    A process whose collective failed, or that waited for another one, is not the cause.

    Args:
      index: index of this process.
    """
    if not has_others():
        return None
    with contextlib.suppress(RuntimeError):
        for other, (code, reason) in sorted(announced_ends().items()):
            if other != index and is_own_error(code, reason):
                return other, code, reason
    return None


def is_own_error(code: int, reason: str) -> bool:
    """Returns whether a process ended with an error of its own, from its exit code and the line that it announced.

    A collective fails with JAX's runtime error where another process has ended; any other exception is a fault of the
    program.
    """
    if code == 1:
        return not reason.startswith("JaxRuntimeError")
    return code in {*Exit} - {Exit.PEER_LOST}


def leave(code: int, reason: str) -> None:
    """Ends this process at once after telling the others why. Returns only if there are no others.

    JAX's own shutdown would abort a process with a signal if another one has ended before it. Process 0 has the
    coordinator, without which JAX aborts the others in the same way, so it waits until they have ended too.

    Args:
      code: exit code.
      reason: what this process has printed.
    """
    if not has_others():
        return
    global_state = private_module("distributed").global_state

    index = int(global_state.process_id)
    count = int(global_state.num_processes)
    announce_end(index, code, reason)
    deadline = time.monotonic() + SHUTDOWN_S
    while index == 0 and time.monotonic() < deadline:
        try:
            if len(announced_ends()) >= count:
                break
        except RuntimeError:
            break
        time.sleep(0.1)
    if index == 0:
        time.sleep(_LAST_READ_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


_LAST_READ_S = 1
"""Seconds between the last announcement and the end of the coordinator. Who announces its end exits right after."""


def is_listening(address: str) -> bool:
    """Returns whether a server accepts connections at `host:port`."""
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except OSError:
        return False
    return True


# The functions below run after joining. If there is a single process, they return their input.


def assert_equal_across_processes(values: Mapping[str, object]) -> None:
    """Makes sure that every process has the same values.

    Otherwise processes would wait for each other forever, or train on a mixture of different settings.

    Args:
      values: values by name, which the message shows. They are compared by their `repr`.

    Raises:
      ConfigError: on every process, with the names of values that differ.
    """
    from jax.experimental import multihost_utils

    hashes = np.array([zlib.crc32(repr(value).encode()) for value in values.values()], np.uint32)
    gathered = np.reshape(multihost_utils.process_allgather(hashes), (-1, hashes.size))
    differ = [name for name, column in zip(values, gathered.T, strict=True) if (column != column[0]).any()]
    if differ:
        raise ConfigError(
            f"processes differ in {' and '.join(differ)}. Start all of them with the same flags, files and Python, and "
            f"a run.dir on a shared file system."
        )


def broadcast_from_process_0(value: int) -> int:
    """Returns the value of process 0, which alone reads the files of the run, on every process."""
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.asarray(value)))


def first_reason(reason: str | None) -> str | None:
    """Returns, on every process, the reason of the first process that has one, or `None` if none has."""
    from jax.experimental import multihost_utils

    buffer = np.zeros(400, np.uint8)
    text = np.frombuffer((reason or "").encode(errors="backslashreplace")[: buffer.size], np.uint8)
    buffer[: text.size] = text
    gathered = np.reshape(multihost_utils.process_allgather(buffer), (-1, buffer.size))
    reasons = (row.tobytes().rstrip(b"\0").decode(errors="ignore") for row in gathered)
    return next((reason for reason in reasons if reason), None)


def fetch(arrays: "PyTree") -> "PyTree":
    """Returns global arrays, or a tree of them, as complete NumPy arrays on every process.

    All processes call it with the same arrays in the same order.
    """
    import jax
    from jax.experimental import multihost_utils

    def one(array: "PyTree") -> "PyTree":
        if not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated:
            return jax.device_get(array)
        return multihost_utils.process_allgather(array, tiled=True)

    return jax.device_get(arrays) if jax.process_count() == 1 else jax.tree.map(one, arrays)


def gather_numbers(numbers: np.ndarray) -> np.ndarray:
    """Returns the numbers of all processes, float64 [processes, *shape], given those of this process.

    The numbers keep all their bits; JAX would round them to float32.
    """
    from jax.experimental import multihost_utils

    bits = np.ascontiguousarray(numbers, np.float64).view(np.uint32)
    gathered = np.asarray(multihost_utils.process_allgather(bits))
    return gathered.reshape(-1, *bits.shape).view(np.float64)


def gather_to_process_0(key: str, text: str, timeout_s: float) -> list[str]:
    """Returns the texts of all processes on process 0, and an empty list on the others.

    The texts are sent through the coordinator, not through devices, so a thread may call this during training.

    Args:
      key: equal on all processes, and different for each call.
      text: text of this process.
      timeout_s: seconds to wait for each other process.
    """
    import jax

    index = jax.process_index()
    count = jax.process_count()
    if index:
        _coordinator().key_value_set(f"jaxstack/{key}/{index}", text)
        return []
    names = [f"jaxstack/{key}/{i}" for i in range(1, count)]
    others = [_coordinator().blocking_key_value_get(name, int(timeout_s * 1000)) for name in names]
    for name in names:
        _coordinator().key_value_delete(name)
    return [text, *others]


def send_from_process_0(key: str, text: str, timeout_s: float) -> str:
    """Returns the text of process 0 on every process, also through the coordinator.

    Args:
      key: equal on all processes, and different for each call.
      text: text of process 0; ignored on the other processes.
      timeout_s: seconds to wait for process 0.
    """
    import jax

    name = f"jaxstack/{key}/sent"
    if jax.process_index():
        return str(_coordinator().blocking_key_value_get(name, int(timeout_s * 1000)))
    if jax.process_count() > 1:
        _coordinator().key_value_set(name, text)
    return text


def coordinator_barrier(key: str, timeout_s: float) -> None:
    """Returns once every process has called this. Unlike `barrier`, it uses the coordinator and not the devices.

    Args:
      key: equal on all processes, and different for each call.
      timeout_s: seconds to wait for the other processes.
    """
    import jax

    if jax.process_count() > 1:
        _coordinator().wait_at_barrier(f"jaxstack/{key}", int(timeout_s * 1000))


def _coordinator() -> Any:
    return private_module("distributed").global_state.client


def should_stop(step: int, requested: bool) -> bool:
    """Returns whether all processes stop after this step, because one of them was asked to.

    Every process calls this at every step. If there are several, JAX catches SIGTERM and agrees on the step.

    Args:
      step: the step that was started last.
      requested: whether this process was asked to stop; ignored if there are several.
    """
    import jax
    from jax.experimental import multihost_utils

    return requested if jax.process_count() == 1 else multihost_utils.reached_preemption_sync_point(step)


def barrier() -> None:
    """Returns once every process has called this. It has no time limit; the watchdog ends it if a process dies."""
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices("jaxstack")


def local_rows(sharding: "jax.sharding.Sharding", rows: int) -> np.ndarray:
    """Returns the indices of the rows that the devices of this process store, int [local rows] in ascending order.

    A process reads only these rows.

    Args:
      sharding: sharding of the global batch.
      rows: number of rows of the global batch.
    """
    slices = sharding.addressable_devices_indices_map((rows,)).values()
    return np.unique(np.concatenate([np.arange(rows)[index] for index in slices if index is not None]))


def to_global_batch(
    batch: dict[str, np.ndarray], sharding: "jax.sharding.Sharding", local: np.ndarray, rows: int
) -> "dict[str, jax.Array]":
    """Builds the global batch on the devices from the rows that each process has read.

    Args:
      batch: arrays [len(local), ...] of this process.
      sharding: sharding of the global arrays [rows, ...].
      local: the rows of `local_rows`, which need not be contiguous.
      rows: number of rows of the global batch.
    """
    import jax

    if sharding.is_fully_addressable:
        return jax.device_put(batch, sharding)
    position = np.full(rows, -1)  # of a global row among the local ones
    position[local] = np.arange(len(local))

    def to_array(array: np.ndarray) -> jax.Array:
        def read_shard(index: Any) -> np.ndarray:  # one slice per dimension
            return array[position[index[0]]][:, *index[1:]]

        return jax.make_array_from_callback((rows, *array.shape[1:]), sharding, read_shard)

    return {name: to_array(array) for name, array in batch.items()}
