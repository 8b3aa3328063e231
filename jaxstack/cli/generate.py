"""Continues prompts with the model of a run, or draws pictures. Arguments that are not given have the run's values.

On a terminal the text appears as its tokens come, with control characters escaped.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, get_type_hints

import numpy as np
from jsonargparse import Namespace

from jaxstack.common import files
from jaxstack.common.counts import plural
from jaxstack.config import Config, ConfigError, DataConfig, KernelsConfig, MeshConfig, SampleConfig, TrainConfig
from jaxstack.config.bounds import PositiveInt
from jaxstack.config.data import TEMPLATED
from jaxstack.config.reading.parse import Parser, user_path
from jaxstack.data import Tokenizer, chat
from jaxstack.data.captions import Given
from jaxstack.data.images import format_size, read_picture
from jaxstack.data.text_stream import TextStream
from jaxstack.data.tokenizers import HFTokenizer, describe_frame, encode_prompt
from jaxstack.generate.prompts import (
    begin_captions,
    check_prompts,
    require_captions,
    require_decoder,
    require_modules,
)
from jaxstack.loaded import load_run
from jaxstack.tracking.console import printable

if TYPE_CHECKING:  # JAX must start after the devices were chosen
    from jaxstack.loaded.trained_run import Draft
    from jaxstack.moe.placement import Placement

DTYPE = get_type_hints(TrainConfig)["dtype"]
OWN_DRAFT = "mtp"
"""The value of `--draft` for the module of the run itself. A run of this name is `./mtp`."""
DECODE_WEIGHTS = get_type_hints(KernelsConfig)["decode_weights"]


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    parser.add_argument("run", metavar="RUN", type=user_path, help="run directory")
    parser.add_argument(
        "prompts",
        metavar="PROMPT",
        type=str,
        nargs="+",
        help="text to continue; - reads one prompt per line from stdin; for a diffusion model, a class or a text; with "
        "--picture, the beginning of a caption, which may be empty quotes",
    )
    parser.add_argument(
        "--picture",
        metavar="PICTURE",
        action="append",
        default=[],
        help="PNG or JPEG file for which a contrastive model writes a caption; repeatable",
    )
    parser.add_argument("--chat", action="store_true", help="treat prompts as messages of a user and print the answers")
    parser.add_argument(
        "--stream", action="store_true", help="print tokens as they come, even if stdout is not a terminal"
    )
    parser.add_argument(
        "--draft",
        metavar="RUN",
        type=user_path,
        help="run of a small model that drafts tokens; mtp means RUN's own prediction module",
    )
    parser.add_argument("--draft_tokens", type=PositiveInt, default=4, help="number of tokens to draft at a time")
    parser.add_argument(
        "--expert_load",
        metavar="FILE",
        type=user_path,
        help="file to write the number of tokens of each expert to, for `jaxstack plan experts`",
    )
    parser.add_argument("--language", type=str, help="language that an encoder-decoder writes, if it has several")
    parser.add_argument("--out", type=user_path, help="PNG file for pictures; null means pictures.png in RUN")
    add_model_arguments(parser)


def add_model_arguments(parser: Parser) -> None:
    """Declares the arguments that say which model generates, how, and on which devices."""
    parser.add_argument("--step", type=int, help="step of the checkpoint; null means the newest")
    parser.add_argument("--seed", type=int, help="seed of sampling; null means run.seed of the run")
    parser.add_argument(
        "--dtype", type=DTYPE | None, help="dtype of the computation; null means train.dtype of the run"
    )
    parser.add_argument(
        "--decode_weights",
        type=DECODE_WEIGHTS | None,
        help="format of decoding weights; null: the run's",
    )
    parser.add_argument("--decode_group", type=PositiveInt | None, help="inputs that share a scale in --decode_weights")
    parser.add_argument(
        "--stop",
        metavar="TOKEN",
        action="append",
        default=[],
        help="text of one token that ends generation; repeatable",
    )
    parser.add_class_arguments(SampleConfig, "sample", skip={"prompts"}, instantiate=False)
    parser.set_defaults({f"sample.{f.name}": None for f in fields(SampleConfig) if f.name != "prompts"})
    parser.add_argument(
        "--placement",
        metavar="FILE",
        type=user_path,
        help="experts of each device, a file of plan experts",
    )
    parser.add_class_arguments(MeshConfig, "mesh")
    parser.set_defaults({"mesh.data": 1})  # one device; more share the prompts


def main(args: Namespace) -> None:
    """Prints the texts.

    Raises:
      ConfigError: the run cannot be read, or an argument does not suit it.
    """
    cfg, tokenizer = load_run.read_run(Path(args.run))
    if args.picture or (cfg.model.family == "contrastive" and cfg.model.contrastive.caption_layers):
        caption(args)
        return
    if cfg.model.family == "diffusion":
        draw(cfg, tokenizer, args)
        return
    if cfg.model.family == "encoder_decoder":
        translate(cfg, tokenizer, args)
        return
    require_decoder(cfg.model)
    if args.language is not None:
        raise ConfigError(f"--language={args.language} is for encoder-decoders. Leave it out.")
    if args.out is not None:
        raise ConfigError(f"--out={args.out} is for pictures, and {args.run} makes text. Remove --out.")
    prompts = read_prompts(args.prompts)
    ids, texts, stop = begin_texts(prompts, tokenizer, args, cfg.data)
    cfg = with_arguments(cfg, args)
    load = load_file(args, cfg.model.moe.num_experts, cfg.sample, len(prompts))
    check_prompts(cfg.model, ids, cfg.sample.tokens, cfg.model.vocab)
    if args.draft == OWN_DRAFT:
        require_modules(cfg.model.mtp, args.mesh.pipe)
    elif args.draft is not None:
        load_run.read_run(Path(args.draft))  # its mistakes are shown before the model is read, which takes longer
    longest = max(map(len, ids)) + cfg.sample.tokens
    rows = min(len(prompts), cfg.sample.rows or len(prompts))
    check = partial(check_memory, longest)
    run = load_run.open_run(
        Path(args.run), cfg, tokenizer, args.mesh, args.step, rows=rows, check=check, placement=args.placement
    )
    if longest > cfg.data.seq_len:
        print(
            f"note: texts have up to {plural(longest, 'token')}; the model was trained on {cfg.data.seq_len}",
            file=sys.stderr,
        )
    draft = open_draft(args, cfg.sample, cfg.train, longest) if args.draft is not None else None
    live = args.stream or sys.stdout.isatty()

    from jaxstack.planner import generation_memory, memory

    placement = run.context.placement
    with memory.explained(lambda: generation_memory.Demand.of(run.config, longest, placement).error()):
        for piece in in_turn(texts, run.stream_tokens(ids, stop=stop, draft=draft, at_once=not live)):
            write(piece, flush=live)
    write("\n")
    if load is not None:
        from jaxstack.moe.placement import write_load

        write_load(load, run.engine(cfg.sample.domain).counted["load"])


def template_of(cfg: DataConfig, tokenizer: Tokenizer) -> chat.ChatTemplate | None:
    """Returns the template of a run that was trained or imported with one, else `None`.

    Args:
      cfg: the data of the run.
    """
    saved = isinstance(tokenizer, HFTokenizer) and tokenizer.chat is not None
    trained = any(one.source in TEMPLATED for one in cfg.single_sources())
    return chat.template_for(tokenizer) if saved or trained else None


def require_template(run: Path | str, cfg: DataConfig, tokenizer: Tokenizer) -> chat.ChatTemplate:
    """Returns the template of a run, for `--chat`.

    Raises:
      ConfigError: the run has no template.
    """
    template = template_of(cfg, tokenizer)
    if template is None:
        raise ConfigError(
            f"--chat needs a chat template, which {run} does not have. Leave --chat out, or name a run that trained "
            f"with data.source=chat."
        )
    return template


def begin_texts(
    prompts: Sequence[str], tokenizer: Tokenizer, args: Namespace, cfg: DataConfig
) -> tuple[list[list[int]], list[TextStream], tuple[int, ...]]:
    """Returns the ids of prompts, the texts to which tokens are added, and the tokens that end a text.

    Args:
      cfg: the data of the run.

    Raises:
      ConfigError: the run has no chat template, or a text of `--stop` is not one token.
    """
    stop = stop_tokens(tokenizer, args.stop)
    if not args.chat:
        note_frame(tokenizer)
        return (
            [encode_prompt(tokenizer, prompt) for prompt in prompts],
            [TextStream(tokenizer, p) for p in prompts],
            stop,
        )
    template = require_template(args.run, cfg, tokenizer)  # it puts everything around the messages
    asked = [template.prompt([{"role": "user", "content": prompt}]) for prompt in prompts]
    turn = chat.end_of_turn(template, tokenizer)
    stop += turn.tokens
    ids = [tokenizer.encode(prompt).tolist() for prompt in asked]
    return ids, [TextStream(tokenizer, "", end=stop, stop=turn.texts) for _ in prompts], stop


def load_file(args: Namespace, experts: int, sample: SampleConfig, prompts: int) -> Path | None:
    """Returns the file for the load of the experts, if one is asked for.

    Args:
      experts: number of experts of the model.
      prompts: number of prompts.

    Raises:
      ConfigError: the file cannot be written, or the load is not counted.
    """
    if args.expert_load is None:
        return None
    flag = f"--expert_load={args.expert_load}"
    if not experts:
        raise ConfigError(f"{flag} needs experts, but the run has model.moe.num_experts=0. Remove --expert_load.")
    for name, wrong in (
        (f"sample.rows={sample.rows}", sample.rows is not None and prompts > sample.rows),
        (f"sample.beams={sample.beams}", sample.beams > 1),
        (f"--draft={args.draft}", args.draft is not None),
        ("sample.tokens=0", not sample.tokens),
    ):
        if wrong:
            raise ConfigError(f"{flag} counts the tokens of one batch, unlike {name}. Remove one of them.")
    return files.writable("--expert_load", args.expert_load, (".json",))


def open_draft(args: Namespace, sample: SampleConfig, train: TrainConfig, longest: int) -> "Draft":
    """Opens what `--draft` names: a small model gets the dtype and the mesh of the model that it drafts for.

    Args:
      sample: how that model continues texts.
      train: has the dtype of that model.
      longest: tokens of the longest prompt with its continuation.

    Raises:
      ConfigError: the small model cannot be read, or beams or penalties do not fit a draft.
    """
    from jaxstack.generate import speculative
    from jaxstack.loaded.trained_run import Draft

    speculative.check(sample)
    if args.draft == OWN_DRAFT:
        return Draft(tokens=args.draft_tokens)
    small, tokenizer = load_run.read_run(Path(args.draft))
    small = replace(small, sample=sample, train=replace(small.train, dtype=train.dtype))
    check = partial(check_memory, longest)
    run = load_run.open_run(Path(args.draft), small, tokenizer, args.mesh, None, rows=1, check=check)
    return Draft(run, args.draft_tokens)


def translate(cfg: Config, tokenizer: Tokenizer, args: Namespace) -> None:
    """Prints what an encoder-decoder writes for each text, one line each.

    Raises:
      ConfigError: the language does not suit the run, or an argument is for other families.
    """
    for flag, given in text_flags(args):
        if given:
            raise ConfigError(f"{flag} is for decoders, and {args.run} writes one text from another. Remove {flag}.")
    if args.out is not None:
        raise ConfigError(f"--out={args.out} is for pictures, and {args.run} makes text. Remove --out.")
    texts = read_prompts(args.prompts)
    cfg = with_arguments(cfg, args)
    run = load_run.open_run(Path(args.run), cfg, tokenizer, args.mesh, args.step, rows=len(texts))
    for text in run.translate(texts, language=args.language):
        write(text + "\n")


def caption(args: Namespace) -> None:
    """Prints the caption of each picture, or one for each beginning, one line each.

    Raises:
      ConfigError: the run writes no captions, there is no picture, or an argument is for other families.
    """
    cfg, tokenizer = load_run.read_run(Path(args.run))
    require_captions(cfg.model)
    for flag, given in (*text_flags(args), ("--language", args.language is not None), ("--out", args.out is not None)):
        if given:
            raise ConfigError(f"{flag} is not for captions, which {args.run} writes. Remove {flag}.")
    if not args.picture:
        raise ConfigError(f"{args.run} writes captions of pictures, and there is none. Add --picture=FILE.")
    beginnings = read_prompts(args.prompts)
    cfg = with_arguments(cfg, args)
    begin_captions(tokenizer, beginnings, cfg.data.target_length)  # errors are shown before JAX starts
    size = cfg.model.contrastive.image
    pixels = np.stack([read_model_picture(Path(user_path(file)), size) for file in args.picture])
    rows = [(i, text) for i in range(len(pixels)) for text in beginnings]
    count = max(len(rows), 2)  # a batch of the model compares rows
    run = load_run.open_run(Path(args.run), cfg, tokenizer, args.mesh, args.step, rows=count)
    for text in run.captions(pixels[[i for i, _ in rows]], [text for _, text in rows]):
        write(text + "\n")


def read_model_picture(file: Path, size: Sequence[int]) -> np.ndarray:
    """Returns a picture [H, W, C] from -1 to 1; one in shades of grey has equal channels for a model of colours.

    Raises:
      ConfigError: it cannot be read, or is not of the model's size.
    """
    if not file.is_file():
        raise ConfigError(f"--picture={file} is not a file. Name a PNG or JPEG file.")
    values = read_picture(file)
    if values.shape[2] == 1 < size[2]:
        values = np.repeat(values, size[2], 2)
    if values.shape != (*size,):
        raise ConfigError(
            f"--picture={file} is {format_size(values.shape)}, but the model reads {format_size(size)}. Resize it."
        )
    return (values / 127.5 - 1).astype(np.float32)


def text_flags(args: Namespace) -> list[tuple[str, bool]]:
    """Returns the flags that only a decoder has, and whether they were given."""
    given = {"chat": args.chat, "stream": args.stream, "stop": bool(args.stop), "draft": args.draft is not None}
    return [(f"--{name}", there) for name, there in given.items()]


def draw(cfg: Config, tokenizer: Tokenizer, args: Namespace) -> None:
    """Writes a PNG file with a row of pictures for each class that was named, or for each text.

    Raises:
      ConfigError: a class does not exist, a text is too long, or an argument is for text.
    """
    for flag, given in text_flags(args):
        if given:
            raise ConfigError(f"{flag} is for text, and {args.run} makes pictures. Remove {flag}.")
    names = args.prompts if cfg.model.reads_captions else " ".join(args.prompts).split()
    cfg = with_arguments(cfg, args)
    out = files.writable("--out", str(args.out or Path(args.run) / "pictures.png"), (".png",))
    count = cfg.sample.pictures
    if not names or not count:
        raise ConfigError(
            f"sample.pictures={count} of {plural(len(names), 'class')} makes no picture. Use one or more of each."
        )
    Given.named(cfg.model, names, tokenizer, cfg.data)  # errors are shown before JAX starts
    run = load_run.open_run(Path(args.run), cfg, tokenizer, args.mesh, args.step, rows=len(names) * count)

    from jaxstack.generate.pictures import write_grid

    drawn = run.draw([name for name in names for _ in range(count)])
    write_grid(out, drawn.reshape(len(names), count, *drawn.shape[1:]))
    print(f"{out} has {plural(count, 'picture')} of each of {', '.join(names)}")


def check_memory(longest: int, cfg: Config, placement: "Placement | None") -> None:
    """Checks that parameters and KV cache fit into memory, before they are read.

    Args:
      longest: tokens of the longest prompt with its continuation.
      cfg: the run, on the mesh to use.
      placement: where the experts will be stored. `None` means each of them once.

    Raises:
      ConfigError: they do not fit, or the model does not continue texts.
    """
    from jaxstack.planner import generation_memory

    require_decoder(cfg.model)
    generation_memory.Demand.of(cfg, longest, placement).check()


def with_arguments(cfg: Config, args: Namespace) -> Config:
    """Returns the configuration of a run with the values that were given.

    Raises:
      ConfigError: codes for several devices, or for a family that does not read them.
    """
    given = {name: value for name, value in vars(args.sample).items() if value is not None}
    sample = replace(cfg.sample, **given | {"prompts": ()})
    train = replace(cfg.train, dtype=args.dtype or cfg.train.dtype)
    seed = cfg.run.seed if args.seed is None else args.seed
    kernels = cfg.kernels
    devices = prod(args.mesh.sizes.values())
    if args.decode_weights is None and kernels.decode_weights != "float" and devices != 1:
        held = f"kernels.decode_weights={kernels.decode_weights}"
        print(f"note: {held} is for one device; new tokens read float weights on {devices}", file=sys.stderr)
    if args.decode_weights is not None:
        kernels = replace(kernels, decode_weights=args.decode_weights, decode_group=args.decode_group)
        flag = f"--decode_weights={args.decode_weights}"
        if args.decode_weights != "float" and (cfg.model.family != "decoder" or devices != 1):
            what = (
                f"mesh has {plural(devices, 'device')}" if devices != 1 else f"run is of the family {cfg.model.family}"
            )
            raise ConfigError(f"{flag} is for decoders on one device, and this {what}. Remove {flag}.")
    elif args.decode_group is not None:
        raise ConfigError(f"--decode_group={args.decode_group} needs --decode_weights. Add --decode_weights=int4.")
    return replace(cfg, run=replace(cfg.run, seed=seed), sample=sample, train=train, kernels=kernels)


def in_turn(texts: Sequence[TextStream], parts: Iterator[list[list[int]]]) -> Iterator[str]:
    """Yields the pieces of several texts that grow at the same time, one text after the other.

    Args:
      parts: tokens of each text. A text without new tokens has ended.
    """
    now = 0
    yield texts[0].take()
    for rows in parts:
        for text, row in zip(texts, rows, strict=True):
            text.add(row)
        while now < len(texts) - 1 and not rows[now]:
            yield texts[now].take(all=True) + _BETWEEN
            now += 1
        yield texts[now].take()
        if all(text.ended for text in texts):
            break
    yield _BETWEEN.join(text.take(all=True) for text in texts[now:])


_BETWEEN = "\n---\n"


def write(text: str, flush: bool = True) -> None:
    """Prints text, with escaped control characters on a terminal."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    if flush:
        sys.stdout.flush()


