"""Reads and writes Hugging Face model folders, without torch and transformers.

`PretrainedFolder(folder).read_params(ctx)` returns parameters, `save_pretrained` writes a folder, and `jaxstack import`
and `jaxstack export` do both for runs.
"""

from jaxstack.config.scheme import Scheme
from jaxstack.hf.configs import SpecialIds, family_of, from_json, model_differences, to_json
from jaxstack.hf.families import FAMILIES
from jaxstack.hf.pretrained import PretrainedFolder, save_pretrained
from jaxstack.hf.weights import WEIGHT_MAPS, read_param, weight_map

__all__ = [
    "FAMILIES",
    "WEIGHT_MAPS",
    "PretrainedFolder",
    "Scheme",
    "SpecialIds",
    "family_of",
    "from_json",
    "model_differences",
    "read_param",
    "save_pretrained",
    "to_json",
    "weight_map",
]
