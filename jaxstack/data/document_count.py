"""Counts the documents of a run's rows, which attention kernels must know before they are compiled."""

from dataclasses import replace

from jaxstack.config import DataConfig
from jaxstack.data.buckets import whole_documents
from jaxstack.data.dataset import Dataset
from jaxstack.data.mixture import MixtureReader, WindowSizes
from jaxstack.data.pairs import PairTokens
from jaxstack.data.preferences import PreferenceTokens
from jaxstack.data.rewarded import PromptTokens
from jaxstack.data.windows import most_held_out_documents

LIMIT = 64
"""Documents of a row above which `auto` sets no limit.

cuDNN stores a float32 number for each of them, token and head. With 64, these are as many bytes as queries of 128.
"""


def resolve_documents(keys: DataConfig, family: str, seed: int, steps: int, dataset: Dataset) -> DataConfig:
    """Returns the keys with a number for `data.max_documents=auto`, or with `null`.

    It is the largest number of documents in a row, training and held-out, of all steps. Only the rows of decoders are
    counted. There is no limit where nothing bounds a row below `LIMIT`.

    Args:
      keys: the group `data` of the configuration.
      family: `model.family`.
      seed: `run.seed`.
      steps: `train.steps`.
      dataset: what the run is trained on.

    Raises:
      ConfigError: a text is shorter than one row.
    """
    if keys.max_documents != "auto":
        return keys
    texts = [*dataset.training_texts]
    others = (PairTokens, PreferenceTokens, PromptTokens)
    most = None
    if family == "decoder" and keys.packing and texts and not any(isinstance(text, others) for text in texts):
        most = _most_documents(keys, seed, steps, dataset)
    return replace(keys, max_documents=None if most is None or most > LIMIT else most)


def _most_documents(keys: DataConfig, seed: int, steps: int, dataset: Dataset) -> int:
    texts = [*dataset.training_texts]
    held_out = [*dataset.held_out_texts]
    if keys.keeps_documents:
        texts = [whole_documents(text, keys.seq_len) for text in texts]
        held_out = [whole_documents(text, keys.seq_len) for text in held_out]
    sizes = WindowSizes(seq_len=keys.seq_len, batch_size=keys.batch_size, packing=True)
    reader = MixtureReader(texts, [one.name for one in dataset.sources], keys.weights(), sizes, seed)
    evaluated = [most_held_out_documents(text, keys.seq_len, True) for text in held_out]
    return max(reader.most_documents(steps, LIMIT), *evaluated)