def read_prompts(words: Sequence[str]) -> list[str]:
    """Returns the prompts; the word `-` is replaced by the lines of standard input.

    Raises:
      ConfigError: there are none.
    """
    prompts = [line for word in words for line in (sys.stdin.read().splitlines() if word == "-" else [word])]
    if not prompts:
        raise ConfigError("standard input contains no prompts. Write one per line.")
    return prompts


def note_frame(tokenizer: Tokenizer) -> None:
    """Prints what is put around a text to stderr, if the tokenizer's file puts anything there."""
    if line := describe_frame(tokenizer):
        print(f"note: {line}", file=sys.stderr)


def stop_tokens(tokenizer: Tokenizer, stop: list[str]) -> tuple[int, ...]:
    """Returns the ids of the tokens that end a text: the tokens of `--stop`, and the end of a document.

    Raises:
      ConfigError: a text is not exactly one token.
    """
    ids = [tokenizer.encode(word).tolist() for word in stop]
    for word, tokens in zip(stop, ids, strict=True):
        if len(tokens) != 1:
            raise ConfigError(
                f"--stop={word!r} is {plural(len(tokens), 'token')} of the run's tokenizer. Give exactly one token."
            )
    return (*(tokens[0] for tokens in ids), *tokenizer.stop_ids)
