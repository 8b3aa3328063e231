"""Hugging Face in and out: their folders as our models, and back, without torch and transformers.

`Pretrained(folder).read(ctx)` gives parameters, `write` makes a folder, `jaxstack import` does both for runs.
"""

from jaxstack.hf.configs import FAMILIES, differ, family_of, from_json, to_json
from jaxstack.hf.pretrained import Pretrained, write
from jaxstack.hf.weights import TABLES, assemble, table

__all__ = [
    "FAMILIES",
    "TABLES",
    "Pretrained",
    "assemble",
    "differ",
    "family_of",
    "from_json",
    "table",
    "to_json",
    "write",
]
