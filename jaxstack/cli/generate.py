"""Continues prompts with the model of a run. Arguments that are not given have the run's values."""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, get_type_hints

from jsonargparse import Namespace

from jaxstack.config import Config, ConfigError, MeshConfig, PipelineConfig, SampleConfig, TrainConfig, parse
from jaxstack.config.parse import Parser, user_path
from jaxstack.data import Tokenizer, chat
from jaxstack.data.tokenizers import tokenizer_from_json
from jaxstack.runtime import compile_cache, platform

if TYPE_CHECKING:  # JAX must start after `platform.configure`
    from jaxstack.models.context import Context
    from jaxstack.models.params import Params

DTYPE = get_type_hints(TrainConfig)["dtype"]


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    parser.add_argument("run", metavar="RUN", type=user_path, help="run directory")
    parser.add_argument(
        "prompts",
        metavar="PROMPT",
        type=str,
        nargs="+",
        help="text to continue; - reads one prompt per line from stdin",
    )
    parser.add_argument("--chat", action="store_true", help="treat prompts as messages of a user and print the answers")
    parser.add_argument("--step", type=int, help="step of the checkpoint; null means the newest")
    parser.add_argument("--seed", type=int, help="seed of sampling; null means run.seed of the run")
    parser.add_argument(
        "--dtype", type=DTYPE | None, help="dtype of the computation; null means train.dtype of the run"
    )
    parser.add_argument(
        "--stop",
        metavar="TOKEN",
        action="append",
        default=[],
        help="text of one token that ends generation; repeatable",
    )
    parser.add_class_arguments(SampleConfig, "sample", skip={"prompts"}, instantiate=False)
    parser.set_defaults({f"sample.{f.name}": None for f in fields(SampleConfig) if f.name != "prompts"})
    parser.add_class_arguments(MeshConfig, "mesh")
    parser.set_defaults({"mesh.data": 1})  # one device; more share the prompts


def main(args: Namespace) -> None:
    """Prints the texts.

    Raises:
      ConfigError: the run cannot be read, or an argument does not suit it.
    """
    run = Path(args.run)
    for name in ("config.yaml", "tokenizer.json"):
        if not (run / name).is_file():
            raise ConfigError(f"{run} is not a run directory: it has no {name}. Name the run.dir of a training run.")
    cfg = parse.parse_config([f"--config={run / 'config.yaml'}"])
    tokenizer = tokenizer_from_json(json.loads((run / "tokenizer.json").read_text()))
    prompts = read_prompts(args.prompts)
    stop = stop_tokens(tokenizer, args.stop)
    if args.chat:
        template = chat.template_for(tokenizer)
        prompts = [template.prompt([{"role": "user", "content": prompt}]) for prompt in prompts]
        end = chat.end_of_turn_id(template, tokenizer)
        stop += () if end is None else (end,)
    given = {name: value for name, value in vars(args.sample).items() if value is not None}
    sample = replace(cfg.sample, **given | {"prompts": ()})
    train = replace(cfg.train, dtype=args.dtype or cfg.train.dtype)
    seed = cfg.run.seed if args.seed is None else args.seed
    cfg = replace(cfg, run=replace(cfg.run, seed=seed), sample=sample, train=train)
    cfg = for_prompts(cfg, args.mesh, len(prompts))
    platform.configure(cfg.mesh, cfg.data.batch_size)  # before JAX is imported
    compile_cache.configure()
    rows = generate(run, cfg, tokenizer, prompts, args.step, stop, answers_only=args.chat)
    print("\n---\n".join(rows))


def read_prompts(words: Sequence[str]) -> list[str]:
    """Returns the prompts; the word `-` is replaced by the lines of standard input.

    Raises:
      ConfigError: there are none.
    """
    prompts = [line for word in words for line in (sys.stdin.read().splitlines() if word == "-" else [word])]
    if not prompts:
        raise ConfigError("standard input contains no prompts. Write one per line.")
    return prompts


