"""Keys of the group `data`: what is read, and how it becomes tokens, sequences and batches."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from jaxstack.common.counts import plural
from jaxstack.config.bounds import Interval, PositiveInt, ShortRepr, check_bounds, expand_home, require
from jaxstack.config.denoisers import DenoiserConfig
from jaxstack.config.pictures import PICTURES

FormatName: TypeAlias = Literal["jaxstack", "nanogpt", "megatron", "llmc"]
SourceName: TypeAlias = Literal[
    "stdlib",
    "path",
    "tokens",
    "hf",
    "chat",
    "labels",
    "pairs",
    "preferences",
    "prompts",
    "triples",
    "digits",
    "images",
    "captions",
]
TriplePart: TypeAlias = Literal["head", "relation", "tail", "text"]

TEMPLATED = ("chat", "preferences", "prompts")
"""Sources of conversations, which a chat template renders."""

_WITHOUT_PATH = ("stdlib", "digits")
"""Sources that read no file of the user."""


@dataclass(frozen=True, repr=False)
class SourceConfig(ShortRepr):
    """One source of `data.mixture`. Its other properties are the keys of the group `data`."""

    source: SourceName
    """Where text comes from, as in `data.source`."""
    path: str | None = None
    """File, folder or name to read, as in `data.path`."""
    weight: float = 1.0
    """Share of the sequences, relative to the weights of the other sources. With 0 the source is only evaluated."""
    name: str | None = None
    """Name in metrics, on the screen and in reports. Null means the last part of the path."""
    glob: str | None = None
    """Which files of a folder to read, as in `data.glob`."""
    format: FormatName = "jaxstack"
    """Format of a token file, as in `data.format`."""
    hf_split: str = "train"
    """Split of a Hugging Face dataset, as in `data.hf_split`."""
    hf_column: str = "text"
    """Column of a Hugging Face dataset, as in `data.hf_column`."""

    def __post_init__(self) -> None:
        expand_home(self, "path")

    @property
    def label(self) -> str:
        """The name in metrics, on the screen and in reports."""
        if self.name is not None:
            return self.name
        return Path(self.path).name if self.path else self.source


@dataclass(frozen=True, repr=False)
class WeightChange(ShortRepr):
    """New weights of `data.mixture`, from a step on."""

    step: int
    """Number of steps that are done before the weights change."""
    weights: tuple[float, ...]
    """One weight for each source, in the order of `data.mixture`."""


@dataclass(frozen=True)
class DataConfig:
    """The data source, its tokenizer, and the shape of a batch."""

    source: SourceName = "stdlib"
    """Where text comes from. `stdlib`: the source code of Python's standard library. `path`: a text file or a folder of
    text files. `tokens`: a token file, see `data.format`. `hf`: a Hugging Face dataset (extra `[hf]`). `chat`:
    conversations, where only the answers are learned; see docs/finetuning.md. `labels`: texts with labels, for a
    classifier; see docs/encoders.md. `pairs`: texts with translations; see docs/data.md. `preferences`: prompts with a
    better and a worse completion; see docs/preferences.md. `prompts`: prompts whose completions are rewarded; see
    docs/reinforcement.md. `triples`: texts with a head, a relation and a tail; see docs/encoders.md. `digits`:
    scikit-learn's pictures of digits (extra `[images]`). `images`: pictures of one size; see docs/diffusion.md and
    docs/contrastive.md. `captions`: pictures with texts of their own; see docs/data.md."""
    path: str | None = None
    """What the source reads. `path`: a text file or a folder. `tokens`: a token file. `hf`: the name of a dataset.
    `chat`, `labels`, `preferences`, `prompts` and `triples`: a JSON file. `pairs`: a file, a folder, or `package:NAME`.
    `images`: a folder or a .npz file. `captions`: a JSON file, or `drawn:digits`. With `chat` and `prompts` you may
    also name a task, `task:NAME`, whose rows are drawn; see docs/reinforcement.md."""
    glob: str | None = None
    """Which files of a folder to read, such as `*.md`, or `**/*.md` for folders within it too. Null means all files."""
    skip: bool = False
    """Skip files of folders that are not UTF-8 text, such as pictures, and say how many. Otherwise they are errors."""
    format: FormatName = "jaxstack"
    """Format of a token file. `jaxstack`: files of `jaxstack data build`. The others contain no tokenizer, and you may
    name a folder of shards. `nanogpt`: ids with or without a header, or an array of NumPy. `megatron`: a pair of .bin
    and .idx. `llmc`: a file of llm.c."""
    mixture: tuple[SourceConfig, ...] = ()
    """Several sources with weights, in place of `data.source` and `data.path`:
    `[{source: path, path: a.txt, weight: 3}, {source: tokens, path: b.bin, weight: 1}]`. All of them
    share one tokenizer."""
    mixture_changes: tuple[WeightChange, ...] = ()
    """Steps from which the sources have other weights, in ascending order: `[{step: 900, weights: [1, 4]}]`."""
    tokenizer: str = "bytes"
    """`bytes`, `chars`, or the path of a tokenizer.json (extra `[hf]`). Use `ids` for a token file of another program
    if you do not have its tokenizer: texts are then shown as numbers, and bits per byte are not computed."""
    special_tokens: bool = True
    """Add the special tokens that the tokenizer.json adds to each text, such as BOS, in training, evaluations and
    prompts. Texts of a chat template have only the special tokens of the template."""
    vocab_size: PositiveInt | None = None
    """Number of ids, for `data.tokenizer=ids` only."""
    seq_len: PositiveInt = 256
    """Tokens per sequence. One more token is read, because targets are shifted by one."""
    batch_size: PositiveInt = 16
    """Sequences per optimizer step, over all devices and accumulation steps."""
    packing: bool | Literal["best_fit"] = False
    """Restrict attention to one document: batches carry segment ids, and positions restart at each document. `best_fit`
    puts whole documents into each row, and cuts only those that are longer than a row. With source `chat`, `labels`,
    `pairs` or `preferences`, `true` does the same: a row has several whole conversations, texts or pairs instead of
    one."""
    max_documents: Literal["auto"] | PositiveInt | None = "auto"
    """Maximum number of documents in a row; padding counts as one. A row with more ends the run with an error.
    `kernels.attention=cudnn` needs this limit to attend within documents. `auto`: the largest number in the rows of the
    run, which are counted when the run starts, or null if that is more than 64. Null means no limit."""
    buckets: Literal["auto"] | tuple[int, ...] = ()
    """Lengths of rows in ascending order, such as `[128, 256, 512]`; the last one is `data.seq_len`. Each row has one
    document, conversation, text or pair, and each batch has the smallest length that holds its rows. A batch of shorter
    rows has more rows, so that all batches have `batch_size * seq_len` tokens. `auto` chooses the fewest lengths that
    keep padding within `data.max_padding`. An empty list means that all rows have `data.seq_len` tokens."""
    max_padding: Annotated[float, Interval(0, 1, low_open=True, high_open=True)] = 0.1
    """With `data.buckets=auto`: the largest share of the tokens that may be padding."""
    eval_fraction: Annotated[float, Interval(0, 1, low_open=True, high_open=True)] = 0.1
    """Fraction held out for evaluation: whole documents if there are many, otherwise the end of the text. Conversations
    are never split."""
    mask_share: Annotated[float, Interval(0, 1, low_open=True, high_open=True)] = 0.15
    """With `model.family=encoder` or `branches`: share of the tokens that are hidden and learned. Of these, 80% become
    `mask_id`, 10% a random token, and 10% stay as they are (BERT). ModernBERT uses 0.3."""
    mask_words: bool = False
    """With `model.family=encoder` or `branches`: hide whole words, and not one token at a time."""
    mask_phrases: str | None = None
    """With `model.family=encoder` or `branches`: a text file with a phrase or name on each line. A phrase that occurs
    in a text is hidden as a whole, or not at all. Null means no phrases."""
    triple_parts: tuple[TriplePart, ...] = ("relation", "text")
    """With source `triples`: what may be hidden in a text and its triple. Each text draws one entry of the list. `text`
    hides tokens as in other texts; `head`, `relation` and `tail` hide this part of the triple."""
    mask_id: Annotated[int, Interval(0)] | None = None
    """With `model.family=encoder` or `branches`: id that hides a token. Null means one after the tokenizer's ids."""
    denoisers: tuple[DenoiserConfig, ...] = ()
    """With `model.family=encoder_decoder`: how spans of a text are hidden, for the decoder to generate. Each row draws
    one of these denoisers, by their weights. T5 uses `[{rate: 0.15, span: 3}]`. `data.seq_len` is then the number of
    inputs."""
    languages: tuple[str, ...] = ()
    """With source `pairs`: languages to translate to, by their names in catalogues or columns. With source `captions`:
    languages of the texts of each picture. With other pictures and a model that reads texts: languages that write out
    the classes, which must be numbers (num2words). Empty then means the classes' own names."""
    key_words: tuple[str, ...] = ()
    """With source `captions`: words that get more attention in all texts and in the prompts of `jaxstack generate`, by
    `model.diffusion.key_weight`. A line of the file may name more."""
    target_len: PositiveInt | None = None
    """With `model.family=encoder_decoder`: targets per row. Null means as many as `data.denoisers` need, or
    `data.seq_len`. With pictures that have texts: tokens of a text."""
    domains: tuple[str, ...] = ()
    """For `model.moe.router=domain`: one regular expression per expert, which must match the full name of a document
    (its path within data.path), or the language of a pair. A document belongs to the first expression that matches."""
    hf_split: str = "train"
    """Split of the Hugging Face dataset."""
    hf_column: str = "text"
    """Column of the Hugging Face dataset that holds the text."""

    def __post_init__(self) -> None:
        check_bounds("data", self)
        expand_home(self, "path", "tokenizer", "mask_phrases")
        require(bool(self.tokenizer), "data.tokenizer is empty. Use bytes, chars, or the path of a tokenizer.json.")
        _check_mixture(self)
        _check_format(self)
        _check_folders(self)
        _check_denoisers(self)
        _check_triples(self)
        require(
            self.source in _WITHOUT_PATH or bool(self.path),
            f"data.path is missing, but data.source={self.source} reads from it. Set --data.path=...",
        )
        require(
            self.source not in _WITHOUT_PATH or not self.path,
            f"data.path={self.path} is set, but data.source={self.source} does not read it. Add --data.source=path for "
            f"text, or --data.source=tokens for a token file.",
        )

    def single_sources(self) -> Iterator["DataConfig"]:
        """Yields a configuration for each source of the mixture, or this one if there is no mixture."""
        if not self.mixture:
            yield self
        for one in self.mixture:
            own = {f.name: getattr(one, f.name) for f in fields(one) if f.name not in ("name", "weight")}
            if one.source == "pairs":
                own |= {"denoisers": (), "target_len": self.target_length}
            else:
                own["languages"] = ()
            yield replace(self, mixture=(), mixture_changes=(), **own)

    @property
    def target_length(self) -> int:
        """The number of targets of a row of an encoder-decoder."""
        if self.target_len is not None:
            return self.target_len
        sizes = [each.lengths(each.text_length(self.seq_len))[1] for each in self.denoisers]
        return max(sizes, default=self.seq_len)

    @property
    def keeps_documents(self) -> bool:
        """Whether rows have complete documents of a text, of which only those that are longer than a row are cut."""
        return bool(self.buckets) or self.packing == "best_fit"

    @property
    def has_triples(self) -> bool:
        """Whether a source has texts with triples, whose rows have padding that no token sees."""
        return any(one.source == "triples" for one in self.mixture or (self,))

    @property
    def known_documents(self) -> int | None:
        """The most documents of a row. `None` means that there is no limit, or that the rows are not counted yet."""
        return None if self.max_documents == "auto" else self.max_documents

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of rows, ascending: all buckets, or one. `auto` counts as its longest."""
        return (self.seq_len,) if self.buckets in ("auto", ()) else tuple(map(int, self.buckets))

    def with_length(self, length: int) -> "DataConfig":
        """Returns the configuration of the batches of one bucket: with its length, and as many rows as it has."""
        targets = self.target_length * length // self.seq_len
        return replace(
            self,
            buckets=(),
            max_padding=DataConfig.max_padding,
            seq_len=length,
            batch_size=self.batch_size * self.seq_len // length,
            target_len=None if self.target_len is None else targets,
        )

    def weights(self) -> list[tuple[int, tuple[float, ...]]]:
        """Returns the steps from which weights hold, with the weights; the first step is 0."""
        if not self.mixture:
            return [(0, (1.0,))]
        first = tuple(one.weight for one in self.mixture)
        return [(0, first), *((change.step, change.weights) for change in self.mixture_changes)]


def _check_mixture(cfg: DataConfig) -> None:
    require(
        bool(cfg.mixture) or not cfg.mixture_changes,
        f"data.mixture_changes={list(cfg.mixture_changes)} is set, but data.mixture is empty. Name the sources there.",
    )
    if not cfg.mixture:
        return
    require(
        cfg.source == "stdlib" and cfg.path is None,
        f"data.source={cfg.source}, data.path={cfg.path} are set beside data.mixture, which replaces them. Put this "
        f"source into the mixture and remove both keys.",
    )
    require(
        not cfg.domains,
        f"data.domains={list(cfg.domains)} cannot be combined with data.mixture. Use one source, or no domains.",
    )
    for one in cfg.mixture:
        require(
            one.source == "stdlib" or bool(one.path),
            f"data.mixture: {one} has no path. Add `path: ...`.",
        )
        require(
            one.source != "stdlib" or not one.path,
            f"data.mixture: {one} has a path, which the source stdlib does not read. Use source: path or tokens.",
        )
        require(
            bool(one.label) and one.label == one.label.strip() and one.label.isprintable(),
            f"data.mixture: {one} has a name that is empty, or has control characters or outer spaces. Change it.",
        )
    labels = [one.label for one in cfg.mixture]
    require(
        len(set(labels)) == len(labels),
        f"data.mixture={list(cfg.mixture)} has two sources named {max(labels, key=labels.count)}. Give each its own "
        f"`name: ...`.",
    )
    for step, weights in cfg.weights():
        place = f"data.mixture_changes={list(cfg.mixture_changes)}" if step else f"data.mixture={list(cfg.mixture)}"
        require(
            len(weights) == len(labels),
            f"{place} has {plural(len(weights), 'weight')} for the {plural(len(labels), 'source')} of data.mixture. "
            f"Give one for each.",
        )
        require(
            all(0 <= w < math.inf for w in weights) and any(weights),
            f"{place} has the weights {list(weights)}. Use numbers of 0 or more, at least one of them above 0.",
        )
    steps = [0, *(change.step for change in cfg.mixture_changes)]
    require(
        all(a < b for a, b in pairwise(steps)),
        f"data.mixture_changes={list(cfg.mixture_changes)} is not in ascending order of steps from 1 on. Sort it.",
    )


def _check_format(cfg: DataConfig) -> None:
    for one in cfg.mixture or (cfg,):
        place = f"data.mixture: {one}" if cfg.mixture else f"data.format={one.format}, data.source={one.source}"
        require(
            one.format == "jaxstack" or one.source == "tokens",
            f"{place}: a format is of token files. Use the source tokens, or leave the format unset.",
        )
        require(
            cfg.tokenizer != "ids" or one.format != "jaxstack",
            f"data.tokenizer=ids is for token files of other programs, but {place} is not one. Use bytes, chars or the "
            f"path of a tokenizer.json.",
        )
    require(
        (cfg.tokenizer == "ids") == (cfg.vocab_size is not None),
        f"data.tokenizer={cfg.tokenizer} with data.vocab_size={cfg.vocab_size} is not complete. Set both for "
        f"token files without a tokenizer: data.tokenizer=ids and data.vocab_size.",
    )


def _check_folders(cfg: DataConfig) -> None:
    sources = cfg.mixture or (cfg,)
    require(
        not (cfg.mixture and cfg.glob),
        f"data.glob={cfg.glob} is set beside data.mixture. Write `glob: ...` into the source that it is for.",
    )
    for one in sources:
        place = f"data.mixture: {one}" if cfg.mixture else f"data.glob={one.glob}, data.source={one.source}"
        require(
            one.glob is None or (bool(one.glob) and one.source == "path"),
            f"{place}: the pattern is empty, or the source is not a folder of text files. Use source path, or no glob.",
        )
    require(
        not cfg.skip or any(one.source == "path" for one in sources),
        "data.skip=true is for the files of folders, but no source is a folder. Use data.source=path, or remove it.",
    )


def _check_triples(cfg: DataConfig) -> None:
    shown = list(cfg.triple_parts)
    require(
        cfg.has_triples or cfg.triple_parts == DataConfig.triple_parts,
        f"data.triple_parts={shown} is for texts with triples, but no source has any. Use data.source=triples, or "
        f"leave data.triple_parts out.",
    )
    require(
        bool(shown) and len({*shown}) == len(shown),
        f"data.triple_parts={shown} is empty, or names a part twice. Name each part to hide once.",
    )
    require(
        not cfg.has_triples or not cfg.domains,
        f"data.domains={list(cfg.domains)} are found by the names of documents, which data.source=triples does not "
        f"have. Remove data.domains.",
    )


def _check_denoisers(data: DataConfig) -> None:
    """Checks the keys of the group `data` that are for encoder-decoders.

    Raises:
      ConfigError: they do not fit each other.
    """
    names = [one.source for one in data.mixture or (data,)]
    shown = list(data.denoisers)
    texts_only = not {"pairs", *PICTURES} & {*names}
    require(
        not texts_only or not data.languages,
        f"data.languages={list(data.languages)} is for translations and for names of pictures, but data.source="
        f"{names[0]} has neither. Remove it, or use data.source=pairs.",
    )
    require(
        len({*data.languages}) == len(data.languages),
        f"data.languages={list(data.languages)} names a language twice. Name each once.",
    )
    require(
        bool(data.denoisers) or not texts_only or data.target_len is None,
        f"data.target_len={data.target_len} is for data.denoisers or data.source=pairs. Remove it, or set one of them.",
    )
    if not data.denoisers:
        return
    whole = [name for name in names if name in (*TEMPLATED, "labels")]
    require(
        not whole,
        f"data.denoisers={shown} hides spans of texts, which data.source={''.join(whole[:1])} does not have. Use "
        f"data.source=path.",
    )
    require(
        {*names} != {"pairs"},
        f"data.denoisers={shown} hides spans of texts, but data.source=pairs has translations. Remove data.denoisers.",
    )
    require(
        not data.packing,
        f"data.denoisers={shown} hides spans of rows that span documents, and data.packing=true would part them. Use "
        f"data.packing=false.",
    )
    require(
        not data.domains,
        f"data.denoisers={shown} makes rows that span documents, but data.domains={list(data.domains)} chooses experts "
        f"by document. Use one of the two.",
    )
    for each in data.denoisers:
        require(
            each.mode is None or bool(each.mode.strip()),
            f"data.denoisers={shown} has an empty mode. Name a token such as [R], or leave it null.",
        )
        each.text_length(data.seq_len, data.target_len)
