"""Reads text and makes tokens, windows and batches, with NumPy and grain, without JAX.

`load(cfg.data)` returns the tokenizer, and the training text and the held-out text of each source. `batches` and
`eval_batches` cut a text into batches, and `MixtureReader` mixes several.
"""

from jaxstack.data.buckets import BucketReader
from jaxstack.data.dataset import Dataset, Source, load, load_for, resolve_from_data
from jaxstack.data.document_count import resolve_documents
from jaxstack.data.images import Images
from jaxstack.data.mixture import MixtureReader, describe_batch
from jaxstack.data.prefetch import prefetch
from jaxstack.data.sources import Document, documents
from jaxstack.data.tokenizers import Tokenizer, make_tokenizer, same_vocabulary, to_tokenizer_json, tokenizer_from_json
from jaxstack.data.tokens import Tokens, assign_domains, encode, read_token_file, split, write_token_file
from jaxstack.data.windows import Batch, batches, eval_batches

__all__ = [
    "Batch",
    "BucketReader",
    "Dataset",
    "Document",
    "Images",
    "MixtureReader",
    "Source",
    "Tokenizer",
    "Tokens",
    "assign_domains",
    "batches",
    "describe_batch",
    "documents",
    "encode",
    "eval_batches",
    "load",
    "load_for",
    "make_tokenizer",
    "prefetch",
    "read_token_file",
    "resolve_documents",
    "resolve_from_data",
    "same_vocabulary",
    "split",
    "to_tokenizer_json",
    "tokenizer_from_json",
    "write_token_file",
]
