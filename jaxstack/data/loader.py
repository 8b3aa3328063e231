"""The batches of a run: each process reads the rows of a batch that its devices hold."""

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TypeAlias

import jax
import numpy as np

from jaxstack import data
from jaxstack.checkpoint.run_dir import Metadata
from jaxstack.common.counts import plural
from jaxstack.common.tree import Batch
from jaxstack.config import Config, ConfigError, DataConfig, ModelConfig
from jaxstack.config.reading.parse import from_values
from jaxstack.data.buckets import BucketReader, held_out_batches, whole_documents
from jaxstack.data.captions import CaptionedImageReader, CaptionReader
from jaxstack.data.dataset import source_names
from jaxstack.data.images import ImageReader, Images, PictureReader
from jaxstack.data.masking import BranchWindows, Masking, Words, WordsAndPhrases
from jaxstack.data.mixture import WindowSizes
from jaxstack.data.phrases import Phrases, read_phrases
from jaxstack.data.position import Position, SourceRecord, Start, continue_source
from jaxstack.data.sentences import SentenceTasks
from jaxstack.data.spans import SpanCorruption
from jaxstack.data.tokenizers import Tokenizer
from jaxstack.data.windows import full_windows
from jaxstack.runtime import distributed


class HeldOut:
    """The held-out batches of a source.

    Attributes:
      name: name of the source.
      share: its weight in the held-out loss of the run; the sum over all sources is 1.
      local_batches: this process's rows of the batches.
      batches: all rows of the batches, read when needed.
    """

    def __init__(
        self,
        source: data.Source,
        share: float,
        tokenizer: Tokenizer,
        model: ModelConfig,
        keys: DataConfig,
        steps: int,
        sharding: jax.sharding.Sharding,
    ) -> None:
        """Reads this process's rows of the first `steps` held-out batches of a source.

        Raises:
          ConfigError: an encoder has no hidden token to evaluate.
        """
        rows = rows_by_length(keys, sharding)
        self.name = source.name
        self.share = share
        self._tokenizer = tokenizer
        judged = any(one.source in ("preferences", "prompts") for one in keys.single_sources())
        self._reads_text = model.family == "decoder" and not judged
        if isinstance(source.eval, Images):
            reader = picture_reader(model, source.eval, keys.batch_size)
            self.local_batches = [*reader.batches(rows[0], steps)]
            self.batches = reader.batches(count=steps)
            return
        text = _documents(keys, source.eval)
        if keys.buckets:
            buckets = bucket_sizes(keys)
            self.local_batches = [*held_out_batches(text, buckets, steps, rows)]
            self.batches = held_out_batches(text, buckets, steps)
            return
        sizes = window_sizes(model, keys, tokenizer)
        self.local_batches = [*data.eval_batches(text, steps=steps, rows=rows[0], **sizes)]
        self.batches = data.eval_batches(text, steps=steps, **sizes)
        weights = "masked_weights" if model.family == "branches" else "loss_weights"
        if sizes.get("masking") is not None and not any(batch[weights].any() for batch in self.batches):
            raise ConfigError(
                f"data.mask_share={keys.mask_share} hides none of the held-out tokens of {source.name}. "
                f"Raise data.mask_share, data.eval_fraction or train.eval_steps."
            )

    @cached_property
    def bytes_per_token(self) -> float:
        """The mean number of bytes of the targets that have a loss weight above 0.

        NaN if the ids do not say, and where hidden tokens or labels are learned: their loss does not encode a text.
        """
        if not self._reads_text or not self._tokenizer.keeps_text:
            return math.nan
        targets = [batch["targets"][batch["loss_weights"] > 0] for batch in self.batches]
        return sum(map(self._tokenizer.num_bytes, targets)) / sum(each.size for each in targets) or math.nan


def _documents(keys: DataConfig, text: data.Tokens) -> data.Tokens:
    """Returns the text of a source, as documents that are never cut if rows have complete documents."""
    return whole_documents(text, keys.seq_len) if keys.keeps_documents else text


def rows_by_length(keys: DataConfig, sharding: jax.sharding.Sharding) -> list[np.ndarray]:
    """Returns the rows of a batch that this process reads, for each length of rows."""
    counts = [keys.with_length(length).batch_size for length in keys.lengths]
    return [distributed.local_rows(sharding, count) for count in counts]