def for_prompts(cfg: Config, mesh: MeshConfig, prompts: int) -> Config:
    """Returns the run's configuration on another mesh, for a batch of this many prompts."""
    shards = math.prod(mesh.known_sizes[axis] for axis in ("data", "fsdp", "expert"))
    rows = -(-prompts // shards) * shards
    data, train = replace(cfg.data, batch_size=rows), replace(cfg.train, grad_accum=1)
    return replace(cfg, mesh=mesh, data=data, train=train, pipeline=PipelineConfig())


def stop_tokens(tokenizer: Tokenizer, stop: list[str]) -> tuple[int, ...]:
    """Returns the ids of the tokens that end a text: those of `--stop`, and the end of a document.

    Raises:
      ConfigError: a text is not exactly one token.
    """
    ids = [tokenizer.encode(word).tolist() for word in stop]
    for word, tokens in zip(stop, ids, strict=True):
        if len(tokens) != 1:
            raise ConfigError(
                f"--stop={word!r} is {len(tokens)} tokens of the run's tokenizer. Give exactly one token."
            )
    end = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    return (*(tokens[0] for tokens in ids), *end)


def generate(
    run: Path,
    cfg: Config,
    tokenizer: Tokenizer,
    prompts: list[str],
    step: int | None,
    stop: tuple[int, ...],
    answers_only: bool,
) -> list[str]:
    """Returns the texts that a checkpoint generates.

    Args:
      run: run directory.
      cfg: its configuration, on the mesh to use.
      tokenizer: the run's tokenizer.
      prompts: texts to continue.
      step: step of the checkpoint. None means the newest one.
      stop: ids of tokens that end a text.
      answers_only: return texts without their prompts and stop tokens.
    """
    from jaxstack import sharding
    from jaxstack.generate import decode
    from jaxstack.models.context import Context

    encoded = [tokenizer.encode(prompt).tolist() for prompt in prompts]
    decode.check_prompts(cfg.model, encoded, cfg.sample.tokens, tokenizer.vocab_size)
    longest = max(len(prompt) for prompt in encoded) + cfg.sample.tokens
    if longest > cfg.data.seq_len:
        print(f"note: texts have up to {longest} tokens; the model was trained on {cfg.data.seq_len}", file=sys.stderr)
    devices = sharding.find_devices()
    if cfg.mesh.open_axis is None:  # the other devices of the machine are not needed
        devices = devices[: math.prod(cfg.mesh.sizes.values())]
    ctx = Context.create(cfg, sharding.make_mesh(cfg.mesh, cfg.data.batch_size, devices))
    options = decode.generate_options(cfg, tokenizer, ctx)
    options["stop"] = stop
    values = read_params(run, cfg, ctx, step)
    rows = decode.generate(cfg.model.base, values, encoded, cfg.sample, seed=cfg.run.seed, **options)
    if not answers_only:
        return [decode.decode_text(tokenizer, row) for row in rows]
    ends = [*zip(rows, encoded, strict=True)]
    return [tokenizer.decode([*takewhile(lambda i: i not in stop, row[len(start) :])]) for row, start in ends]


def read_params(run: Path, cfg: Config, ctx: "Context", step: int | None) -> "Params":
    """Returns the parameters of a checkpoint, sharded for `ctx`, with adapters merged.

    If the run has no checkpoint, these are the parameters that it starts with.

    Args:
      run: run directory.
      cfg: its configuration, on the mesh of `ctx`.
      ctx: how to shard them.
      step: step of the checkpoint. None means the newest one.
    """
    from jaxstack import hf
    from jaxstack.training import init_from

    source = init_from.find_source(str(run), "RUN")
    if isinstance(source, hf.PretrainedFolder):
        with source:
            return source.read_params(ctx)
    return init_from.restore_params(replace(cfg, run=replace(cfg.run, dir=source.run.dir)), ctx, step)
