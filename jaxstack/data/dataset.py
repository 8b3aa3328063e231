"""Loads the sources of a run: tokens of the training text and of the held-out text, and the tokenizer of both."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jaxstack.common.counts import plural
from jaxstack.config import Config, ConfigError, DataConfig, ModelConfig, resolve
from jaxstack.config.data import TEMPLATED
from jaxstack.config.pictures import PICTURES
from jaxstack.config.training import Completions, PreferenceConfig, RLConfig
from jaxstack.data import chat, labelled, pairs, sources, triples
from jaxstack.data.binary import BinaryFile, open_binary, recognize
from jaxstack.data.buckets import choose_lengths
from jaxstack.data.captions import class_texts, encode_captions
from jaxstack.data.conversations import read_conversations
from jaxstack.data.images import Images, fingerprint, read_images, split_images
from jaxstack.data.labelled import Labels, labels_of
from jaxstack.data.own_captions import read_own_captions
from jaxstack.data.preferences import (
    Feedback,
    Preference,
    as_feedback,
    as_pairs,
    encode_preferences,
    mismatch,
    prompt_text,
    read_preferences,
)
from jaxstack.data.rewarded import PromptTokens, encode_prompts, read_prompts
from jaxstack.data.seq2seq import SpecialIds, ids_of, special_ids
from jaxstack.data.sources import documents
from jaxstack.data.tokenizers import ClassNames, Tokenizer, make_tokenizer, same_vocabulary
from jaxstack.data.tokens import Tokens, assign_domains, encode, read_header, read_token_file, split
from jaxstack.data.translations import read_translations


@dataclass(frozen=True)
class Source:
    """The training text and the held-out text of one source, or its pictures."""

    name: str
    """Name in metrics, on the screen and in reports."""
    train: Tokens | Images
    eval: Tokens | Images
    description: str
    """For users: `Python 3.11 standard library: 1,021 files, 11.4 MB train, 1.2 MB held out`."""
    fingerprint: str
    """SHA-256 of all ids, or of all pixels. It identifies the text and the tokenizer, or the pictures."""


@dataclass(frozen=True)
class Dataset:
    """The sources of a run, one or several, and the tokenizer that they share."""

    tokenizer: Tokenizer
    sources: tuple[Source, ...]
    weights: tuple[tuple[int, tuple[float, ...]], ...] = ((0, (1.0,)),)
    """Steps from which weights of the sources hold, with the weights."""

    special: SpecialIds | None = None
    """Special ids of an encoder-decoder, in addition to the ids of texts."""
    buckets: tuple[int, ...] = ()
    """Lengths of rows, for `data.buckets=auto`."""

    @property
    def vocab_size(self) -> int:
        """The number of ids that the model predicts: the ids of the tokenizer, and special ids."""
        return self.tokenizer.vocab_size if self.special is None else self.special.size

    @property
    def train(self) -> Tokens | Images:
        """The training text of the first source, which is the only one without a mixture."""
        return self.sources[0].train

    @property
    def eval(self) -> Tokens | Images:
        """The held-out text of the first source, which is the only one without a mixture."""
        return self.sources[0].eval

    @property
    def description(self) -> str:
        """For users: the description of the only source, or the number of sources."""
        return (
            self.sources[0].description
            if len(self.sources) == 1
            else f"a mixture of {plural(len(self.sources), 'source')}"
        )

    @property
    def fingerprint(self) -> str:
        """Identifies all texts and the tokenizer."""
        if len(self.sources) == 1:
            return self.sources[0].fingerprint
        return hashlib.sha256("".join(source.fingerprint for source in self.sources).encode()).hexdigest()

    @property
    def training_texts(self) -> Iterator[Tokens]:
        """Yields the training text of each source; pictures are not texts."""
        return (one.train for one in self.sources if isinstance(one.train, Tokens))

    @property
    def held_out_texts(self) -> Iterator[Tokens]:
        """Yields the held-out text of each source; pictures are not texts."""
        return (one.eval for one in self.sources if isinstance(one.eval, Tokens))

    @property
    def image(self) -> tuple[int, ...]:
        """Height, width and channels of the pictures; empty for texts."""
        return self.train.pixels.shape[1:] if isinstance(self.train, Images) else ()

    @property
    def shares(self) -> tuple[float, ...]:
        """The relative weight of each source at the beginning, which is also its weight in the held-out loss."""
        weights = self.weights[0][1]
        return tuple(weight / sum(weights) for weight in weights)


def load(
    cfg: DataConfig, labels: Labels | None = None, captions: bool = False, reads: Completions = "pairs"
) -> Dataset:
    """Returns the tokens of a configuration's source or sources, with a part of each held out.

    Text is encoded in memory; a token file stays on disk. A token file determines its own tokenizer.

    Args:
      labels: the labels that the model predicts, see `labelled.labels_of`. `None` means that it predicts tokens.
      captions: whether pictures have texts, see `ModelConfig.reads_captions`.
      reads: what the source `preferences` has, see `PreferenceConfig.reads`.

    Raises:
      ConfigError: there is no text to read, a file is not text, a token file is damaged, or the sources of a mixture
        have different tokenizers.
    """
    if cfg.source == "captions":
        return _load_own_captions(cfg)
    if cfg.source in PICTURES:
        return _load_captions(cfg) if captions else _load_images(cfg)
    parts = [*cfg.single_sources()]
    names = source_names(cfg)
    opened = {i: _open(part) for i, part in enumerate(parts) if part.source == "tokens"}
    texts = [part for i, part in enumerate(parts) if i not in opened]
    tokenizer = _make_tokenizer(texts, cfg, labels) if texts else opened[0].tokenizer
    for i, file in opened.items():
        if not same_vocabulary(file.tokenizer.to_json(), tokenizer.to_json()):
            raise ConfigError(
                f"data.mixture: {names[i]} was made with the tokenizer {file.tokenizer.name}, but other sources use "
                f"{tokenizer.name}. Use one tokenizer for all: set data.tokenizer, or build the token files again."
            )
    special = ids_of(cfg, tokenizer)
    found = []
    for i, (name, part) in enumerate(zip(names, parts, strict=True)):
        try:
            if i in opened:
                found.append(_finish(name, part, opened[i]))
            elif part.source == "pairs":
                assert special is not None
                found.append(_encode_pairs(name, part, tokenizer, special))
            else:
                found.append(_encode(name, part, tokenizer, labels, reads))
        except ConfigError as error:
            if not cfg.mixture:
                raise
            raise ConfigError(f"data.mixture, {name}: {error}", error.advice) from None
    buckets: tuple[int, ...] = ()
    if cfg.buckets == "auto":
        buckets = choose_lengths(cfg, [one.train for one in found if isinstance(one.train, Tokens)])
    return Dataset(tokenizer, tuple(found), tuple(cfg.weights()), special, buckets)


def source_names(cfg: DataConfig) -> list[str]:
    """Returns the names of the sources of a configuration."""
    return [one.label for one in cfg.mixture] or [sources.describe(cfg)]


def load_for(model: ModelConfig, keys: DataConfig, aim: PreferenceConfig | RLConfig | None = None) -> Dataset:
    """Returns the data of a run, as its model and what it learns read them; see `load` and `Groups.aim`.

    `keys` is the group `data`.
    """
    reads = aim.reads if isinstance(aim, PreferenceConfig) else "pairs"
    return load(keys, labels_of(model), model.reads_captions, reads)


def resolve_from_data(cfg: Config) -> Config:
    """Returns the configuration with the values that depend on data, which is read if it does not have them all.

    Raises:
      ConfigError: see `load` and `config.resolve`.
    """
    if cfg.model.vocab_size and (cfg.model.pictures is None or cfg.model.pictures.image):
        return resolve(cfg, None)
    dataset = load_for(cfg.model, cfg.data, cfg.aim)
    return resolve(cfg, dataset.vocab_size, dataset.image, dataset.buckets)


def _load_images(cfg: DataConfig) -> Dataset:
    """Returns pictures, some of which are held out, with the names of their classes in place of a tokenizer."""
    images, classes = read_images(cfg)
    train, held_out = split_images(images, cfg.eval_fraction)
    height, width, channels = classes.image
    text = (
        f"{sources.describe(cfg)}: pictures of {height}x{width}x{channels} in {plural(len(classes.names), 'class')}, "
        f"{len(train):,} train, {len(held_out):,} held out"
    )
    return Dataset(classes, (Source(sources.describe(cfg), train, held_out, text, fingerprint(images)),))


def _load_captions(cfg: DataConfig) -> Dataset:
    """Returns pictures with texts of their classes, some of which are held out, and the tokenizer of the texts."""
    pictures = _load_images(cfg)
    assert isinstance(pictures.tokenizer, ClassNames)
    texts = class_texts(cfg, pictures.tokenizer.names)
    tokenizer = make_tokenizer(cfg.tokenizer, [text for each in texts for text in each], None, cfg.special_tokens)
    special = special_ids(tokenizer)
    captions = encode_captions(texts, tokenizer, special, cfg.target_length)
    (source,) = pictures.sources
    assert isinstance(source.train, Images)
    assert isinstance(source.eval, Images)
    train = replace(source.train, captions=captions)
    held_out = replace(source.eval, captions=captions)
    text = f"{source.description}, named in {_format_count(len(texts), 'language')}"
    texts_sha = hashlib.sha256((source.fingerprint + fingerprint(train)).encode()).hexdigest()
    return Dataset(tokenizer, (Source(source.name, train, held_out, text, texts_sha),), special=special)


def _load_own_captions(cfg: DataConfig) -> Dataset:
    """Returns pictures with texts of their own, some of which are held out, and the tokenizer of the texts."""
    found = read_own_captions(cfg)
    texts = found.of_language()
    tokenizer = make_tokenizer(cfg.tokenizer, [text for each in texts for text in each], None, cfg.special_tokens)
    special = special_ids(tokenizer)
    captions = encode_captions(texts, tokenizer, special, cfg.target_length)
    keys = found.key_tokens(tokenizer, cfg.target_length, cfg.key_words)
    images = replace(found.images, captions=captions, key_tokens=keys)
    train, held_out = split_images(images, cfg.eval_fraction)
    height, width, channels = images.pixels.shape[1:]
    text = (
        f"{sources.describe(cfg)}: pictures of {height}x{width}x{channels} with "
        f"{plural(len(found.texts), 'different text', spec=',')} in {_format_count(len(texts), 'language')}, "
        f"{len(train):,} train, {len(held_out):,} held out"
    )
    source = Source(sources.describe(cfg), train, held_out, text, fingerprint(images))
    return Dataset(tokenizer, (source,), special=special)


def _open(cfg: DataConfig) -> BinaryFile:
    """Opens a token file, and checks that its tokenizer is the one that `data.tokenizer` names."""
    if cfg.format != "jaxstack":
        return open_binary(cfg)
    if (found := recognize(Path(str(cfg.path)))) not in (None, "jaxstack"):
        raise ConfigError(f"data.path={cfg.path} has the format {found}. Use --data.format={found}.")
    tokens, tokenizer = read_token_file(str(cfg.path))
    if cfg.tokenizer != DataConfig.tokenizer and not _is_named(tokenizer, cfg.tokenizer):
        raise ConfigError(
            f"data.tokenizer={cfg.tokenizer}, but data.path={cfg.path} was made with {tokenizer.name}. Build the "
            f"file again with `jaxstack data build --data.tokenizer={cfg.tokenizer}`, or use "
            f"--data.tokenizer={tokenizer.name}."
        )
    if not cfg.special_tokens and (tokenizer.before or tokenizer.after):
        raise ConfigError(
            f"data.special_tokens=false, but the texts of data.path={cfg.path} have special tokens around them. Build "
            f"the file again with `jaxstack data build --data.special_tokens=false`, or leave the key out."
        )
    return BinaryFile(tokens, None, tokenizer, read_header(str(cfg.path)).sha256["bin"])


def _is_named(tokenizer: Tokenizer, name: str) -> bool:
    """Returns whether `data.tokenizer` names a tokenizer, or a file with the same vocabulary in another place."""
    if name == tokenizer.name:
        return True
    return Path(name).is_file() and same_vocabulary(make_tokenizer(name, ()).to_json(), tokenizer.to_json())


def _finish(name: str, cfg: DataConfig, file: BinaryFile) -> Source:
    """Returns the source of a token file. The end is held out, or documents, unless the file has its own such part."""
    train, held_out = (file.train, file.held_out) if file.held_out else split(file.train, cfg.eval_fraction)
    count = _format_count(file.train.starts.size, "document")
    sizes = _format_sizes(train, held_out, file.tokenizer)
    return Source(name, train, held_out, f"{cfg.path}: {count}, {sizes}", file.fingerprint)


def _make_tokenizer(texts: Sequence[DataConfig], cfg: DataConfig, labels: Labels | None) -> Tokenizer:
    """Returns the tokenizer of sources that are text. `chars` has the characters of all of them."""
    with_template = any(one.source in TEMPLATED for one in texts)
    saved = chat.read_template(cfg.tokenizer) if with_template else None

    def read() -> Iterator[str]:
        for one in texts:
            if one.source == "pairs":
                for pair in read_translations(str(one.path), one.languages, Counter()):
                    yield from (pair.source, pair.target)
                continue
            if one.source in TEMPLATED:
                yield from _rendered_texts(one)
                continue
            if one.source == "triples":
                for row in triples.read_triples(str(one.path)):
                    yield "\n".join([*row.parts, ""])
                continue
            yield from (part.text for part in _examples(one, labels) or documents(one))

    return make_tokenizer(cfg.tokenizer, read(), saved, cfg.special_tokens)


def _encode(name: str, cfg: DataConfig, tokenizer: Tokenizer, labels: Labels | None, reads: Completions) -> Source:
    """Returns a source of text, conversations or texts with labels, encoded in memory."""
    if cfg.source == "chat":
        return _encode_chat(name, cfg, tokenizer)
    if cfg.source == "preferences":
        return _encode_preferences(name, cfg, tokenizer, reads)
    if cfg.source == "prompts":
        return _encode_prompts(name, cfg, tokenizer)
    if cfg.source == "triples":
        return _encode_triples(name, cfg, tokenizer)
    if examples := _examples(cfg, labels):
        return _encode_labels(name, cfg, tokenizer, examples)
    skipped: list[str] = []
    tokens = encode(documents(cfg, skipped), tokenizer)
    fingerprint = hashlib.sha256(np.asarray(tokens.ids).data).hexdigest()
    if cfg.domains:
        tokens = assign_domains(tokens, cfg.domains)
    train, held_out = split(tokens, cfg.eval_fraction)
    count = _format_count(tokens.starts.size, "document" if cfg.source == "hf" else "file")
    count += f" ({sources.describe_skipped(cfg, skipped)})" if skipped else ""
    sizes = _format_sizes(train, held_out, tokenizer)
    return Source(name, train, held_out, f"{sources.describe(cfg)}: {count}, {sizes}", fingerprint)


def _render(cfg: DataConfig, shapes: Counter[str] | None = None) -> Iterator[chat.RenderedConversation]:
    """Yields the conversations of a source as text, by the template of its tokenizer, and counts their shapes."""
    template = _template(cfg)
    for conversation in read_conversations(str(cfg.path)):
        if shapes is not None:
            shapes[conversation.shape] += 1
        yield from chat.render_conversations([conversation], template)


def _template(cfg: DataConfig) -> chat.ChatTemplate:
    """Returns the template of the tokenizer that `data.tokenizer` names."""
    saved = chat.read_template(cfg.tokenizer)
    if saved is None:
        return chat.PlainTemplate()
    return chat.JinjaTemplate(f"the chat template of {cfg.tokenizer}", saved)


def _rendered_texts(cfg: DataConfig) -> Iterator[str]:
    """Yields the texts of a source that a chat template renders."""
    if cfg.source == "prompts":
        template = _template(cfg)
        yield from (template.prompt(row.messages) for row in read_prompts(str(cfg.path)))
        return
    conversations = _render_preferences(cfg) if cfg.source == "preferences" else _render(cfg)
    yield from (part.text for part in conversations)


def _render_preferences(cfg: DataConfig) -> Iterator[chat.RenderedConversation]:
    """Yields both conversations of each pair of a source as text. Of a completion with a label, both are equal."""
    found = (
        one if isinstance(one, Preference) else Preference(one.name, one.prompt, one.completion, one.completion)
        for one in read_preferences(str(cfg.path))
    )
    return chat.render_conversations((side for one in found for side in one.conversations()), _template(cfg))


def _encode_preferences(name: str, cfg: DataConfig, tokenizer: Tokenizer, reads: Completions) -> Source:
    """Returns pairs of completions, or completions with labels. All of a prompt are held out, or none."""
    rows = read_preferences(str(cfg.path))
    found = _mismatched(as_feedback(rows), cfg.eval_fraction) if reads == "labels" else as_pairs(rows)
    tokens, prompts, note = encode_preferences(found, _template(cfg), tokenizer, cfg.seq_len, reads == "scores")
    assert tokens.loss_mask is not None
    content = [np.asarray(tokens.ids), tokens.middles, tokens.loss_mask]
    if tokens.wanted is not None:
        content.append(tokens.wanted)
    if tokens.margins is not None and tokens.margins.any():
        content.append(tokens.margins)
    fingerprint = hashlib.sha256(b"".join(each.tobytes() for each in content)).hexdigest()
    held_out_D = pairs.hold_out(prompts, cfg.eval_fraction, "prompt")
    train = tokens.documents(~held_out_D)
    held_out = tokens.documents(held_out_D)
    share = [] if reads == "scores" else [f"{tokens.loss_mask.mean():.0%} of the tokens in completions"]
    parts = [
        f"{train.starts.size:,} {'completions with labels' if reads == 'labels' else 'pairs of completions'} train, "
        f"{held_out.starts.size:,} held out",
        *([note] if note else []),
        *share,
    ]
    return Source(name, train, held_out, f"{cfg.path}: {', '.join(parts)}", fingerprint)


def _mismatched(rows: list[Feedback], fraction: float) -> list[Preference]:
    """Returns completions beside completions of other prompts.

    Nothing that is held out is beside what is trained on, or the other way round.
    """
    held_out_D = pairs.hold_out([prompt_text(one) for one in rows], fraction, "prompt")
    parts = ([one for one, held in zip(rows, held_out_D, strict=True) if held == part] for part in (False, True))
    return [one for part in parts for one in mismatch(part)]


def _encode_prompts(name: str, cfg: DataConfig, tokenizer: Tokenizer) -> Source:
    """Returns prompts whose completions are rewarded. Equal prompts are all held out, or none."""
    tokens, note = encode_prompts(read_prompts(str(cfg.path)), _template(cfg), tokenizer, cfg.seq_len)
    fields = repr([row.fields for row in tokens.rows]).encode()
    fingerprint = hashlib.sha256(np.asarray(tokens.ids).tobytes() + fields).hexdigest()
    held_out_D = held_out_prompts(tokens, cfg.eval_fraction)
    train = tokens.documents(~held_out_D)
    held_out = tokens.documents(held_out_D)
    parts = [
        f"{plural(train.starts.size, 'prompt', spec=',')} train, {held_out.starts.size:,} held out",
        *([note] if note else []),
    ]
    return Source(name, train, held_out, f"{cfg.path}: {', '.join(parts)}", fingerprint)


def held_out_prompts(tokens: PromptTokens, fraction: float) -> np.ndarray:
    """Returns which prompts are held out, bool [D]. A larger fraction holds out the same prompts, and others."""
    return pairs.hold_out([repr(row.messages) for row in tokens.rows], fraction, "prompt")


def _encode_chat(name: str, cfg: DataConfig, tokenizer: Tokenizer) -> Source:
    """Returns conversations. Only their answers are targets of the loss."""
    shapes: Counter[str] = Counter()
    tokens, note = chat.encode_conversations(_render(cfg, shapes), tokenizer, cfg.seq_len)
    assert tokens.loss_mask is not None
    fingerprint = hashlib.sha256(np.asarray(tokens.ids).tobytes() + tokens.loss_mask.tobytes()).hexdigest()
    train, held_out = split(tokens, cfg.eval_fraction)
    parts = [
        plural(tokens.starts.size, "conversation", spec=","),
        *(
            [f"of several shapes ({', '.join(f'{n:,} {shape}' for shape, n in shapes.items())})"]
            if len(shapes) > 1
            else []
        ),
        *([note] if note else []),
        _format_sizes(train, held_out, tokenizer),
        f"{tokens.loss_mask.mean():.0%} of the tokens in answers",
    ]
    return Source(name, train, held_out, f"{cfg.path}: {', '.join(parts)}", fingerprint)


def _examples(cfg: DataConfig, labels: Labels | None) -> Iterator[labelled.Example] | None:
    """Returns the texts of a source with labels, or `None` for another source."""
    if cfg.source != "labels":
        return None
    assert labels is not None, "the configuration requires model.labels with data.source=labels"
    return labelled.read_examples(str(cfg.path), labels)


def _encode_labels(name: str, cfg: DataConfig, tokenizer: Tokenizer, examples: Iterator[labelled.Example]) -> Source:
    """Returns texts whose labels are the targets of the loss."""
    tokens, note = labelled.encode_examples(examples, tokenizer, cfg.seq_len)
    assert tokens.labels is not None
    fingerprint = hashlib.sha256(np.asarray(tokens.ids).tobytes() + tokens.labels.tobytes()).hexdigest()
    train, held_out = split(tokens, cfg.eval_fraction)
    labels = _format_count(int((tokens.labels >= 0).sum()), "label")
    texts = f"{_format_count(tokens.starts.size, 'text')} with {labels}"
    parts = [texts, *([note] if note else []), _format_sizes(train, held_out, tokenizer)]
    return Source(name, train, held_out, f"{cfg.path}: {', '.join(parts)}", fingerprint)


def _encode_triples(name: str, cfg: DataConfig, tokenizer: Tokenizer) -> Source:
    """Returns texts with triples. Texts about the same head and tail are all held out, or none."""
    rows = [*triples.read_triples(str(cfg.path))]
    tokens, note = triples.encode_triples(rows, tokenizer, cfg.seq_len)
    assert tokens.parts is not None
    fingerprint = hashlib.sha256(np.asarray(tokens.ids).tobytes() + tokens.parts.tobytes()).hexdigest()
    held_out_D = pairs.hold_out(["\n".join(row.triple[::2]) for row in rows], cfg.eval_fraction, "triple")
    train = tokens.documents(~held_out_D)
    held_out = tokens.documents(held_out_D)
    parts = [
        f"{plural(train.starts.size, 'text', spec=',')} with triples train, {held_out.starts.size:,} held out",
        *([note] if note else []),
    ]
    return Source(name, train, held_out, f"{cfg.path}: {', '.join(parts)}", fingerprint)


def _encode_pairs(name: str, cfg: DataConfig, tokenizer: Tokenizer, special: SpecialIds) -> Source:
    """Returns texts and their translations. What is held out is held out in all languages."""
    left_out: Counter[str] = Counter()
    found = read_translations(str(cfg.path), cfg.languages, left_out)
    tokens, texts = pairs.encode_pairs(found, tokenizer, special, cfg, left_out)
    held_out_D = pairs.hold_out(texts, cfg.eval_fraction)
    train = tokens.documents(~held_out_D)
    held_out = tokens.documents(held_out_D)
    content = (tokens.ids, tokens.middles, *(() if tokens.domains is None else (tokens.domains,)))
    fingerprint = hashlib.sha256(b"".join(each.tobytes() for each in content)).hexdigest()
    parts = [
        _format_count(len(cfg.languages), "language"),
        f"{plural(train.starts.size, 'pair', spec=',')} train, {held_out.starts.size:,} held out",
        *([pairs.describe_left_out(left_out)] if left_out else []),
    ]
    return Source(name, train, held_out, f"{cfg.path}: {', '.join(parts)}", fingerprint)


def _format_count(count: int, kind: str) -> str:
    return f"{count:,} {kind}{'s' * (count != 1)}"


def _format_sizes(train: Tokens, held_out: Tokens, tokenizer: Tokenizer) -> str:
    """Returns the sizes of both texts in bytes or tokens, for users."""

    def size(tokens: Tokens) -> str:
        count = len(tokens)
        if tokenizer.name == "bytes":
            return f"{count / 1e6:,.1f} MB" if count >= 100_000 else plural(count, "byte", spec=",")
        return f"{count / 1e6:,.1f} M tokens" if count >= 1_000_000 else plural(count, "token", spec=",")

    return f"{size(train)} train, {size(held_out)} held out"
