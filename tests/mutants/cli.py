"""Mutants of configuration and commands."""

from mutants.rows import BY_HAND, mistakes

CHECKS = "config/test_config_checks.py"

mistakes(
    "config", "config/bounds.py", CHECKS,
    ("else self.low <= value)", "else self.low < value)"),
    ("value < self.high if self.high_open", "value <= self.high if self.high_open"),
)  # fmt: skip

mistakes(
    "config", "config/checks/training.py", CHECKS,
    ("longest + sample.tokens <= seq_len", "sample.tokens <= seq_len"),
    ("max((len(prompt.encode()) for prompt", "max((len(prompt) for prompt"),
)  # fmt: skip

mistakes(
    "config", "config/training.py", CHECKS,
    ("self.temperature == 0 and self.repetition_penalty == 1", "self.temperature == 0"),
)  # fmt: skip

mistakes(
    "config", "config/run.py", CHECKS,
    ('shards = sizes["pipe"] * sizes["tensor"]', 'shards = sizes["tensor"]'),
)  # fmt: skip

mistakes(
    "config", "config/parallel.py", CHECKS,
    ("mesh.context * math.lcm(split, 2)", "mesh.context * split"),
)  # fmt: skip

mistakes(
    "config", "config/model.py", CHECKS,
    ("0 < self.low_freq_factor < self.high_freq_factor", "0 < self.low_freq_factor <= self.high_freq_factor"),
    ("self.num_layers % len(self.windows) == 0", "len(self.windows) % self.num_layers == 0"),
)  # fmt: skip

mistakes(
    "config", "config/experts.py", CHECKS,
    ("not learned or self.top_k <= self.num_experts", "not learned or self.top_k < self.num_experts"),
)  # fmt: skip

mistakes(
    "config", "config/parallel.py", CHECKS,
    ("self.process_id < self.num_processes", "self.process_id <= self.num_processes"),
)  # fmt: skip

mistakes(
    "config", "config/checks/training.py", CHECKS,
    ("cfg.profile.span[1] <= train.steps", "cfg.profile.span[0] <= train.steps"),
    ("positions >= cfg.text_length", "positions > cfg.text_length"),
)  # fmt: skip

mistakes(
    "config", "config/model.py", CHECKS,
    ("return self.head_dim or self.d_model // self.num_heads", "return self.head_dim or self.d_model // self.kv_heads", CHECKS + " " + BY_HAND),
    ("return self.moe.d_ff or self.ff_width", "return self.ff_width", BY_HAND + " config/test_config.py"),
)  # fmt: skip

mistakes(
    "config", "config/run.py", CHECKS,
    ("positions = config.text_length\n", "positions = config.text_length - 1\n", "config/test_config.py config/test_config_checks.py"),
)  # fmt: skip

mistakes(
    "cli", "config/reading/parse.py", "config/test_config.py cli/test_package.py -k 'flag or help or config or mistake or resolved'",
    ('"allow_abbrev": False', '"allow_abbrev": True'),
    ('[*(f"--config={path}" for path in files), *words]', '[*words, *(f"--config={path}" for path in files)]'),
)  # fmt: skip

mistakes(
    "cli", "cli/parser.py", "config/test_config.py cli/test_package.py -k 'flag or help or config or mistake or resolved'",
    ('return code, f"error: {error}"', 'return Exit.INTERRUPTED, f"error: {error}"'),
)  # fmt: skip

mistakes(
    "cli", "config/reading/parse.py", "config/test_config.py cli/test_package.py -k 'flag or help or config or mistake or resolved'",
    ('names.append(word.removeprefix("--config="))', 'names.append(word)', "config/test_config.py cli/test_package.py"),
)  # fmt: skip

mistakes(
    "counts", "common/counts.py", "test_counts.py",
    ("{one if count == 1 else", "{one if count <= 1 else"),
    ('{count:{spec}} {one', "{count} {one"),
    ("else more or _ending(one)", "else _ending(one)"),
    ('("ch", "sh", "s", "x")', '("ch", "sh", "x")'),
    ("noun[-2:-1] not in", "noun[-1:] not in"),
    ('return f"{noun[:-1]}ies"', 'return f"{noun}ies"'),
)  # fmt: skip