def bucket_sizes(keys: DataConfig) -> list[WindowSizes]:
    """Returns how many rows of which length the batches of each bucket have."""
    each = [keys.with_length(length) for length in keys.lengths]
    return [WindowSizes(seq_len=one.seq_len, batch_size=one.batch_size, packing=False) for one in each]


def window_sizes(model: ModelConfig, keys: DataConfig, tokenizer: Tokenizer | None = None) -> WindowSizes:
    """Returns how the texts of a run are cut into batches; the tokenizer is for masks of words, and for spans."""
    masking: Masking | BranchWindows | SpanCorruption | None = None
    seq_len = keys.seq_len
    sentences = None
    if model.masks_tokens:
        assert keys.mask_id is not None, "mask_id is filled from the tokenizer"
        branches = model.branches if model.family == "branches" else None
        windows = branches.rates[0] if branches else 1
        tasks = model.sentences
        sentences = SentenceTasks.of(tasks, seq_len, windows, tokenizer, model.token_types)
        never = () if tokenizer is None else (*tokenizer.before, *tokenizer.after)
        masking = hidden = Masking(
            keys.mask_share,
            keys.mask_id,
            model.vocab,
            _hidden_units(keys, tokenizer, model.vocab),
            never,
            keys.triple_parts,
            keys.has_triples,
        )
        if branches:
            masking = BranchWindows(hidden, branches.rates, tasks.tasks)
            seq_len *= branches.windows
    if keys.denoisers:
        assert tokenizer is not None
        masking = spans = SpanCorruption.of(keys, tokenizer)
        seq_len = spans.text_len
    return WindowSizes(
        seq_len=seq_len,
        batch_size=keys.batch_size,
        packing=bool(keys.packing),
        masking=masking,
        sentences=sentences,
    )


def _hidden_units(keys: DataConfig, tokenizer: Tokenizer | None, size: int) -> Words | WordsAndPhrases | None:
    """Returns what is hidden whole, words or phrases; `None` means that tokens are hidden one at a time."""
    if not (keys.mask_words or keys.mask_phrases):
        return None
    assert tokenizer is not None
    if not keys.mask_phrases:
        return Words.of(tokenizer, size)
    knows_text = keys.mask_words or tokenizer.name != "ids"
    words = Words.of(tokenizer, size) if knows_text else None
    phrases = Phrases.of(read_phrases(keys.mask_phrases), tokenizer, keys.seq_len, size)
    return WordsAndPhrases(words, keys.mask_words, phrases)


def picture_reader(model: ModelConfig, images: Images, batch_size: int, seed: int | None = None) -> PictureReader:
    """Returns the reader of training pictures; without a seed of held-out ones: always the same, with classes.

    Weights of salient regions are for training: held-out losses of runs with and without them can be compared.
    """
    shuffle = seed is not None
    assert model.pictures is not None
    shared = images, seed or 0, batch_size, model.pictures.patch_size
    if model.family == "contrastive":
        return CaptionReader(*shared, shuffle=shuffle, translations=model.contrastive.translations)
    dropped = model.diffusion.class_dropout if shuffle else 0.0
    timed = *shared, model.moe.max_timestep, model.vocab, dropped
    if images.captions is None:
        return ImageReader(*timed, shuffle=shuffle)
    return CaptionedImageReader(
        *timed,
        shuffle=shuffle,
        marks_keys=model.diffusion.key_weight > 0,
        salient_weight=model.diffusion.salient_weight if shuffle else 0.0,
    )


def position_without_record(index: int, metadata: Metadata, dataset: data.Dataset, eval_fraction: float) -> Position:
    """Returns the position of a checkpoint of a version that saved the index of the next batch alone.

    That version read all sources of a mixture in the order of the first one. An epoch of a text that is cut had only
    the windows that are permuted.
    """
    cfg = from_values(metadata["config"])
    names = source_names(cfg.data)
    now = [one.name for one in dataset.sources]
    if len(names) != len(now) or (len(names) > 1 and names != now):
        return Position(start_batch=0, start_read=[], read=[[]], sources=[], orders=[[]])
    same = metadata["data"] == dataset.fingerprint
    if cfg.data.eval_fraction != eval_fraction:
        dataset = data.load_for(cfg.model, cfg.data, cfg.aim)
    records = [
        SourceRecord(name=name, text=one.fingerprint if same else "")
        for name, one in zip(names, dataset.sources, strict=True)
    ]
    reader = make_reader(cfg.model, cfg.data, dataset, cfg.run.seed)
    read = reader.read_before(index)
    orders = reader.orders()
    texts = [] if isinstance(dataset.train, Images) else [_documents(cfg.data, text) for text in dataset.training_texts]
    for counts, bucket in zip(read, orders, strict=True):
        for k, text in enumerate(texts):
            order = bucket[k]
            if order is None:
                continue
            order["place in the mixture"] = 0
            if text.loss_mask is None:
                length = order["tokens of a row"]
                windows = order["sequences of a pass"]
                assert length is not None
                assert windows is not None
                passes, rest = divmod(counts[k], full_windows(len(text), length, bool(order["data.packing"])))
                counts[k] = passes * windows + rest
    return Position(start_batch=0, start_read=[], read=read, sources=records, orders=orders)


