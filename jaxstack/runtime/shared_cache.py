"""The cache of compiled programs of a run of several processes, in the directory of the run.

`compile_cache` has the cache of a single process, which is chosen before JAX is imported.
"""

import json
import os
import secrets
import sys
import time
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxstack.runtime import compile_cache, distributed

NAME = "compiled"
"""Name of the cache in the directory of a run."""

_VISIBLE_S = 90
"""Seconds that a file of process 0 may take to appear to the others. NFS clients cache a directory for a minute."""


def share(run: Path, timeout_s: float) -> None:
    """Gives the processes of a run one cache, in the directory of the run. All processes call this before they compile.

    Process 0 writes, and all read. On GPUs the processes compile together: each of them times some of the kernels. So a
    process that reads a program and one that compiles it would wait for each other. Therefore no process has this cache
    unless all of them see the entries that process 0 sees.

    Nothing changes if `JAX_COMPILATION_CACHE_DIR` is set on process 0, or if there is one process.

    Args:
      run: the directory of the run, which exists.
      timeout_s: seconds to wait for each process.
    """
    if jax.process_count() == 1:
        return
    folder = run.absolute() / NAME
    index = jax.process_index()
    listed = ""
    if index == 0 and compile_cache.FOLDER not in os.environ:
        listed = _list_entries(folder)
    listed = distributed.send_from_process_0("compiled/listed", listed, timeout_s)
    if not listed:
        return
    seen = _why_unseen(folder, listed, index)
    if compile_cache.FOLDER in os.environ:
        seen = f"process {index} has {compile_cache.FOLDER}, and process 0 does not"
    reasons = distributed.gather_to_process_0("compiled/seen", seen, timeout_s)
    reason = next((text for text in reasons if text), "")
    reason = distributed.send_from_process_0("compiled/shared", reason, timeout_s)
    if reason:
        if index == 0:
            advice = f"Use a run.dir that all processes share, or set {compile_cache.FOLDER} on all of them"
            print(f"note: compiled programs are not kept: {reason}. {advice}.", file=sys.stderr)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    compilation_cache.reset_cache()  # JAX reads the setting once
    os.environ[compile_cache.FOLDER] = str(folder)  # for `estimate`, and for processes that this one starts
    if index == 0:
        compile_cache.delete_damaged_entries(folder)


def _list_entries(folder: Path) -> str:
    """Returns the names and sizes of a cache's files as JSON, with a new file that no process has seen before.

    If the folder cannot be used, it returns the reason as a string in JSON.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # whoever can write here can run code as this user
        compile_cache.prune(folder, compile_cache.LIMIT_BYTES)
        for old in folder.glob("seen-*"):
            old.unlink(missing_ok=True)
        (folder / f"seen-{secrets.token_hex(8)}").write_text("")
        return json.dumps({path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()})
    except OSError as error:
        return json.dumps(str(error))


def _why_unseen(folder: Path, listed: str, index: int) -> str:
    """Returns why a process does not see the files that `_list_entries` has listed, or "" if it does."""
    files = json.loads(listed)
    if isinstance(files, str):
        return files
    deadline = time.monotonic() + _VISIBLE_S
    while absent := [name for name, size in files.items() if not _has_size(folder / name, size)]:
        if time.monotonic() > deadline or not folder.is_dir():
            return f"process {index} does not see {folder / absent[0]}"
        time.sleep(0.2)
    return ""


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False
