"""Serves models over HTTP: a decoder with OpenAI's protocol, a reward model with vLLM's, or several others.

Arguments that are not given have the run's values. Requests that arrive together share a batch. SIGTERM or SIGINT lets
running texts end; a second one does not.
"""

import socket
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from jsonargparse import Namespace

from jaxstack.cli import generate
from jaxstack.cli.chat import context_of
from jaxstack.common.counts import plural
from jaxstack.config import Config, ConfigError, SampleConfig
from jaxstack.config.bounds import Interval, NonNegativeInt, PositiveFloat, PositiveInt, check_value
from jaxstack.config.reading.parse import Parser, user_path
from jaxstack.data.chat import end_of_turn
from jaxstack.generate.prompts import require_decoder
from jaxstack.loaded import load_run
from jaxstack.runtime import compile_cache, platform

if TYPE_CHECKING:  # JAX must start after the devices were chosen
    from jaxstack.generate.continuous import ContinuousBatch
    from jaxstack.loaded.trained_run import TrainedRun
    from jaxstack.moe.placement import Placement
    from jaxstack.serve.access import Access
    from jaxstack.serve.app import Limits, Server
    from jaxstack.serve.requests import Model

Port = Annotated[int, Interval(0, 65535)]
"""A port of TCP, or 0."""
PROMPT_CACHE_MIB = 256
"""Default of `--prompt_cache`."""


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    parser.add_argument("run", metavar="RUN", type=user_path, nargs="+", help="run directory")
    parser.add_argument("--host", type=str, default="127.0.0.1", help="address to listen at")
    parser.add_argument("--port", type=Port, default=8000, help="port; 0 means any that is free")
    parser.add_argument(
        "--allowed_hosts",
        metavar="NAME",
        type=str,
        nargs="+",
        default=[],
        help="more names of this server in the header Host; * means any",
    )
    parser.add_argument(
        "--api_key_file",
        metavar="FILE",
        type=user_path,
        help="file with the key that requests must have; null means JAXSTACK_API_KEY, if it is set",
    )
    parser.add_argument("--name", type=str, help="name of the model in requests; null means the directory's name")
    parser.add_argument("--rows", type=PositiveInt, default=8, help="number of texts that are written at once")
    parser.add_argument("--waiting", type=NonNegativeInt, default=64, help="texts that may wait for a row")
    parser.add_argument(
        "--context", type=int, help="maximum number of tokens of a prompt and its text; null means data.seq_len"
    )
    parser.add_argument(
        "--max_tokens", type=PositiveInt | None, help="maximum number of tokens of a text; null means no limit"
    )
    parser.add_argument("--max_body", type=PositiveInt, default=2**20, help="maximum number of bytes of a request")
    parser.add_argument("--timeout", type=PositiveFloat, default=300.0, help="maximum seconds for an answer")
    parser.add_argument(
        "--receive_timeout",
        type=PositiveFloat,
        default=30.0,
        help="maximum seconds in which a request arrives, and in which a client reads an answer",
    )
    parser.add_argument("--connections", type=PositiveInt, default=256, help="maximum number of connections")
    parser.add_argument("--grace", type=PositiveFloat, default=30.0, help="seconds to finish texts after a stop signal")
    parser.add_argument(
        "--prompt_cache",
        type=NonNegativeInt | None,
        help=f"MiB for KV caches of recent prompts; null means {PROMPT_CACHE_MIB}, if usable",
    )
    parser.add_argument(
        "--memory",
        type=PositiveFloat | None,
        help="GiB for parameters of several models; the least recently used are dropped",
    )
    generate.add_model_arguments(parser)


