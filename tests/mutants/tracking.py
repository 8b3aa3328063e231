"""Mutants of metrics, goodput, the progress line and the report."""

from mutants.rows import mistakes

mistakes(
    "metrics", "tracking/throughput.py", "tracking/test_metrics.py",
    ("seconds = (time.perf_counter() - self._since) / self._steps", "seconds = time.perf_counter() - self._since"),
    ("self._kind, self._devices, self._dtype)", "self._kind, 1, self._dtype)"),
    ('"data_wait_s": self._waited / self._steps', '"data_wait_s": self._waited'),
    ("self._since += time.perf_counter() - began", "self._since = time.perf_counter()"),
    ("self._tokens = data.batch_size * data.seq_len", "self._tokens = data.batch_size * (data.seq_len + 1)"),
    ('"mfu": flops.full, "mfu_causal": flops.causal', '"mfu": flops.causal, "mfu_causal": flops.full'),
)  # fmt: skip

mistakes(
    "goodput",
    "tracking/goodput.py",
    "tracking/test_metrics.py",
    ("self._kind = kind\n        self._since = now", "self._kind = kind"),
    ("            self.enter(before)", "            self.enter(kind)"),
    ('round(sum(sums.values()) - sums["down"], 4)', "round(sum(sums.values()), 4)"),
    ('began - before[-1]["time"]', 'began - before[0]["time"]'),
    ('down += spent(dropped)["down"]', "down += 0.0"),
)

mistakes(
    "progress",
    "tracking/step_log.py",
    "checkpoint/test_reliability.py -k course",
    ("if self.rollbacks == limit:", "if self.rollbacks > limit:"),
    (
        "LoopState(self.saved, spike + self.batch - self.step, self.saved",
        "LoopState(self.saved, self.batch, self.saved",
    ),
    ("replace(self, saved=self.step, rollbacks=0)", "replace(self, saved=self.step)"),
)

mistakes(
    "report",
    "report/runs.py",
    "report/test_report.py",
    ("eval_losses.argmin()", "eval_losses.argmax()"),
    ('max((record.get("skipped") or skipped) - skipped, 0)', '(record.get("skipped") or 0)'),
    ("names.count(path.name) == 1", "names.count(path.name) >= 1"),
    ("if len(set(row)) > 1}", "if len(row) > 1}"),
    ("total // size:,} {unit} {total % size // part}", "total // size:,} {unit} {total // part}"),
    ('while steps[-1] >= record["step"]', 'while steps[-1] > record["step"]'),
    ('(record["step"] - steps[-1]) * round', 'record["step"] * round'),
)

mistakes(
    "report", "report/pointer.py", "report/test_pointer.py",
    ("sorted(zip(place, counts, steps, strict=True))", "sorted(zip(place, 0 * counts, steps, strict=True))"),
    ("np.minimum(steps * most // (last or 1), most - 1)", "steps * most // (last or 1)"),
    ("edges = [0.0, *", "edges = [shown[0], *"),
    ("np.abs(reading.steps[within] - strip.step).argmin()", "-1"),
    ("x, y = pixel(*point)", "x, y = pixel(strip.step, point[1])"),
    ("if top <= y <= bottom:", "if top <= y:"),
    ("if top <= y <= bottom:", "if y <= bottom:"),
    ("x = min(max(x, 0.0), width - wide)", "x = min(x, width - wide)"),
    ("x = min(max(x, 0.0), width - wide)", "x = max(x, 0.0)"),
    ("y = max(min(top, height - high), 0.0)", "y = top"),
    ("{html.escape(line)}</text>", "{line}</text>"),
    ("front = (letters - 1) // 2", "front = letters // 2 + 1"),
    ("1e3 <= abs(value) < 1e9", "1e3 <= value < 1e9"),
)  # fmt: skip

mistakes(
    "report", "tracking/jsonl.py", "tracking/test_metrics.py",
    ('[record for record in self.records if record["step"] <= after]', '[record for record in self.records if record["step"] < after]'),
    ("isinstance(v, float) and not math.isfinite(v)", "isinstance(v, float) and math.isnan(v)"),
)  # fmt: skip
