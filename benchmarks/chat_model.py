"""Walks docs/chat_model.md as printed, in a fresh clone with nothing compiled, and times every command.

    python benchmarks/chat_model.py

The commands are read from the page. A step has the seconds that passed, and the CPU seconds of its processes, which
other work on the machine changes less. The server is asked the question of the page, by the API and in Chromium if
there is one, and is then stopped. Afterwards the step of preferences is repeated with the learning rate of
configs/dpo_quickstart.yaml, to show what evaluations say of it; this is not in the sum.
"""

import argparse
import html
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import record

from jaxstack.common import files

ROOT = Path(__file__).parents[1]
PAGE = "docs/chat_model.md"
QUESTION = "Sort 3 1 2 9 5"
ASKS = f"""<script>
$("temperature").value = "0";
$("text").value = "{QUESTION}";
$("form").requestSubmit();
(async () => {{ while (running) await fetch("health"); }})();
</script>"""
"""What a user does on the page of the server. Requests stop the browser's clock until the answer is there."""

SERVER = f"""\
import jaxstack.serve.app as app
from jaxstack.__main__ import main
page = app.chat_page
app.chat_page = lambda: page().replace("</body>", {ASKS!r} + "</body>")
main()
"""
"""The command, with a page on which the question is asked when a browser opens it."""

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def commands(page: str) -> list[str]:
    """Returns the commands of the first block of a page."""
    found = re.search(r"^```\n(.*?)^```", page, re.M | re.S)
    assert found
    return found[1].splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the clone is kept; by default it is removed")
    parser.add_argument("--serve", action="store_true", help="only ask the server again, in the clone of --folder")
    args = parser.parse_args()
    if args.serve:
        serve_again(args.folder)
        return
    with tempfile.TemporaryDirectory() as scratch:
        walk(args.folder or Path(scratch) / "clone")


def walk(clone: Path) -> None:
    """Runs all commands, and records the figures after each."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    env = environment(clone)
    lines = commands((clone / PAGE).read_text(encoding="utf-8"))
    load = os.getloadavg()[0]
    steps: list[dict[str, Any]] = []
    result: dict[str, Any] = {"page": PAGE, "cores": os.cpu_count(), "steps": steps}
    for line in lines:
        is_server = line.startswith("jaxstack serve ")
        steps.append({"command": line} | (serve if is_server else run)(line, clone, env))
        print(steps[-1], flush=True)
        result |= {name: sum(step[name] for step in steps) for name in ("seconds", "cpu_seconds")}
        result |= {"pass@1": passes(clone), "load_average": [load, os.getloadavg()[0]]}
        record.record("chat_model", result)
    result["with_the_learning_rate_of_the_quickstart"] = contrast(lines, clone, env)
    record.record("chat_model", result)
    print({name: result[name] for name in ("seconds", "cpu_seconds", "pass@1")})


def environment(clone: Path) -> dict[str, str]:
    """Returns the environment of the commands: the package of the clone, and a cache of programs of its own."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    return env | {"PYTHONPATH": str(clone), "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(clone / "cache")}


def serve_again(clone: Path) -> None:
    """Repeats the step of the server, whose figures get the commit of the script; the others keep theirs."""
    path = record.RESULTS / "chat_model.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    again = record.record("chat_model", {}, clone)
    (step,) = [step for step in result["steps"] if step["command"].startswith("jaxstack serve ")]
    step |= serve(step["command"], clone, environment(clone))
    step["commit"] = json.loads(again.read_text(encoding="utf-8"))["commit"]
    result |= {name: sum(one[name] for one in result["steps"]) for name in ("seconds", "cpu_seconds")}
    files.write_atomic(path, json.dumps(result, indent=1) + "\n")
    print(step)


def words_of(line: str) -> list[str]:
    """Returns the words of a command, with the Python of this process."""
    program, *rest = shlex.split(line)
    ours = {"python": [sys.executable], "jaxstack": [sys.executable, "-m", "jaxstack"]}
    return [*ours[program], *rest]


