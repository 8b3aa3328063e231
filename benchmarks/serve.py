"""Loads a server with many clients, and compares each answer with `generate` alone: `python benchmarks/serve.py RUN`

It starts `jaxstack serve RUN` at a free port of the loopback address. Each client sends one request after the other
over a connection of its own: one of 64 prompts, greedy, half of them streaming, with 16 to 96 tokens. Every eighth
client closes its connection in the middle of a stream now and then. A quarter of the prompts begin with the same 100
characters. The answers must be those that `generate` writes for each prompt alone. A shorter load precedes, in which
the server compiles. Latencies, the load of the machine and the number of errors go to `benchmarks/results/serve.json`.
"""

import argparse
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import record

ROOT = Path(__file__).parent.parent


class Request(NamedTuple):
    """A prompt, the number of tokens to add, and the text that they must have."""

    prompt: str
    tokens: int
    expected: str


class Load:
    """Clients that send requests until some time has passed, and what they have seen."""

    def __init__(self, port: int, requests: list[Request]) -> None:
        self.port, self.requests, self.lock = port, requests, threading.Lock()
        self.wrong: list[str] = []
        self.lost: list[str] = []
        self.answers, self.left, self.refused, self.tokens = 0, 0, 0, 0
        self.first: list[float] = []
        self.complete: list[float] = []

    def run(self, clients: int, seconds: float) -> None:
        """Lets clients work at the same time, each in a thread."""
        until = time.monotonic() + seconds
        threads = [threading.Thread(target=self._client, args=(i, until), daemon=True) for i in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds + 300)
        self.lost += [f"client {i} hangs" for i, thread in enumerate(threads) if thread.is_alive()]

    def _client(self, number: int, until: float) -> None:
        choose = random.Random(number)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        while time.monotonic() < until:
            request, stream = choose.choice(self.requests), choose.random() < 0.5
            leave = stream and number % 8 == 0 and choose.random() < 0.2
            try:
                self.send(connection, request, stream, leave)
            except (OSError, http.client.HTTPException) as error:
                with self.lock:
                    self.lost.append(f"client {number}: {error!r}")
                connection.close()
        connection.close()

    def send(self, connection: http.client.HTTPConnection, request: Request, stream: bool, leave: bool) -> None:
        """Sends a request, and compares the answer."""
        body = {"prompt": request.prompt, "max_tokens": request.tokens, "temperature": 0, "stream": stream}
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status == 429:
            response.read()
            with self.lock:
                self.refused += 1
            time.sleep(1)
            return
        if response.status != 200:
            raise http.client.HTTPException(f"{response.status} {response.read()[:200]!r}")
        text, first, done = "", None, not stream
        if stream:
            for line in response:
                if line.startswith(b"data: [DONE]"):
                    done = True
                elif line.startswith(b"data: "):
                    first = first or time.perf_counter() - began
                    text += json.loads(line[6:])["choices"][0]["text"]
                    if leave:
                        connection.close()
                        with self.lock:
                            self.left += 1
                        return
        else:
            text = json.loads(response.read())["choices"][0]["text"]
        took = time.perf_counter() - began
        with self.lock:
            self.answers += 1
            self.tokens += request.tokens
            self.complete.append(took)
            self.first += [first] if first else []
            if not done:
                self.lost.append(f"a stream without an end: {text!r}")
            elif text != request.expected:
                self.wrong.append(f"{request.prompt!r}: {text!r} in place of {request.expected!r}")


def percentiles(values: list[float]) -> dict[str, float]:
    """Returns the median, the 99th percentile and the largest of some times in seconds."""
    ordered = sorted(values)
    return {
        name: ordered[min(int(share * len(ordered)), len(ordered) - 1)]
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("most", 1.0))
    }


def start(run: str, *flags: str) -> tuple[subprocess.Popen[str], int]:
    """Starts a server, and returns its process and port."""
    words = [sys.executable, "-m", "jaxstack", "serve", run, "--port=0", *flags]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
    assert server.stdout is not None
    line = server.stdout.readline()
    if " at http://127.0.0.1:" not in line:
        raise RuntimeError(f"the server has not started: {line}")
    return server, int(line.split("127.0.0.1:")[1].split("/")[0])


def requests_for(run: str, count: int = 64) -> list[Request]:
    """Returns requests with the texts that `generate` writes for each prompt alone."""
    import argparse as source
    import inspect

    import jaxstack

    trained, choose, requests = jaxstack.load(run), random.Random(0), []
    code, longest = inspect.getsource(source), 96
    for i in range(count):
        at, length = choose.randrange(len(code) - 300), choose.randint(4, 60)
        prompt = (code[:100] if i % 4 == 0 else "") + code[at : at + length]
        requests.append(alone(trained, prompt, longest, choose.randint(16, longest)))
    return requests


def alone(trained: Any, prompt: str, longest: int, tokens: int) -> Request:
    """Returns the request for some tokens after a prompt, with the text of `generate` alone.

    Args:
      trained: the run.
      prompt: the prompt.
      longest: number of tokens that `generate` adds. It is the same for all prompts, so that few programs are compiled.
      tokens: how many of them are asked for.
    """
    ids = trained.tokenizer.encode(prompt).tolist()
    added = [i for (part,) in trained.stream_tokens([ids], temperature=0, tokens=longest, at_once=True) for i in part]
    text = [i for i in added[:tokens] if i != trained.tokenizer.eos_id]
    return Request(prompt, tokens, trained.tokenizer.decode([*ids, *text])[len(prompt) :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--rows", type=int, default=8)
    args = parser.parse_args()

    requests = requests_for(args.run)
    server, port = start(args.run, f"--rows={args.rows}")
    threading.Thread(target=lambda: [None for _ in server.stdout or ()], daemon=True).start()
    try:
        warm = Load(port, requests)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        for request in requests:
            warm.send(connection, request, True, False)
        warm.run(args.clients, 10)
        before, load = os.getloadavg()[0], Load(port, requests)
        began = time.perf_counter()
        load.run(args.clients, args.seconds)
        took, after = time.perf_counter() - began, os.getloadavg()[0]
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(60)
    result: dict[str, Any] = {
        "clients": args.clients, "rows": args.rows, "seconds": took, "answers": load.answers,
        "distinct_answers": len({request.expected for request in requests}),
        "wrong": len(load.wrong) + len(warm.wrong), "lost": len(load.lost) + len(warm.lost),
        "left_in_the_middle": load.left, "refused_429": load.refused,
        "tokens_per_s": load.tokens / took, "requests_per_s": load.answers / took,
        "first_token_s": percentiles(load.first), "complete_s": percentiles(load.complete),
        "exit_code_after_sigterm": code,
        "machine": {"cores": os.cpu_count(), "load_before": before, "load_after": after},
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    for line in (*warm.wrong[:3], *load.wrong[:3], *warm.lost[:3], *load.lost[:3]):
        print(line)
    record.record("serve", result)
    assert not result["wrong"]
    assert not result["lost"]


if __name__ == "__main__":
    main()
