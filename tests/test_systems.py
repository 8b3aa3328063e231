"""Each command of docs/systems.md runs and ends without an error, in a short form."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_docs import ROOT, RUN, STEPS, in_sandbox, table_below

pytestmark = [pytest.mark.slow, pytest.mark.matrix]

COMMANDS = [row[3].strip("`") for row in table_below("docs/systems.md", "| system | method |")]
NOT_RUN = {
    r"^not implemented": "the row says why",
    r"^python benchmarks/": "minutes to hours; the page quotes the committed results",
    r"^jaxstack serve": "a server, which does not end; tests/serve",
}
WRITERS = {
    "runs/quickstart": "jaxstack train",
    "runs/deeper": "jaxstack train --model.num_layers=8 --run.dir=runs/deeper",
    "runs/encoder_quickstart": "jaxstack train --config encoder_quickstart",
    "runs/translate_quickstart": "jaxstack train --config translate_quickstart",
    "runs/facts": "python docs/examples/stdlib_facts.py runs/facts",
    "sorting_pairs.jsonl": "python docs/examples/sorting.py",
    "runs/sft_quickstart": "jaxstack train --config=configs/sft_quickstart.yaml",
}
"""Files that commands read, and the command that writes each."""
READS = {"dpo_quickstart": "sorting_pairs.jsonl runs/sft_quickstart", "grpo_quickstart": "runs/sft_quickstart"}
"""What a configuration reads, by a word of the command."""
LONGER = {
    r"^train --config translate": [*STEPS, "--data.batch_size=32"],
    r"^train --config branches": [*STEPS, "--data.batch_size=8"],
    r"^compress": ["--sequences=4"],
    r"^profile": ["--data.seq_len=32"],
}
"""Flags that make a command short; the others are in `test_docs.RUN`."""
RUNS = [
    pytest.param(command, id=f"{i}_{'_'.join(command.split()[1:3])}")
    for i, command in enumerate(COMMANDS)
    if not any(re.search(pattern, command) for pattern in NOT_RUN)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A directory with what the commands read."""
    path = in_sandbox(tmp_path_factory.mktemp("systems"))
    question = "What is the largest number of devices that a mesh may have, and who says so in which file?"
    (path / "my_evaluation.txt").write_text(f"{question}\n")  # overlaps are of 13 words
    return path


def run(folder: Path, command: str) -> None:
    """Runs a command of a page, after the commands that make what it reads."""
    read = " ".join([command, *(files for word, files in READS.items() if word in command)])
    for file, writer in WRITERS.items():
        if file in read and writer != command and not (folder / file).exists() and f"--run.dir={file}" not in command:
            run(folder, writer)
    program, *words = shlex.split(command)
    if words[:2] == ["data", "clean"]:  # several rows write the same folder, and nothing is overwritten
        shutil.rmtree(folder / words[3], ignore_errors=True)
    text = shlex.join(words)
    pairs = [*LONGER.items(), *RUN] if program == "jaxstack" else []
    short = next((flags for pattern, flags in pairs if re.search(pattern, text)), [])
    start = [sys.executable, "-m", "jaxstack"] if program == "jaxstack" else [sys.executable]
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([*start, *words, *short], cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode == 2 and (extra := re.search(r"pip install [^`]*\[\w+\]", done.stderr)):
        pytest.skip(f"needs {extra[0]}")
    assert done.returncode == 0, f"{command}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("command", RUNS)
def test_a_command_of_the_table_runs(command, folder):
    run(folder, command)


def test_most_rows_run():
    assert len(RUNS) >= 40
