"""vLLM loads exported folders and continues prompts with our tokens. JAXSTACK_VLLM names a Python that has vLLM."""

import importlib.util
import json
import os
import sys

import pytest
import vllm_reads
from record import RESULTS

PYTHON = sys.executable if importlib.util.find_spec("vllm") else os.environ.get("JAXSTACK_VLLM")


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="needs vLLM: set JAXSTACK_VLLM to a Python that has it")
@pytest.mark.parametrize("case", ["llama", "qwen3_moe", "llama_w8a8"])
def test_vllm_continues_with_the_same_tokens(case, tmp_path):
    row = vllm_reads.compare(case, PYTHON, tmp_path, steps=40)
    assert "error" not in row, row
    if case == "llama_w8a8":  # vLLM rounds the inputs of some matrices to the neighbouring code
        assert row["equal_prompts"] >= 8
        assert row["largest_gap_of_logits"] < 0.3
    else:
        assert row["equal_prompts"] == row["prompts"]


def test_the_committed_result_has_each_case():
    """The figures of docs/huggingface.md."""
    rows = {row["case"]: row for row in json.loads((RESULTS / "vllm_reads.json").read_text())["cases"]}
    assert {*rows} == {*vllm_reads.CASES}
    for case in ("llama", "qwen3_moe"):
        assert rows[case]["equal_prompts"] == rows[case]["prompts"] == 10
        assert rows[case]["first_difference"] == rows[case]["tokens"] == vllm_reads.TOKENS
    assert rows["llama_w8a8"]["equal_prompts"] == 9
    for case in ("llama_int4", "llama_int8"):
        assert "cpu_gemm_wna16" in rows[case]["error"] or "WNA16" in rows[case]["error"]
