"""Mutants of the server."""

from mutants.rows import mistakes

REQUESTS, SERVER = "serve/test_serve_requests.py", "serve/test_serve.py"
DOOR = "serve/test_connections.py"

mistakes(
    "serve", "generate/answer_text.py", REQUESTS,
    ("self._text = self._text[:found]", "self._text = self._text[: found + 1]"),
    ("steps = [[token] for token in tokens] if self._stop else", "steps = [tokens] if self._stop else"),
    ("min(self._skip, len(piece))", "0"),
)  # fmt: skip

mistakes(
    "serve", "serve/requests.py", REQUESTS,
    ("            if name not in harmless:\n", "            if False:\n"),
    ("type(found) is not int or not least <= found <= most", "not least <= found <= most"),
    ("    if room < least:", "    if room < 1:"),
    ("            if not _is_one_of(value, harmless[name]):", "            if False:"),
    ("isinstance(value, bool) == isinstance(one, bool)", "True"),
    ("(model.sample.repetition_penalty,)", "(1.0,)"),
    ("        if wrong:\n", "        if False:\n"),
)  # fmt: skip

mistakes(
    "serve", "serve/answer.py", SERVER,
    ("        self._worker.cancel(self._names)\n", "", f"{SERVER} -k goes"),
    ("part or FAILED", "part", f"{SERVER} -k failure"),
    ("                self.unfinished -= part.ended\n", "", f"{SERVER} -k echo"),
)  # fmt: skip

mistakes(
    "serve", "serve/app.py", SERVER,
    ("busy + more > self.limits.texts", "busy > self.limits.texts", f"{SERVER} -k limits"),
    ("        if self.closing:\n            raise", "        if False:\n            raise", f"{SERVER} -k shutting"),
    ("if len(body) > most:", "if False:", f"{SERVER} -k wire"),
    ("contextlib.suppress(OSError)", "contextlib.suppress()", f"{DOOR} -k lines"),
)  # fmt: skip

mistakes(
    "serve", "serve/worker.py", f"{SERVER} -k echo",
    ("chosen.setdefault(tokens, []).append(one.prompt)", "chosen[tokens] = [one.prompt]"),
    ("                if not ended:\n                    self._batch.add(prompt)\n", ""),
)  # fmt: skip

mistakes(
    "serve", "serve/replies.py", f"{SERVER} -k echo",
    ("offset = 0 if piece.of_prompt else", "offset ="),
    ("        values.setdefault(name, chosen)\n", ""),
)  # fmt: skip

mistakes(
    "serve", "serve/access.py", DOOR,
    ("name in self._hosts or name == local", "name is not None"),
    ("name in self._hosts or name == local", "name in self._hosts"),
    ("scope[\"path\"] not in OPEN_PATHS", "not scope[\"path\"].startswith(OPEN_PATHS)"),
    (', connection="close")', ")"),
    ("hmac.compare_digest(sent.strip().encode(), self._key)", "self._key.startswith(sent.strip().encode())"),
    ("    if not path.is_file():", "    if not path.exists():"),
)  # fmt: skip

mistakes(
    "serve", "serve/connections.py", DOOR,
    ("        elif self._deadline is None:\n", "        elif False:\n"),
    ("        if begun:\n", "        if False:\n"),
    ("self._unread = self.loop.call_later(self._seconds, self.transport.abort)", "pass"),
    ("self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE)", "False"),
    ("            await self._free.acquire()\n", ""),
    ("time.monotonic() - self._said >= _QUIET_S", "True"),
)  # fmt: skip

SEVERAL = "serve/test_several.py"

mistakes(
    "several", "serve/catalog.py", SEVERAL,
    ("                self._loaded.move_to_end(name)\n", "", SEVERAL + " -k dropped"),
    ("self._bytes() + self.sizes[name] > self._limit", "self._bytes() > self._limit", SEVERAL + " -k dropped"),
    ("return 4 * params.count(", "return 2 * params.count(", SEVERAL + " -k dropped"),
    ("for token in [mask, *part]]", "for token in [*part, mask]]"),
)  # fmt: skip

mistakes(
    "several", "serve/kinds.py", SEVERAL,
    ("shares = _softmax(logits[0])", "shares = _softmax(logits[-1])"),
    ("levels = np.round((pixels.clip(-1, 1) + 1) * 127.5)", "levels = np.round((pixels.clip(0, 1) + 1) * 127.5)"),
    ('vector.astype("<f4")', 'vector.astype("<f8")'),
)  # fmt: skip

mistakes(
    "several", "generate/encode.py", SEVERAL,
    ("segments[row, : len(texts[i])] = 1", "segments[row] = 1"),
    ("families.of(self.cfg), final_norm=encoder.last_layer)", "families.of(self.cfg))"),
)  # fmt: skip