def run(line: str, clone: Path, env: dict[str, str]) -> dict[str, float]:
    """Runs a command to its end."""
    began = time.perf_counter()
    with (clone / "output.txt").open("ab") as output:
        process = subprocess.Popen(words_of(line), cwd=clone, env=env, stdout=output, stderr=output)
        return ended(process, began)


def ended(process: "subprocess.Popen[bytes]", began: float, allowed: Sequence[int] = (0,)) -> dict[str, float]:
    """Waits for a process, and returns its seconds and the CPU seconds of it and of its children."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in allowed:
        sys.exit(f"{shlex.join(map(str, process.args))} ended with {process.returncode}")  # type: ignore[arg-type]
    return {"seconds": time.perf_counter() - began, "cpu_seconds": usage.ru_utime + usage.ru_stime}


def serve(line: str, clone: Path, env: dict[str, str]) -> dict[str, Any]:
    """Starts the server, asks it the question of the page, and stops it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.perf_counter()
    with (clone / "output.txt").open("ab") as output:
        flags = [*shlex.split(line)[1:], f"--port={port}"]  # the usual one may be of another program
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, *flags], cwd=clone, env=env, stdout=output, stderr=output
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(f"{url}/health", process)
            body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
            asked = urllib.request.Request(
                f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(asked, timeout=300) as response:
                answer = json.load(response)["choices"][0]["message"]["content"]
            in_browser = browse(url, clone) if BROWSER else None
        finally:
            process.terminate()
        found = ended(process, began, range(-64, 256))
    return {**found, "question": QUESTION, "answer": answer, "in_browser": in_browser}


def browse(url: str, clone: Path) -> str:
    """Opens the page of the server in Chromium, and returns the answer that it shows."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={clone / 'browser'}"]
    more = ["--virtual-time-budget=20000", "--dump-dom"]
    ran = subprocess.run([str(BROWSER), *flags, *more, url], capture_output=True, timeout=300, check=True)
    shown = re.findall(r'<li class="assistant">(.*?)</li>', ran.stdout.decode(), re.S)
    return html.unescape(shown[0]) if shown else ran.stdout.decode()[-2000:]


def wait_for(url: str, process: "subprocess.Popen[bytes]") -> None:
    """Waits until a server answers."""
    while True:
        try:
            urllib.request.urlopen(url, timeout=10).close()
            return
        except OSError:
            if process.poll() is not None:
                sys.exit(f"the server ended with {process.returncode}")
            time.sleep(0.5)


def passes(clone: Path) -> dict[str, float]:
    """Returns pass@1 of each run that was evaluated."""
    found = {}
    for path in sorted(clone.glob("runs/*/evaluations/*.json"), key=lambda path: path.stat().st_mtime):
        results = json.loads(path.read_text(encoding="utf-8"))["results"]
        found[path.parents[1].name] = next(one["value"] for one in results if one["metric"] == "pass@1")
    return found


def contrast(lines: list[str], clone: Path, env: dict[str, str]) -> dict[str, Any]:
    """Returns the accuracy of pairs and pass@1 after preferences with the quickstart's learning rate, and without."""
    found = {}
    for line in lines:
        if "runs/preferred" in line and line.startswith(("jaxstack train --config=configs/dpo", "jaxstack eval")):
            run(re.sub(r" --optim\.lr=\S+", "", line).replace("runs/preferred", "runs/too_fast"), clone, env)
    for name in ("preferred", "too_fast"):
        logged = [json.loads(line) for line in (clone / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        accuracies = [one["eval_rewards/accuracies"] for one in logged if "eval_rewards/accuracies" in one]
        found[name] = {"eval_rewards/accuracies": accuracies[-1], "pass@1": passes(clone)[name]}
    return found


if __name__ == "__main__":
    main()