def check_documents(batch: data.Batch, most: int | None, where: str) -> None:
    """Checks that no row has more documents than `data.max_documents`; padding counts as one.

    Args:
      most: the key; `None` means no limit.
      where: names the batch in the error.

    Raises:
      ConfigError: a row has more.
    """
    for name, ids_BS in batch.items():
        if most is None or not name.endswith("segment_ids"):
            continue
        count_B = 1 + (ids_BS[:, 1:] != ids_BS[:, :-1]).sum(1)
        if (largest := int(count_B.max())) > most:
            raise ConfigError(
                f"{where} has a row of {plural(largest, 'document')}, but data.max_documents={most}.",
                "Raise it and continue the run, or leave it out: attention then runs as another kernel.",
            )


Reader: TypeAlias = "data.MixtureReader | PictureReader | BucketReader"


def make_reader(model: ModelConfig, keys: DataConfig, dataset: data.Dataset, seed: int) -> Reader:
    """Returns the reader of the training batches of a run, from the first one on."""
    if isinstance(dataset.train, Images):
        return picture_reader(model, dataset.train, keys.batch_size, seed)
    texts = [_documents(keys, text) for text in dataset.training_texts]
    names = [one.name for one in dataset.sources]
    weights = keys.weights()
    if keys.buckets:
        return BucketReader(texts, names, weights, bucket_sizes(keys), seed)
    return data.MixtureReader(texts, names, weights, window_sizes(model, keys, dataset.tokenizer), seed)


