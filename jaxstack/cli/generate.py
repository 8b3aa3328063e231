"""`jaxstack generate RUN "prompt" ["prompt" ...] [--chat] [--sample.tokens=200 --sample.temperature=0.8 ...]`

Continues prompts with the model of a run directory. What no flag says is the run's own: its group `sample`, its seed.
"""

import json
import math
import sys
from dataclasses import asdict, fields, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, get_args, get_type_hints

from jsonargparse import Namespace

from jaxstack.common import errors
from jaxstack.config import Config, ConfigError, MeshConfig, PipelineConfig, SampleConfig, TrainConfig, parse
from jaxstack.data import Tokenizer, chat
from jaxstack.data.tokenizers import tokenizer_from_json
from jaxstack.runtime import platform

DTYPES = get_args(get_type_hints(TrainConfig)["dtype"])


def main(argv: list[str]) -> None:
    run = Path(parse_words(argv, SampleConfig()).run)
    for name in ("config.yaml", "tokenizer.json"):
        if not (run / name).is_file():
            raise ConfigError(f"{run} is no run directory: it holds no {name}; name the run.dir of a training run")
    cfg = parse.parse_config([f"--config={run / 'config.yaml'}"], run)
    tokenizer = tokenizer_from_json(json.loads((run / "tokenizer.json").read_text()))
    given = parse_words(argv, replace(cfg.sample, prompts=()))  # again: the defaults are the run's
    prompts = [line for word in given.prompts for line in (sys.stdin.read().splitlines() if word == "-" else [word])]
    if not prompts:
        raise ConfigError("there are no prompts on standard input; give one a line")
    stop = stop_tokens(tokenizer, given.stop)
    if given.chat:
        template = chat.template_for(tokenizer)
        prompts = [template.prompt([{"role": "user", "content": prompt}]) for prompt in prompts]
        end = chat.end_of_turn_id(template, tokenizer)
        stop += () if end is None else (end,)
    train = replace(cfg.train, dtype=given.dtype or cfg.train.dtype)
    cfg = placed(replace(cfg, sample=given.sample, train=train), given.mesh, len(prompts))
    platform.configure(cfg.mesh, cfg.data.batch_size)  # before JAX is imported, which reads it
    seed = cfg.run.seed if given.seed is None else given.seed
    texts = continued(run, cfg, tokenizer, prompts, given.step, seed, stop, given.chat)
    print("\n---\n".join(texts))


def parse_words(argv: list[str], defaults: SampleConfig) -> Namespace:
    """The command line, with `sample` and `mesh` as the dataclasses that they are."""
    parser = parse.Parser(prog=errors.program, description="Continues prompts with the model of a run.")
    parser.add_argument("run", type=str, help="run directory")
    parser.add_argument("prompts", type=str, nargs="+", help="beginnings of texts; -: from standard input, one a line")
    parser.add_argument("--chat", action="store_true", help="prompts are what a user says; print the answers")
    parser.add_argument("--step", type=int, help="checkpoint to take (default: the newest)")
    parser.add_argument("--seed", type=int, help="decides what is sampled (default: run.seed of the run)")
    parser.add_argument("--dtype", choices=DTYPES, help="computes in it (default: train.dtype of the run)")
    parser.add_argument("--stop", action="append", default=[], help="one token that ends a text; may be given again")
    parser.add_class_arguments(SampleConfig, "sample", skip={"prompts"})
    parser.add_class_arguments(MeshConfig, "mesh")
    own = asdict(defaults)
    parser.set_defaults({"mesh.data": 1})  # one device; more share the prompts
    parser.set_defaults({f"sample.{f.name}": own[f.name] for f in fields(SampleConfig) if f.name != "prompts"})
    return parser.instantiate(parser.parse_args(argv))


def placed(cfg: Config, mesh: MeshConfig, prompts: int) -> Config:
    """The run's configuration for so many prompts on another mesh."""
    shared = math.prod(mesh.known_sizes[axis] for axis in ("data", "fsdp", "expert"))
    rows = -(-prompts // shared) * shared
    data, train = replace(cfg.data, batch_size=rows), replace(cfg.train, grad_accum=1)
    return replace(cfg, mesh=mesh, data=data, train=train, pipeline=PipelineConfig())


def stop_tokens(tokenizer: Tokenizer, stop: list[str]) -> tuple[int, ...]:
    """Ids of tokens that end a text: those given, and the end of a document.

    Raises:
      ConfigError: a text that is not one token.
    """
    ids = [tokenizer.encode(word).tolist() for word in stop]
    for word, tokens in zip(stop, ids, strict=True):
        if len(tokens) != 1:
            raise ConfigError(f"--stop={word!r} is {len(tokens)} tokens of the run's tokenizer; give one that is one")
    end = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    return (*(tokens[0] for tokens in ids), *end)


def continued(
    run: Path, cfg: Config, tokenizer: Tokenizer, prompts: list[str], step: int | None, seed: int, stop: Any, only: bool
) -> list[str]:
    """The texts, as the checkpoint of `step` (None: the newest) continues them, or `only` what it adds."""
    import jax

    from jaxstack import sharding
    from jaxstack.generate import decode
    from jaxstack.models.context import Context

    encoded = [tokenizer.encode(prompt).tolist() for prompt in prompts]
    decode.check_prompts(cfg.model, encoded, cfg.sample.tokens, tokenizer.vocab_size)
    longest = max(len(prompt) for prompt in encoded) + cfg.sample.tokens
    if longest > cfg.data.seq_len:
        print(f"note: texts of up to {longest} tokens; the model was trained on {cfg.data.seq_len}", file=sys.stderr)
    devices = jax.devices()
    if cfg.mesh.open_axis is None:  # the rest of the machine is not needed
        devices = devices[: math.prod(cfg.mesh.sizes.values())]
    ctx = Context.create(cfg, sharding.make_mesh(cfg.mesh, cfg.data.batch_size, devices))
    options = decode.generate_options(cfg, tokenizer, ctx)
    options["stop"] = stop
    rows = decode.generate(cfg.model.base, parameters(run, cfg, ctx, step), encoded, cfg.sample, seed=seed, **options)
    if not only:
        return [decode.decode_text(tokenizer, row) for row in rows]
    ends = [*zip(rows, encoded, strict=True)]
    return [tokenizer.decode([*takewhile(lambda i: i not in stop, row[len(start) :])]) for row, start in ends]


def parameters(run: Path, cfg: Config, ctx: Any, number: int | None) -> Any:
    """The parameters of a checkpoint, or of what a run that has none begins with, laid out for `ctx`; adapters are
    merged."""
    from jaxstack import hf
    from jaxstack.training import init_from

    source = init_from.find(str(run), "RUN")
    if isinstance(source, hf.PretrainedFolder):
        with source:
            return source.read_params(ctx)
    return init_from.restore(replace(cfg, run=replace(cfg.run, dir=source.run.dir)), ctx, number)
