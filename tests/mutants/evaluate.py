"""Mutants of evaluation."""

from mutants.rows import mistakes

mistakes(
    "evaluate", "evaluate/text.py", "evaluate/test_evaluate.py -k 'windows or by_hand'",
    ("ids[max(end - context - 1, 0) : end]", "ids[max(end - context, 0) : end]"),
    ("scored + context - overlap, len(ids)", "scored + context, len(ids)"),
    ("size -= tokenizer.num_bytes(ids[:1])", "size -= 1"),
    ("nats / math.log(2) / size", "nats / math.log(2) / sum(part.scored for part in parts)"),
)  # fmt: skip

mistakes(
    "evaluate", "generate/score.py", "generate/test_score.py",
    ("-(-rows // self.ctx.layout.replicas) * self.ctx.layout.replicas", "rows"),
    ("jnp.where(ids < vocabulary, logits, -jnp.inf)", "logits"),
    ("collectives.all_gather_invariant(ids[places], axes, 2)", "collectives.all_gather_invariant(places, axes, 2)"),
    ("yield i, Scores(log_probs[: len(texts[i]) - 1], greedy[: len(texts[i]) - 1])", "yield i, Scores(log_probs[: len(texts[i])], greedy[: len(texts[i])])"),
    ("lambda i: self.slots(len(texts[i]) - 1)", "lambda i: self.slots(len(texts[i]))"),
)  # fmt: skip

mistakes(
    "evaluate", "checkpoint/evaluations.py", "evaluate/test_evaluate.py -k overwritten",
    ("            number += 1\n            continue\n", "            path.unlink()\n            continue\n"),
    ('key=lambda record: str(record["made"])', 'key=lambda record: record["step"]'),
)  # fmt: skip

mistakes(
    "evaluate", "kernels/cross_entropy.py", "generate/test_score.py -k gradients",
    ("better = (logits > chosen) | ((logits == chosen) & (entries < target))", "better = logits > chosen"),
)  # fmt: skip

mistakes(
    "evaluate", "generate/exact.py", "generate/test_exact.py -m slow -k 'gradients and float32'",
    ("added[i] = [*added[i][:wrong], chosen[wrong]]", "added[i] = added[i][: wrong + 1]"),
    ("jnp.arange(S) + 1 - ends[:, None]", "jnp.arange(S) - ends[:, None]"),
)  # fmt: skip

mistakes(
    "evaluate", "evaluate/answers.py", "evaluate/test_answers.py -k 'hand or task'",
    ("right = rewards >= RIGHT", "right = rewards > RIGHT"),
    ("right.any(1)", "right.all(1)"),
    ("if is_task(path):", "if False:"),
    ("learned.eval_fraction if same", "2 * DataConfig().eval_fraction if not same"),
)  # fmt: skip
