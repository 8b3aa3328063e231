"""Loads tasks of `lm-eval`, and turns its results into records. JAX is not imported here."""

import difflib
import functools
import importlib.metadata
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxstack.checkpoint.evaluations import Result
from jaxstack.config import ConfigError

if TYPE_CHECKING:
    from lm_eval.api.model import LM

SEED = 1234
"""Seed of the examples that a task draws for its prompts, as in `lm-eval`."""


class Tasks(NamedTuple):
    """Tasks that are ready to run.

    Attributes:
      loaded: what `lm-eval` made of their names.
      unsafe: whether one of them runs code that the model writes.
    """

    loaded: Any
    unsafe: bool


def load_tasks(names: Sequence[str], include: Path | None, fewshot: int | None) -> Tasks:
    """Loads tasks with their data.

    Args:
      include: folder of more tasks. `None` means only the tasks of `lm-eval`.
      fewshot: number of examples in a prompt. `None` means as each task says.

    Raises:
      ConfigError: `lm-eval` is not installed, or a task does not exist or cannot be loaded.
    """
    try:
        import datasets
        import lm_eval.tasks  # noqa: F401
    except ImportError:
        raise ConfigError("--tasks needs lm-eval. Run pip install 'jaxstack[eval]'.") from None
    for library in ("lm_eval", "huggingface_hub"):  # what they warn of is an error or a note here
        logging.getLogger(library).setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    if include is not None and not include.is_dir():
        raise ConfigError(f"--include={include} is not a directory. Name a folder with the YAML files of tasks.")
    where = None if include is None else str(include)
    try:
        manager = _manager(where, where is None)
        if not {*names} <= {*manager.all_tasks}:  # its own tasks are thousands of files, which take seconds to read
            manager = _manager(where, True)
    except Exception as error:  # it reads every file of the folder, which may have anything
        of = "the tasks of lm-eval" if include is None else f"--include={include}"
        raise ConfigError(f"{of} cannot be read: {_reason(error)}. Check the YAML files.") from None
    known = manager.all_tasks
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            advice = f"Did you mean {' or '.join(close)}?" if close else "Name a folder with it by --include."
            raise ConfigError(f"--tasks={name} is not a task, group or tag. {advice}")
    for name in names:
        _load(manager, name)  # alone, so that an error names the task
    loaded = _load(manager, *names)
    for task in loaded["tasks"].values():
        if fewshot is not None and task.get_config("num_fewshot") != 0:
            task.set_config(key="num_fewshot", value=fewshot)
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=SEED)
        if getattr(task, "MULTIMODAL", False):
            raise ConfigError(f"--tasks={task.task_name} has pictures or sounds. Choose tasks of text.")
    return Tasks(loaded, any(getattr(task, "UNSAFE_CODE", False) for task in loaded["tasks"].values()))


@functools.cache
def _manager(include: str | None, defaults: bool) -> Any:
    """Returns the index of the tasks in a folder, with or without the tasks of `lm-eval`."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include, include_defaults=defaults)


def _load(manager: Any, *names: str) -> Any:
    """Returns some tasks; a name is a part of the message if they cannot be loaded."""
    try:
        return manager.load([*names])
    except Exception as error:  # tasks are programs and data of others
        if _needs_network(error):
            raise ConfigError(
                f"--tasks={names[0]} needs data that is not on this machine, and it cannot be fetched: "
                f"{_reason(error)}. Use a network, or a task with local files by --include."
            ) from None
        raise ConfigError(
            f"--tasks={','.join(names)} cannot be loaded: {type(error).__name__}: {_reason(error)}. Check its YAML "
            f"file and what it imports."
        ) from None


def _reason(error: BaseException) -> str:
    """Returns the first line of an error, without its full stop."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return (lines[0].strip()[:300] if lines else type(error).__name__).rstrip(".")


def _needs_network(error: BaseException | None) -> bool:
    """Returns whether an error, or what caused it, says that a data set is not on this machine or the network failed.

    Their classes are found by name, because they belong to several HTTP libraries.
    """
    words = ("ConnectionError", "ConnectError", "OfflineMode", "LocalEntryNotFound", "DatasetNotFound", "Timeout")
    while error is not None:
        if isinstance(error, ConnectionError) or any(word in type(error).__name__ for word in words):
            return True
        error = error.__cause__ or error.__context__
    return False


def run_tasks(lm: "LM", tasks: Tasks, *, limit: int | None, chat: bool) -> list[Result]:
    """Runs tasks, and returns a result for each metric of each task and group; see `checkpoint.evaluations`.

    Args:
      limit: number of examples of each task, at most. `None` means all.
      chat: whether prompts are messages of a user in the chat template.

    Raises:
      ConfigError: a task runs code that the model writes.
    """
    from lm_eval import evaluator

    if tasks.unsafe:
        raise ConfigError("a task runs code that the model writes, which is not safe here. Leave it out.")
    random.seed(0)  # as `lm-eval` does, for tasks that shuffle their answers
    np.random.seed(SEED)
    found = evaluator.evaluate(
        lm,
        tasks.loaded,
        limit=limit,
        log_samples=False,
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
    )
    return to_results(found)


def to_results(found: Any) -> list[Result]:
    """Returns a result for each metric of what `lm-eval` has found."""
    results = []
    for task, values in found["results"].items():
        for key, value in values.items():
            metric, _, answers = key.partition(",")
            if not answers or metric.endswith("_stderr") or isinstance(value, str):
                continue
            stderr = values.get(f"{metric}_stderr,{answers}")
            samples = found.get("n-samples", {}).get(task, {})
            results.append(
                {
                    "task": task,
                    "metric": metric,
                    "filter": answers,
                    "value": float(value),
                    "stderr": None if stderr is None or isinstance(stderr, str) else float(stderr),
                    "higher_is_better": found.get("higher_is_better", {}).get(task, {}).get(metric),
                    "task_version": found.get("versions", {}).get(task),
                    "fewshot": found.get("n-shot", {}).get(task),
                    "samples": samples.get("effective"),
                }
            )
    return results


def version() -> str:
    """Returns the version of `lm-eval`."""
    return importlib.metadata.version("lm_eval")
