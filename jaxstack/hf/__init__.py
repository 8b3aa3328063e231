"""Hugging Face in and out: their folders as our models, and back, without torch and transformers.

`PretrainedFolder(folder).read(ctx)` gives parameters, `write` makes a folder, `jaxstack import` does both for runs.
"""

from jaxstack.hf.configs import FAMILIES, family_of, from_json, model_differences, to_json
from jaxstack.hf.pretrained import PretrainedFolder, save_pretrained
from jaxstack.hf.weights import WEIGHT_MAPS, read_param, weight_map

__all__ = [
    "FAMILIES",
    "WEIGHT_MAPS",
    "PretrainedFolder",
    "family_of",
    "from_json",
    "model_differences",
    "read_param",
    "save_pretrained",
    "to_json",
    "weight_map",
]
