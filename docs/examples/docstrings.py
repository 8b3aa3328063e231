"""Writes questions and answers about the standard library, for docs/finetuning.md: `python docstrings.py OUT.jsonl`

Each public function gives a question, answered by the first line of its docstring. Nothing is imported or downloaded.
"""

import ast
import json
import sys
import sysconfig
from pathlib import Path


def pairs(root: Path) -> list[dict[str, str]]:
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"} & set(parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:
            continue
        module = ".".join(parts).removesuffix(".__init__")
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                first = (ast.get_docstring(node) or "").strip().partition("\n")[0]
                if 10 <= len(first) <= 100:
                    found.append({"prompt": f"What does {module}.{node.name} do?", "completion": first})
    return found


if __name__ == "__main__":
    lines = pairs(Path(sysconfig.get_path("stdlib")))
    Path(sys.argv[1]).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    print(f"{len(lines):,} questions in {sys.argv[1]}")
