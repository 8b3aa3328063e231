"""The core of the package: which files import each other in a circle, and which features the core's files name."""

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import figures

ROOT = Path(__file__).parents[1]

CORE = (
    "models/batches.py",
    "models/blocks.py",
    "models/context.py",
    "models/decoder.py",
    "models/family.py",
    "models/forward.py",
    "models/layer_inputs.py",
    "models/layers.py",
    "models/layout.py",
    "models/ops.py",
    "models/params.py",
    "models/partitioned.py",
    "models/recomputation.py",
    "models/values.py",
    "training/gradients.py",
    "training/losses.py",
    "training/step.py",
)
"""What a newcomer reads to follow a dense decoder."""

PACKED = 61
"""Assignments such as `a, b = f(x), g(y)`. The number may only fall."""

CONFIG = 57
"""Functions that take the whole `Config`. The number may only fall: behind a door, functions take what they read."""

WORDS = re.compile(
    r"moe|expert|lora|adapter|qat|watch|teacher|distill|noise_scale|placement|cross_attention|gate_ids|width_ratio|token_types"
    r"|preference|\brl\b|offload"
)
"""Words of features: of models with experts, of adapters, of quantisation-aware training, and so on."""

NAMED = {
    "context.py": 2,  # carries where experts are stored
    "layout.py": 2,  # never gathers experts, and names the rounds to them
    "ops.py": 3,  # lists the implementations of experts beside the others
    "params.py": 3,  # has the ratio of widths, and tells adapters from matrices
    "recomputation.py": 1,  # saves the tokens of experts, by the name of their array
}
"""Lines of each file that name a feature. The numbers may only fall; a file that is not listed names none."""


def feature_lines(path: Path) -> list[str]:
    """Returns the lines of code that name a feature, without comments and docstrings."""
    text = path.read_text()
    docstrings = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    named = {
        token.start[0]
        for token in tokens
        if token.type in (tokenize.NAME, tokenize.STRING)
        and token.start[0] not in docstrings
        and WORDS.search(token.string)
    }
    lines = text.split("\n")
    return [f"{path.name}:{line}: {lines[line - 1].strip()}" for line in sorted(named)]


def test_no_file_imports_itself_through_others():
    """Imports within functions and for type checking count, too."""
    assert figures.circles(figures.import_graph(ROOT)) == []


def test_values_that_have_nothing_in_common_are_assigned_apart():
    packed = [*figures.places(ROOT, figures.packed_assignments)]
    assert len(packed) <= PACKED, "\n".join(packed)


def test_fewer_functions_take_the_whole_configuration_than_before():
    functions = [*figures.places(ROOT, figures.functions_of_config)]
    assert len(functions) <= CONFIG, "\n".join(functions)


def test_the_core_names_fewer_features_than_before():
    lines = [line for name in CORE for line in feature_lines(ROOT / "jaxstack" / name)]
    counts = Counter(line.split(":")[0] for line in lines)
    assert counts == NAMED, "\n".join(lines)
