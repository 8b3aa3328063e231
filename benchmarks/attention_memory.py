"""Memory of attention and its gradients, compiled for chips that are not here.

`python benchmarks/attention_memory.py tpu` and `... cuda`, each in the environment of its extra (`[test,tpu]`,
`[test,cuda13]`); together they write results/attention_memory.json:
bytes beside the arrays that go in and come out, and seconds to compile, of every implementation. Nothing is run.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "aot"))

from cases import ATTENTION, attention
from record import RESULTS, record

PLATFORMS = {
    "tpu": ("v5e:2x2", ("xla", "chunked", "pallas_tpu")),
    "cuda": ("h100:1x1x1", ("xla", "chunked", "cudnn", "pallas_gpu")),
}

if __name__ == "__main__":
    target, names = PLATFORMS[sys.argv[1]]
    path = RESULTS / "attention_memory.json"
    cases = json.loads(path.read_text())["cases"] if path.exists() else {}
    cases[target] = {"shape": dict(zip("BSHGK", ATTENTION["llama"][0], strict=True)), "dtype": "bfloat16"}
    for name in names:
        begin = time.perf_counter()
        temporary = attention("llama", name, target).memory_analysis().temp_size_in_bytes
        cases[target][name] = {"temporary_bytes": temporary, "compile_s": round(time.perf_counter() - begin, 1)}
        print(target, name, cases[target][name], flush=True)
    record("attention_memory", {"cases": cases})
