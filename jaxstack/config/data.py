"""Keys of the group `data`: what is read, and how it becomes tokens, sequences and batches."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxstack.config.bounds import Interval, PositiveInt, check_bounds, expand_home, require


@dataclass(frozen=True)
class DataConfig:
    """The data source, its tokenizer, and the shape of a batch."""

    source: Literal["stdlib", "path", "tokens", "hf", "chat"] = "stdlib"
    """Where text comes from. `stdlib`: the source code of Python's standard library. `path`: a text file or a folder of
    text files. `tokens`: a token file made by `jaxstack data`. `hf`: a Hugging Face dataset (extra `[hf]`). `chat`:
    conversations, where only the answers are learned; see docs/finetuning.md."""
    path: str | None = None
    """Text file or folder (`path`), token file (`tokens`), dataset name (`hf`), or JSON Lines file of conversations
    (`chat`)."""
    tokenizer: str = "bytes"
    """`bytes`, `chars`, or the path of a tokenizer.json (extra `[hf]`)."""
    seq_len: PositiveInt = 256
    """Tokens per sequence. One more token is read, because targets are shifted by one."""
    batch_size: PositiveInt = 16
    """Sequences per optimizer step, over all devices and accumulation steps."""
    packing: bool = False
    """Restrict attention to one document: batches carry segment ids, and positions restart at each document. With
    source `chat`, put several whole conversations in a row instead of one."""
    eval_fraction: Annotated[float, Interval(0, 1, low_open=True, high_open=True)] = 0.1
    """Fraction held out for evaluation: whole documents if there are many, otherwise the end of the text. Conversations
    are never split."""
    domains: tuple[str, ...] = ()
    """For `model.moe.router=domain`: one regular expression per expert, which must match the full name of a document
    (its path within data.path). A document belongs to the first expression that matches."""
    hf_split: str = "train"
    """Split of the Hugging Face dataset."""
    hf_column: str = "text"
    """Column of the Hugging Face dataset that holds the text."""

    def __post_init__(self) -> None:
        check_bounds("data", self)
        expand_home(self, "path", "tokenizer")
        require(bool(self.tokenizer), "data.tokenizer is empty. Use bytes, chars, or the path of a tokenizer.json.")
        require(
            self.source == "stdlib" or bool(self.path),
            f"data.path is missing, but data.source={self.source} reads from it. Set --data.path=...",
        )
        require(
            self.source != "stdlib" or not self.path,
            f"data.path={self.path} is set, but data.source=stdlib does not read it. Add --data.source=path for text, "
            f"or --data.source=tokens for a token file.",
        )
