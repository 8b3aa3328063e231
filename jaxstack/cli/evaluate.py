"""Evaluates the model of a run: tasks of lm-eval (extra [eval]), bits per byte, answers, scores of completions.

Results are printed, and kept in RUN/evaluations, where `jaxstack report` finds them.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jsonargparse import Namespace
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from jaxstack.checkpoint import evaluations, manifest, run_dir
from jaxstack.checkpoint.evaluations import Result
from jaxstack.cli.chat import context_of
from jaxstack.cli.generate import DTYPE, require_template
from jaxstack.common.counts import plural
from jaxstack.common.files import atomic_file
from jaxstack.config import ConfigError, MeshConfig
from jaxstack.config.bounds import NonNegativeInt, PositiveInt
from jaxstack.config.reading.parse import Parser, user_path
from jaxstack.config.training import RLConfig
from jaxstack.data import chat
from jaxstack.data.preferences import Feedback, Preference, read_preferences
from jaxstack.data.tokenizers import describe_frame
from jaxstack.loaded import load_run
from jaxstack.posttrain.tasks import PREFIX

if TYPE_CHECKING:  # these import JAX, for which help must not wait
    from jaxstack.evaluate.tasks import Tasks
    from jaxstack.loaded.trained_run import TrainedRun


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    parser.add_argument("run", metavar="RUN", type=user_path, help="run directory")
    parser.add_argument(
        "--tasks", metavar="TASK", type=str, nargs="+", default=[], help="tasks, groups or tags of lm-eval"
    )
    parser.add_argument("--include", metavar="PATH", type=user_path, help="folder with the YAML files of more tasks")
    parser.add_argument(
        "--fewshot", type=NonNegativeInt | None, help="examples in a prompt; null means the task's number"
    )
    parser.add_argument(
        "--limit", type=PositiveInt | None, help="maximum number of examples of a task, or of prompts; null means all"
    )
    parser.add_argument("--chat", action="store_true", help="write prompts as messages of the run's chat template")
    parser.add_argument(
        "--text", metavar="FILE", type=user_path, nargs="+", default=[], help="text files, for bits per byte"
    )
    parser.add_argument(
        "--preferences", metavar="FILE", type=user_path, nargs="+", default=[],
        help="files of pairs of completions, or of completions with labels, which a reward model scores",
    )  # fmt: skip
    parser.add_argument(
        "--prompts", metavar="FILE", type=user_path, nargs="+", default=[],
        help="prompts that the model answers, for rewards: files, or tasks such as task:addition",
    )  # fmt: skip
    parser.add_argument(
        "--rewards", metavar="FUNCTION", type=str, nargs="+", default=[],
        help="functions that reward the answers, as in rl.rewards; by default those of the run, or of the task",
    )  # fmt: skip
    parser.add_argument("--completions", type=PositiveInt, default=8, help="number of answers to each prompt")
    parser.add_argument("--tokens", type=PositiveInt | None, help="maximum tokens of an answer; null means rl.tokens")
    parser.add_argument("--turns", type=PositiveInt | None, help="maximum turns of an answer; null means rl.turns")
    parser.add_argument("--scores", metavar="FILE", type=user_path, help="where to write the score of each completion")
    parser.add_argument(
        "--overlap",
        type=NonNegativeInt | None,
        help="tokens that neighbouring windows share; null means half of --context",
    )
    parser.add_argument("--context", type=int, help="tokens that the model reads at once; null means data.seq_len")
    parser.add_argument("--rows", type=PositiveInt, default=8, help="number of texts in a call")
    parser.add_argument("--step", type=int, help="step of the checkpoint; null means the newest")
    parser.add_argument("--dtype", type=DTYPE | None, help="dtype of the computation; null means train.dtype")
    parser.add_class_arguments(MeshConfig, "mesh")
    parser.set_defaults({"mesh.data": 1})


def main(args: Namespace) -> None:
    """Prints the results and writes them into the run directory.

    Raises:
      ConfigError: the run cannot be read or evaluated, or a task or text does not exist.
    """
    path = Path(args.run)
    names = [name for word in args.tasks for name in word.split(",") if name]
    cfg, tokenizer = load_run.read_run(path)
    if cfg.model.family != "decoder":
        raise ConfigError(
            f"model.family={cfg.model.family} does not score texts from left to right. Use a run whose model is a "
            f"decoder."
        )
    context = context_of(cfg.model, args.context, cfg.data.seq_len)
    overlap = context // 2 if args.overlap is None else args.overlap
    check_flags(args, names, context)
    template = require_template(path, cfg.data, tokenizer) if args.chat else None
    texts = {name: read_text(name) for name in args.text}
    tasks = open_tasks(names, args)
    scored = {name: [*read_preferences(name)] for name in args.preferences}
    if scored and not cfg.model.reward_head:
        raise ConfigError(
            f"--preferences needs a reward model, but {path} has model.reward_head=false. Name another run."
        )
    cfg = replace(cfg, train=replace(cfg.train, dtype=args.dtype or cfg.train.dtype))
    step = newest_step(path) if args.step is None else args.step  # so that the record names the one that was read
    run = load_run.open_run(path, cfg, tokenizer, args.mesh, step, rows=args.rows)
    began = time.perf_counter()
    results = []
    for name, content in texts.items():
        results.append(text_result(run, name, content, context=context, overlap=overlap, rows=args.rows))
    if scored:
        results += preference_results(run, scored, args)
    if args.prompts:
        results += prompt_results(run, context, args)
    if tasks is not None:
        results += task_results(run, tasks, template, context, args)
    record = {
        "step": step or 0,
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(time.perf_counter() - began, 3),
        "options": {"context": context, "chat": args.chat, "limit": args.limit, "rows": args.rows},
        "dtype": cfg.train.dtype,
        "mesh": {axis: size for axis, size in run.config.mesh.known_sizes.items() if size > 1},
        "programs": run.scorer.programs,
        "versions": versions(tasks is not None),
        "results": results,
    }
    Console(highlight=False, soft_wrap=True).print(table(results))
    if line := describe_frame(tokenizer):
        print(line)
    programs = f"; number of programs that score: {record['programs']}" if record["programs"] else ""
    print(f"step     {record['step']:,}{programs}")
    print(f"results  {evaluations.write(path, record)}")


def check_flags(args: Namespace, names: Sequence[str], context: int) -> None:
    """Checks flags against each other.

    Raises:
      ConfigError: there is nothing to do, a flag has no effect, or a file of prompts does not exist.
    """
    if not names and not args.text and not args.preferences and not args.prompts:
        raise ConfigError(
            "there is nothing to evaluate. Use --tasks=NAME, --text=FILE, --prompts=FILE or --preferences=FILE."
        )
    if args.scores is not None and not args.preferences and not args.prompts:
        raise ConfigError(
            f"--scores={args.scores} is for scores of completions. Name a file with --prompts or --preferences."
        )
    if args.scores is not None and args.preferences and args.prompts:
        raise ConfigError(
            f"--scores={args.scores} is one file, but there are --prompts and --preferences. Evaluate one of them."
        )
    if args.limit is not None and not names and not args.prompts:
        raise ConfigError(f"--limit={args.limit} is for tasks and prompts. Name some with --tasks or --prompts.")
    of_tasks = {"include": args.include, "fewshot": args.fewshot, "chat": args.chat or None}
    for name, value in of_tasks.items():
        if value is not None and not names:
            raise ConfigError(f"--{name}={value} is for tasks. Name some with --tasks.")
    of_prompts = {"rewards": args.rewards or None, "tokens": args.tokens, "turns": args.turns}
    for name, value in of_prompts.items():
        if value is not None and not args.prompts:
            raise ConfigError(f"--{name}={value} is for prompts. Name some with --prompts.")
    for name in args.prompts:  # before the model is read, which takes longer
        if not name.startswith(PREFIX) and not Path(name).is_file():
            raise ConfigError(
                f"--prompts={name} is not a file. Name a file with one prompt in JSON per line, or a task such as "
                f"task:addition:2."
            )
    if args.overlap is not None and not args.text:
        raise ConfigError(f"--overlap={args.overlap} is for texts. Name some with --text.")
    if args.overlap is not None and args.overlap >= context:
        raise ConfigError(f"--overlap={args.overlap} leaves no token to score. Use less than --context={context}.")


def read_text(name: str) -> str:
    """Returns the content of a text file.

    Raises:
      ConfigError: it is not a file, is not UTF-8, or is empty.
    """
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"--text={name} is not a file. Name a text file.")
    try:
        content = path.read_bytes().decode("utf-8")  # not as text, which would change line ends
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text={name} is not UTF-8 ({error.reason} at byte {error.start:,}). Convert it.") from None
    if not content:
        raise ConfigError(f"--text={name} is empty. Name a file with text.")
    return content


def open_tasks(names: Sequence[str], args: Namespace) -> "Tasks | None":
    """Returns the tasks with their data, before JAX starts, or `None` if there are no names.

    Raises:
      ConfigError: see `load_tasks`.
    """
    if not names:
        return None
    from jaxstack.evaluate.tasks import load_tasks

    return load_tasks(names, None if args.include is None else Path(args.include), args.fewshot)


@contextmanager
def shown(what: str) -> Iterator[Callable[[int, int], None]]:
    """Shows a progress bar on a terminal, and yields what moves it: `(done, whole)`."""
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what)
        yield lambda done, whole: bar.update(task, completed=done, total=whole)


def text_result(run: "TrainedRun", name: str, content: str, *, context: int, overlap: int, rows: int) -> Result:
    """Returns the result of a text file."""
    from jaxstack.evaluate.text import score_text

    with shown(name) as progress:
        found = score_text(
            run.scorer, run.tokenizer, content, context=context, overlap=overlap, rows=rows, progress=progress
        )
    how = {"nats": found.nats, "tokens": found.tokens, "bytes": found.bytes, "windows": found.windows}
    return {
        "task": name,
        "metric": "bits_per_byte",
        "filter": "none",
        "value": found.bits_per_byte,
        "stderr": None,
        "higher_is_better": False,
        **how,
        "overlap": overlap,
    }


def prompt_results(run: "TrainedRun", context: int, args: Namespace) -> list[Result]:
    """Returns the results of files or tasks with prompts that the model answers; writes the answers to `--scores`."""
    from jaxstack.evaluate.answers import answer, figures

    rl = run.config.learned_rewards or RLConfig()
    if args.rewards:
        rl = replace(rl, rewards=tuple(args.rewards), weights=())
    if args.turns is not None:
        rl = replace(rl, turns=args.turns)
    results = []
    lines = []
    for path in args.prompts:
        groups = answer(
            run,
            path,
            rl,
            completions=args.completions,
            context=context,
            tokens=args.tokens,
            limit=args.limit,
            rows=args.rows,
        )
        for metric, values in figures(groups).items():
            results.append(mean_result(path, metric, values))
        lines += [
            {"row": one.row.name, "prompt": one.row.text, "completion": one.text, "score": one.reward}
            for group in groups
            for one in group
        ]
    write_scores(args.scores, lines)
    return results


def write_scores(path: str | None, lines: Sequence[Mapping[str, object]]) -> None:
    """Writes the score of each completion as a line of JSON, if there is a path."""
    if path is not None:
        with atomic_file(Path(path)) as file:
            file.writelines(f"{json.dumps(line)}\n".encode() for line in lines)


def preference_results(
    run: "TrainedRun", files: "Mapping[str, Sequence[Preference | Feedback]]", args: Namespace
) -> list[Result]:
    """Returns the results of files with completions, which a reward model scores; writes the scores to `--scores`."""
    results = []
    lines = []
    for name, rows in files.items():
        texts = [(one.prompt, text) for one in rows for text in texts_of(one)]
        scores = iter(run.rewards(texts, args.rows).tolist())
        own = [[next(scores) for _ in texts_of(one)] for one in rows]
        for one, found in zip(rows, own, strict=True):
            keys = ("score",) if isinstance(one, Feedback) else ("score_chosen", "score_rejected")
            lines.append({"row": one.name, **dict(zip(keys, found, strict=True))})
        margins = np.array([found[0] - found[1] for found in own if len(found) == 2])
        measured = {"accuracy": margins > 0, "margin": margins}
        for label in (True, False):
            of_label = [found[0] for one, found in zip(rows, own, strict=True) if labelled(one) is label]
            measured["score_wanted" if label else "score_unwanted"] = np.array(of_label)
        for metric, values in measured.items():
            if values.size:
                results.append(mean_result(name, metric, values))
    write_scores(args.scores, lines)
    return results


def texts_of(row: "Preference | Feedback") -> list[str]:
    """Returns the completions of a row."""
    return [row.completion] if isinstance(row, Feedback) else [row.chosen, row.rejected]


def labelled(row: "Preference | Feedback") -> bool | None:
    """Returns the label of a completion; `None` for a pair."""
    return row.wanted if isinstance(row, Feedback) else None


def mean_result(name: str, metric: str, values: np.ndarray) -> Result:
    """Returns the mean of a metric over the rows of a file, with its standard error."""
    stderr = float(values.std(ddof=1) / values.size**0.5) if values.size > 1 else None
    return {
        "task": name,
        "metric": metric,
        "filter": "none",
        "value": float(values.mean()),
        "stderr": stderr,
        "higher_is_better": metric != "score_unwanted",
        "rows": values.size,
    }


def task_results(
    run: "TrainedRun", tasks: "Tasks", template: "chat.ChatTemplate | None", context: int, args: Namespace
) -> list[Result]:
    """Returns the results of tasks."""
    from jaxstack.evaluate.harness import RunModel
    from jaxstack.evaluate.tasks import run_tasks

    with shown("tasks") as progress:
        model = RunModel(run, context=context, rows=args.rows, template=template, progress=progress)
        results = run_tasks(model, tasks, limit=args.limit, chat=args.chat)
    if model.truncated:
        print(
            f"note: {plural(model.truncated, 'text exceeds', 'texts exceed', ',')} --context={context}: what "
            f"is too long was cut off at the left"
        )
    return results


def newest_step(run: Path) -> int | None:
    """Returns the step of a run's newest complete checkpoint, or `None` if it has none."""
    return max(manifest.complete_steps(run_dir.checkpoints(run)), default=None)


def versions(harness: bool) -> dict[str, str]:
    """Returns the versions of the libraries on which results depend."""
    from jaxstack.checkpoint import store

    found = store.versions()
    if harness:
        from jaxstack.evaluate import tasks

        found["lm_eval"] = tasks.version()
    return found


def table(results: Sequence[Result]) -> Table:
    """Returns the results as a table for the terminal."""
    grid = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    grid.add_column("task", overflow="fold")
    grid.add_column("metric", no_wrap=True)
    grid.add_column("value", justify="right", no_wrap=True)
    grid.add_column("stderr", justify="right", no_wrap=True)
    for each in results:
        metric = each["metric"] if each["filter"] == "none" else f"{each['metric']} ({each['filter']})"
        stderr = "" if each["stderr"] is None else f"± {each['stderr']:.4f}"
        grid.add_row(Text(each["task"]), metric, f"{each['value']:.4f}", stderr)
    return grid
