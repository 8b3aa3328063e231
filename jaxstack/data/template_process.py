"""Runs chat templates in a process of their own, with limits of time and memory.

A template is a program that comes with a model. The sandbox of jinja2 keeps it from files and from Python, but lets it
loop for hours and build a text of any size. So the file is also the program of that process: it reads a JSON request a
line from stdin and writes a JSON answer a line to stdout. It imports nothing of jaxstack, and starts in 0.2 s.
"""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2

SECONDS = 10
"""CPU time that the texts of one conversation may take. They usually take less than a millisecond."""

BYTES = 1 << 30
"""Address space of the process."""

CHARACTERS = 1 << 24
"""Longest text of one conversation."""

OPEN = "\ufdd0"
CLOSE = "\ufdd1"
"""Marks around an answer: Unicode noncharacters, which do not occur in text."""


class TemplateError(Exception):
    """A template that is not valid, fails, or exceeds a limit; the message has the reason in a few words."""


class TemplateProcess:
    """The process that runs templates. It starts with the first request, and again after it had to be ended."""

    def __init__(self, seconds: int = SECONDS) -> None:
        """Prepares the process.

        Args:
          seconds: CPU time that a request may take.
        """
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._starter = 0

    def run(self, source: str, calls: Sequence[Mapping[str, object]]) -> list[str]:
        """Returns the texts of a template.

        Args:
          calls: the variables of each text. Without any, the template is only compiled.

        Raises:
          TemplateError: the template is not valid, fails, or exceeds a limit.
        """
        request = json.dumps({"source": source, "calls": [*calls]}).encode() + b"\n"
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(request)
                process.stdin.flush()
            answer = process.stdout.readline()
            if not answer.endswith(b"\n"):
                self._process = None
                process.kill()
                process.communicate()
                if process.returncode == -_TIMER:
                    raise TemplateError(f"it takes more than {self._seconds} s")
                raise TemplateError(f"its process ended with code {process.returncode}")
        read = json.loads(answer)
        if "error" in read:
            raise TemplateError(read["error"])
        texts: list[str] = read["texts"]
        return texts

    def _running(self) -> subprocess.Popen[bytes]:
        """Returns the process, which is started if it does not run, or if a fork of this process shares it."""
        if self._process is None or self._starter != os.getpid() or self._process.poll() is not None:
            self._starter = os.getpid()
            # -P keeps the folder of this file from the path of modules.
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(self._seconds)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        return self._process

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            if self._process is not None:
                self._process.communicate()  # closes its input, at whose end it ends
                self._process = None


_TIMER = getattr(signal, "SIGPROF", 0)


def compile_template(source: str) -> "jinja2.Template":
    """Returns a template of jinja2 in a sandbox, with the filters and functions that chat templates use."""
    import jinja2
    from jinja2 import ext, nodes, sandbox

    class Marks(ext.Extension):
        """Surrounds the content of `{% generation %}...{% endgeneration %}` with marks."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

        def mark(self, caller: Any) -> str:
            return f"{OPEN}{caller()}{CLOSE}"

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False} | options)

    # The same environment as in transformers, except for `strftime_now`, which would make the data depend on the date.
    # Templates that check whether it is defined, such as Llama 3's, then use a fixed date.
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Marks, ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    return environment.from_string(source)


def _answer(request: dict[str, Any], compiled: Any) -> dict[str, Any]:
    """Returns the answer to a request: the texts, or why there are none."""
    try:
        template = compiled(request["source"])
        texts = [template.render(**call) for call in request["calls"]]
    except MemoryError:
        return {"error": f"it takes more than {BYTES >> 20} MB of memory"}
    except Exception as error:  # a template is a program, which may raise anything
        return {"error": " ".join(str(error).split())[:1000] or type(error).__name__}
    if sum(map(len, texts)) > CHARACTERS:
        return {"error": f"it writes more than {CHARACTERS:,} characters"}
    return {"texts": texts}


def _main(seconds: int) -> None:
    """Answers requests until stdin ends, which it does when the process that started this one ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    with contextlib.suppress(ImportError):  # Windows has no such limits
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    compiled = functools.lru_cache(maxsize=8)(compile_template)
    for line in sys.stdin.buffer:
        if _TIMER:
            signal.setitimer(signal.ITIMER_PROF, seconds)  # nothing handles its signal, which ends the process
        answer = json.dumps(_answer(json.loads(line), compiled))
        if _TIMER:
            signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main(int(sys.argv[1]))