def main(args: Namespace) -> None:
    """Serves until a signal comes.

    Raises:
      ConfigError: the run cannot be read, an argument does not suit it, or the address cannot be used.
    """
    path = Path(args.run[0])
    cfg, tokenizer = load_run.read_run(path)
    if args.run[1:] or cfg.model.family != "decoder":
        serve_models(args)
        return
    if args.memory is not None:
        raise ConfigError(f"--memory={args.memory:g} is for several models. Leave it out.")
    require_decoder(cfg.model, scores=True)
    access = read_access(args)
    name = args.name or path.resolve().name
    check_value("--name", name, str, None)
    template = generate.template_of(cfg.data, tokenizer)
    if cfg.model.reward_head:
        refuse_sampling(args)
    turn = end_of_turn(template, tokenizer)
    stop = generate.stop_tokens(tokenizer, args.stop) + turn.tokens
    cfg = generate.with_arguments(cfg, args)
    check_sample(cfg.sample, args)
    context = context_of(cfg.model, args.context, cfg.data.seq_len)
    listener = bind(args.host, args.port)  # before the model is read, which takes longer
    check = no_check if cfg.model.reward_head else partial(generate.check_memory, context)
    run = load_run.open_run(
        path, cfg, tokenizer, args.mesh, args.step, rows=args.rows, check=check, placement=args.placement
    )

    from jaxstack.serve import http
    from jaxstack.serve.app import Limits
    from jaxstack.serve.requests import Model

    model = Model(
        name=name,
        tokenizer=tokenizer,
        template=template,
        sample=cfg.sample,
        seed=None if args.seed is None else args.seed % 2**32,
        context=context,
        max_tokens=min(args.max_tokens or context, context),
        max_texts=args.rows + args.waiting,
        vocabulary=min(tokenizer.vocab_size, cfg.model.vocab),
        end_of_turn=turn.texts,
    )
    limits = Limits(model.max_texts, args.max_body, args.timeout, args.receive_timeout, args.connections)
    server = make_server(run, model, limits, args, stop, access)
    address = f"{address_of(listener)}{'/score' if cfg.model.reward_head else '/v1'}"
    listener.listen(128)  # clients may connect as soon as the address is printed
    print(
        f"{model.name} at {address}: {plural(args.rows, 'text')} at once, {args.waiting} may wait, "
        f"{plural(context, 'token')} each; {'with' if template else 'without'} a chat template, "
        f"{'with' if access.key else 'without'} a key",
        flush=True,
    )
    http.run(server, listener, args.grace)