class DataLoader:
    """Reads training batches by their index, and the held-out batches.

    A training batch depends only on the seed and its index, as long as batches have the size that they had at the
    beginning of the run. A checkpoint stores the index, and the `Position` for when they do not.

    Attributes:
      held_out: the held-out batches of each source.
    """

    def __init__(self, cfg: Config, dataset: data.Dataset, sharding: jax.sharding.Sharding) -> None:
        """Prepares to read batches; only the held-out ones are read at once."""
        self._keys = keys = cfg.read_data
        self._steps = cfg.train.steps
        self._prompts = cfg.learned_rewards is not None
        self._dataset = dataset
        self._sharding = sharding
        local = rows_by_length(keys, sharding)
        counts = [keys.with_length(length).batch_size for length in keys.lengths]
        self._local_rows = {rows.size: (rows, count) for rows, count in zip(local, counts, strict=True)}
        self._records = [SourceRecord(name=one.name, text=one.fingerprint) for one in dataset.sources]
        self._set_reader(make_reader(cfg.model, keys, dataset, cfg.run.seed), Start())
        self.held_out = [
            HeldOut(source, share, dataset.tokenizer, cfg.model, keys, cfg.train.eval_steps, sharding)
            for source, share in zip(dataset.sources, dataset.shares, strict=True)
        ]
        for one in self.held_out:
            for batch in one.local_batches:
                check_documents(batch, cfg.data.known_documents, f"a held-out batch of {one.name}")

    def _set_reader(self, reader: Reader, start: Start) -> None:
        """Reads training batches with a reader that has this start."""
        self._reader = reader
        self._start = start
        rows = rows_by_length(self._keys, self._sharding)
        self._batches = reader.batches(rows) if isinstance(reader, BucketReader) else reader.batches(rows[0])

    def position(self, index: int) -> Position:
        """Returns what a checkpoint saves of the data before the batch with this index."""
        return Position(
            start_batch=self._start.batch,
            start_read=[[*counts] for counts in self._start.read],
            read=self._reader.read_before(index),
            sources=self._records,
            orders=self._reader.orders(),
        )

    def resume(self, index: int, metadata: Metadata) -> list[str]:
        """Continues a run at a batch, behind the sequences that were read before a checkpoint.

        If batches are as they were, nothing changes. Call it before batches are read.

        Returns:
          Lines for users: what is left out of a source that cannot continue where it was.
        """
        saved: Position = metadata.get("position") or position_without_record(
            index, metadata, self._dataset, self._keys.eval_fraction
        )
        orders = self._reader.orders()
        if saved["sources"] == self._records and saved["orders"] == orders:
            start = Start(saved["start_batch"], saved["start_read"])
            reader = self._reader.with_start(start)
            if reader.read_before(index) == saved["read"]:
                self._set_reader(reader, start)
                return []
        each = [
            continue_source(record, [bucket[k] for bucket in orders], saved) for k, record in enumerate(self._records)
        ]
        start = Start(index, [[one.read[j] for one in each] for j in range(len(orders))])
        self._set_reader(self._reader.with_start(start), start)
        return [one.note for one in each if one.note]

    @cached_property
    def held_out_bytes_per_token(self) -> float:
        """The mean number of bytes of a held-out target, in which each source has its share. NaN if one is unknown."""
        return sum(one.share * one.bytes_per_token for one in self.held_out if one.share)

    def mean_loss(self, losses: Mapping[str, float]) -> float:
        """Returns the held-out loss of the run: the mean of the sources' losses, weighted by their shares."""
        return sum(one.share * losses[one.name] for one in self.held_out if one.share)

    def describe_sources(self) -> list[str]:
        """Returns a line about the buckets, if rows have several lengths, and one for each source of a mixture.

        The latter has its text, its weights and how often the run reads it.
        """
        lines = self._reader.describe_buckets() if isinstance(self._reader, BucketReader) else []
        if (most := self._keys.known_documents) is not None:
            lines.append(f"rows of at most {plural(most, 'document', spec=',')}")
        if len(self.held_out) == 1:
            return lines
        steps = self._steps
        passes = self._reader.passes(steps)
        for i, source in enumerate(self._dataset.sources):
            weights = " then ".join(
                f"{each[i] / sum(each):.3g}"
                + (f" from step {step:,} on" if step else "")
                + (" (after the last step)" if step >= steps else "")
                for step, each in self._dataset.weights
            )
            lines.append(f"{source.name}: share {weights}, read {passes[i]:,.2f} times; {source.description}")
        return lines

    def iterate(self, first: int, count: int) -> Iterator[data.Batch]:
        """Yields this process's rows of `count` batches from index `first` on. A thread reads ahead."""
        for index, batch in data.prefetch(self._batches.slice(slice(first + count)), first):
            check_documents(batch, self._keys.known_documents, f"batch {index}")
            yield batch

    def read(self, index: int) -> data.Batch:
        """Returns this process's rows of the batch with this index."""
        batch: data.Batch = self._batches[index]
        return batch

    def first_batches(self, count: int) -> Iterator[data.Batch]:
        """Returns an iterator over all rows of the first `count` batches.

        If the run had batches of other sizes before, these are as many batches of the present size as have the same
        number of sequences, from the beginning of the text.
        """
        sizes = [self._keys.with_length(length).batch_size for length in self._keys.lengths]
        read = self._reader.read_before(count)
        same = round(sum(sum(counts) / size for counts, size in zip(read, sizes, strict=True)))
        batches = self._reader.with_start(Start()).batches()
        return (batches[i] for i in range(same if self._start.batch else count))

    def to_devices(self, batch: data.Batch) -> Batch:
        """Returns the global batch on the devices, from the rows that each process has read."""
        rows, count = self._local_rows[len(next(iter(batch.values())))]
        return distributed.to_global_batch(batch, self._sharding, rows, count)

    def lengths(self, first: int, end: int) -> list[int]:
        """Returns the lengths of rows that the batches from index `first` to `end` have, in the order of first use."""
        if isinstance(self._reader, BucketReader):
            return self._reader.buckets(first, end)
        return [self._keys.seq_len]

    @property
    def held_out_lengths(self) -> list[int]:
        """The lengths of rows that held-out batches have."""
        tokens = self._keys.batch_size * self._keys.seq_len
        sizes = {len(next(iter(batch.values()))) for one in self.held_out for batch in one.local_batches}
        return sorted(tokens // self._local_rows[size][1] for size in sizes)

    def row_figures(self, index: int) -> dict[str, float]:
        """Returns for the log of a batch: `bucket`, the length of its rows, if they vary, and `padding`, its share."""
        return {} if self._prompts else self._reader.row_figures(index)

    def describe_batch(self, index: int) -> str:
        """Returns one line that lists where a batch was read."""
        return self._reader.describe(index)
