"""No file of the package runs code that it reads: from a pickle, from YAML, or from an array of objects."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_no_file_unpickles():
    """No file runs code from YAML either, or loads arrays that may contain objects."""
    for path in [*(ROOT / "jaxstack").rglob("*.py"), ROOT / "train.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
                found = {"pickle", "dill", "joblib", "shelve", "marshal", "torch"} & {*names}
                # nanoGPT's meta.pkl is read by an unpickler that imports nothing (tests/data/test_binary.py).
                assert found <= ({"pickle"} if path.name == "binary.py" else set()), path
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("yaml.load", "yaml.unsafe_load", "pickle.load", "pickle.loads", "eval", "exec"), (
                    path
                )
                keywords = {word.arg: ast.unparse(word.value) for word in node.keywords}
                assert called != "np.load" or keywords.get("allow_pickle") == "False", path