def read_access(args: Namespace) -> "Access":
    """Returns who may send requests, after checking that the libraries of servers are here."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise ConfigError("jaxstack serve needs starlette and uvicorn. Run pip install 'jaxstack[serve]'.") from None
    from jaxstack.serve import access

    return access.read_access(args.host, args.allowed_hosts, args.api_key_file)


ONLY_TEXTS: dict[str, object] = {
    "rows": 8, "context": None, "max_tokens": None, "prompt_cache": None, "name": None, "seed": None, "stop": [],
    "decode_weights": None, "decode_group": None, "placement": None,
}  # fmt: skip
"""Arguments that only a server of a decoder reads, with their defaults."""


def serve_models(args: Namespace) -> None:
    """Serves models that do not continue texts until a signal comes: one, or several that share the memory.

    Raises:
      ConfigError: see `main`; or a run is a decoder, or an argument is for decoders.
    """
    sample = {f"sample.{key}": value for key, value in vars(args.sample).items()}
    given = {key: args[key] for key, usual in ONLY_TEXTS.items() if args[key] != usual}
    for key, value in (given | {key: value for key, value in sample.items() if value is not None}).items():
        raise ConfigError(f"--{key}={value} is for a server of one decoder. Leave it out.")
    access = read_access(args)
    platform.configure(args.mesh, 0)
    compile_cache.configure()

    from jaxstack.serve import catalog, http
    from jaxstack.serve.app import Limits
    from jaxstack.serve.kinds import kinds_of
    from jaxstack.serve.several import SeveralModels

    paths = catalog.names_of([Path(run) for run in args.run])
    models = {}
    for name, path in paths.items():
        models[name] = load_run.read_run(path)[0].model
        try:
            kinds_of(models[name])
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def load(name: str) -> "TrainedRun":
        return load_run.load(paths[name], mesh=args.mesh, step=args.step, dtype=args.dtype)

    limit = None if args.memory is None else int(args.memory * 2**30)
    held = catalog.Catalog(models, load, limit)
    if len(paths) == 1:
        held.get(next(iter(paths)))  # a mistake shows at once
    listener = bind(args.host, args.port)
    limits = Limits(args.waiting + 1, args.max_body, args.timeout, args.receive_timeout, args.connections)
    server = SeveralModels(held, models, limits, partial(print, flush=True), access)
    listener.listen(128)
    for name, kinds in server.kinds.items():
        print(f"{name}: {', '.join(kind.task for kind in kinds)}")
    print(
        f"{plural(len(paths), 'model')} at {address_of(listener)}, {'with' if access.key else 'without'} a key",
        flush=True,
    )
    http.run(server, listener, args.grace)


def make_server(
    run: "TrainedRun", model: "Model", limits: "Limits", args: Namespace, stop: tuple[int, ...], access: "Access"
) -> "Server":
    """Returns what answers requests: the server of texts, or of the scores of a reward model.

    Args:
      stop: tokens that end a text.
    """
    from jaxstack.serve.app import Server
    from jaxstack.serve.scoring import ScoreServer, ScoreWorker
    from jaxstack.serve.worker import Worker

    log = partial(print, flush=True)
    if run.model.reward_head:
        return ScoreServer(ScoreWorker(run.scorer, args.rows), model, limits, log, access)
    batch = make_batch(run, args, model.context, stop)
    worker = Worker(batch, run.scorer, rows=args.rows, vocabulary=model.vocabulary)
    return Server(worker, model, limits, stop, log, access)


def no_check(cfg: Config, placement: "Placement | None") -> None:
    """Checks nothing: a model that scores texts has no KV cache."""


def refuse_sampling(args: Namespace) -> None:
    """Refuses arguments that say how texts are written, which a reward model does not do.

    Raises:
      ConfigError: one is given.
    """
    names = ("max_tokens", "prompt_cache", "seed", "decode_weights", "decode_group", "stop")
    given = {f"--{name}": getattr(args, name) for name in names}
    given |= {f"--sample.{name}": value for name, value in vars(args.sample).items()}
    for flag, value in given.items():
        if value not in (None, []):
            raise ConfigError(f"{flag}={value} is for models that write texts, but this run scores them. Leave it out.")


def check_sample(sample: SampleConfig, args: Namespace) -> None:
    """Checks that a server can sample in this way.

    Raises:
      ConfigError: it cannot.
    """
    if sample.beams > 1:
        raise ConfigError(f"sample.beams={sample.beams} cannot show tokens as they come. Use sample.beams=1.")
    if sample.rows is not None and args.sample.rows is not None:
        raise ConfigError(f"sample.rows={sample.rows} is for `jaxstack generate`. Use --rows.")


def address_of(listener: socket.socket) -> str:
    """Returns the URL of a socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_batch(run: "TrainedRun", args: Namespace, context: int, stop: tuple[int, ...]) -> "ContinuousBatch":
    """Returns an empty batch after it has written a first text, so that the programs of short texts are compiled.

    Args:
      context: largest number of tokens of a text with its prompt.
      stop: tokens that end a text.

    Raises:
      ConfigError: the prompt cache cannot be used on this mesh.
    """
    import numpy as np

    from jaxstack.generate.continuous import ContinuousBatch, Prompt
    from jaxstack.generate.prompt_cache import PromptCache
    from jaxstack.serve.requests import MAX_LOGPROBS

    generate.note_frame(run.tokenizer)
    engine = run.engine(run.config.sample.domain)
    size = args.prompt_cache
    if engine.ctx.layout.replicas > 1:
        if size:
            raise ConfigError(
                f"--prompt_cache={size} needs a mesh without data, fsdp and expert, whose replicas have prompts of "
                f"their own. Use --mesh.tensor or --mesh.pipe, or leave it out."
            )
        size = 0
    size = PROMPT_CACHE_MIB if size is None else size
    batch = ContinuousBatch(
        engine,
        rows=args.rows,
        slots=context,
        stop=stop,
        repetition_penalty=run.config.sample.repetition_penalty,
        alternatives=min(MAX_LOGPROBS, engine.vocabulary),
        cache=PromptCache(engine.cfg, size * 2**20) if size else None,
    )
    batch.add(Prompt(0, [0], replace(run.config.sample, tokens=min(2, context - 1)), np.zeros(2, np.uint32)))
    while batch.busy:
        batch.advance()
    return batch


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket with an address, which does not listen yet.

    Args:
      host: name or address of an interface of this machine.
      port: number of the port; 0 means any that is free.

    Raises:
      ConfigError: the address does not exist, or is in use.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        return listener
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--host={host} --port={port} cannot be used: {reason}. Choose another.") from None
