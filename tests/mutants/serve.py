"""Mutants of the server."""

from mutants.rows import mistakes

REQUESTS, SERVER = "serve/test_serve_requests.py", "serve/test_serve.py"

mistakes(
    "serve", "serve/texts.py", REQUESTS,
    ("word.startswith(self._text[-n:])", "word.endswith(self._text[-n:])"),
    ("self._text[: min(found)], \"stop\"", "self._text[: max(found)], \"stop\""),
    ("steps = [[token] for token in tokens] if self._stop else", "steps = [tokens] if self._stop else"),
    ("min(self._skip, len(piece))", "0"),
)  # fmt: skip

mistakes(
    "serve", "serve/requests.py", REQUESTS,
    ("        for name in self._left:\n", "        for name in ():\n"),
    ("type(found) is not int or not least <= found <= most", "not least <= found <= most"),
    ("room < (asked or 1)", "room < 1"),
    ("if found not in harmless:", "if False:"),
)  # fmt: skip

mistakes(
    "serve", "serve/answer.py", SERVER,
    ("        self._worker.cancel(self._names)\n", "", f"{SERVER} -k goes"),
    ("part or FAILED", "part", f"{SERVER} -k failure"),
)  # fmt: skip

mistakes(
    "serve", "serve/app.py", SERVER,
    ("busy + more > self.limits.texts", "busy > self.limits.texts", f"{SERVER} -k limits"),
    ("        if self.closing:\n            raise", "        if False:\n            raise", f"{SERVER} -k shutting"),
    ("if len(body) > self.limits.body_bytes:", "if False:", f"{SERVER} -k wire"),
)  # fmt: skip
