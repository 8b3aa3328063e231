"""Writes the newest parameters of a run as a Hugging Face folder, which `transformers` loads, or with a program.

With `--format stablehlo` the folder has the forward pass as a program that needs JAX alone, see `loaded.portable`.
"""

import importlib.util
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jsonargparse import Namespace

from jaxstack.config import Config, ConfigError, DataConfig, MeshConfig, ModelConfig, PipelineConfig
from jaxstack.config.bounds import PositiveInt
from jaxstack.config.reading import parse
from jaxstack.config.reading.parse import Parser, user_path
from jaxstack.config.sentences import SentencesConfig

if TYPE_CHECKING:  # the package imports JAX, for which help must not wait
    from jaxstack.data.tokenizers import JsonObject
    from jaxstack.hf.configs import SpecialIds
    from jaxstack.models.params import Params


OWN_TOKENIZER_CLASS = {"qwen2"}
"""Families for which `AutoTokenizer` of transformers 5 takes a class of its own, whatever class the folder names."""


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    parser.add_argument("run", metavar="RUN", type=user_path, help="run directory")
    parser.add_argument("folder", metavar="DIR", type=user_path, help="folder to write")
    parser.add_argument(
        "--dtype", type=Literal["float32", "bfloat16"], default="float32", help="dtype of the weights in the folder"
    )
    parser.add_argument(
        "--format",
        type=Literal["hf", "stablehlo"],
        default="hf",
        help="hf writes a Hugging Face folder; stablehlo the forward pass as a program of jax.export, with parameters",
    )
    parser.add_argument(
        "--platforms",
        type=tuple[Literal["cpu", "cuda", "tpu"], ...],
        default=("cpu", "cuda", "tpu"),
        help="with stablehlo: platforms that can run the program",
    )
    parser.add_argument(
        "--batch_size",
        type=PositiveInt | None,
        default=None,
        help="with stablehlo: number of rows; null means any number, except for models with experts",
    )
    parser.add_argument(
        "--seq_len",
        type=PositiveInt | None,
        default=None,
        help="with stablehlo: length of a row; null means data.seq_len of the run",
    )
    parser.add_argument(
        "--adapter", action="store_true", help="write only the adapters, in PEFT's format, and not the merged model"
    )
    parser.add_argument(
        "--push",
        metavar="REPO",
        type=str | None,
        default=None,
        help="also send the folder with a model card to this repository of the Hugging Face hub, such as you/model",
    )
    parser.add_argument(
        "--branch",
        type=Literal["understanding", "generation"] | None,
        default=None,
        help="for a model with two branches: make DIR a run directory of this branch with the trunk",
    )


def main(args: Namespace) -> None:
    """Writes the folder and prints what it contains.

    Raises:
      ConfigError: the run cannot be read, or the folder exists.
    """
    run = Path(args.run)
    folder = Path(args.folder)
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{run} is not a run directory: it has no config.yaml. Name the run.dir of a training run.")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before JAX is imported: an accelerator is not needed

    from jaxstack import hf
    from jaxstack.data.tokenizers import read_saved_tokenizer
    from jaxstack.hf import hub, originals, safetensors

    if args.format == "stablehlo":
        _write_program(run, folder, args)
        return
    for flag, value in {"batch_size": args.batch_size, "seq_len": args.seq_len}.items():
        if value is not None:
            raise ConfigError(f"--{flag}={value} is for programs. Use --format=stablehlo, or leave it out.")
    if args.branch is not None:
        if args.push is not None:
            raise ConfigError(
                f"--push={args.push} sends a Hugging Face folder, but --branch makes a run. Leave out one."
            )
        _write_branch(run, folder, args.branch)
        return
    if args.push is not None:
        safetensors.require_new(folder)
        hub.require_repository(args.push)
    if args.adapter:
        _write_adapters(run, folder, args.dtype, args.push)
        return
    with safetensors.new_folder(folder) as made:
        cfg = parse.parse_config([f"--config={run / 'config.yaml'}"])
        tokenizer = read_saved_tokenizer(run).to_json() if (run / "tokenizer.json").is_file() else None
        ids = hf.SpecialIds() if tokenizer is None else write_tokenizer(tokenizer, made, cfg.model, cfg.data)
        model = replace(cfg.model.base, pad_vocab_to=None)
        model, values, left_out = _without_other_heads(model, _read_params(run))
        original = originals.find(run)
        preferred = None if original is None else originals.family(original)
        family = hf.save_pretrained(made, model, values, args.dtype, cfg.data.seq_len, ids, preferred=preferred)
        as_imported = original is not None and originals.restore(original, tokenizer, made)
        if args.push is not None:
            _write_card(made, run, args.push, f"A {family} model", args.dtype)
    print(f"wrote {folder}: a {family} model in {args.dtype}")
    if left_out:
        print(f"The heads of model.sentences.tasks={left_out} are left out: no Hugging Face model has them.")
    if not (folder / "tokenizer.json").is_file():
        print("The folder has no tokenizer.json, because the tokenizer of this run is not of that kind.")
    elif family in OWN_TOKENIZER_CLASS and not as_imported:
        how = f"PreTrainedTokenizerFast.from_pretrained({str(folder)!r})"
        print(f"Load its tokenizer with {how}: AutoTokenizer splits texts as {family} does.")
    if args.push is not None:
        print(f"sent it to {hub.push(folder, args.push)}")


def _write_program(run: Path, folder: Path, args: Namespace) -> None:
    """Writes the forward pass with its parameters and the tokenizer, and prints how to call it."""
    from jaxstack.data.tokenizers import read_saved_tokenizer
    from jaxstack.hf import safetensors
    from jaxstack.loaded import portable

    given = {"adapter": args.adapter, "push": args.push is not None, "branch": args.branch is not None}
    for flag, is_given in given.items():
        if is_given:
            raise ConfigError(f"--{flag} is for Hugging Face folders. Leave it out, or use --format=hf.")
    if not args.platforms:
        raise ConfigError("--platforms is empty. Name one or more of cpu, cuda and tpu.")
    if importlib.util.find_spec("flatbuffers") is None:
        raise ConfigError("--format=stablehlo needs the flatbuffers library. Run `pip install flatbuffers`.")
    cfg = parse.parse_config([f"--config={run / 'config.yaml'}"])
    model = replace(cfg.model.base, pad_vocab_to=None)
    data = replace(cfg.data, seq_len=args.seq_len or cfg.data.seq_len)
    with safetensors.new_folder(folder) as made:
        params = _read_params(run)
        program = portable.make(model, data, params, args.platforms, args.batch_size, args.dtype)
        program.write(made)
        if (run / "tokenizer.json").is_file():
            write_tokenizer(read_saved_tokenizer(run).to_json(), made, cfg.model, cfg.data)
    print(f"wrote {folder}: a program for {', '.join(program.description['platforms'])} in {args.dtype}")
    for kind in ("inputs", "outputs"):
        arrays = program.description[kind].items()
        print(f"{kind}: " + ", ".join(f"{name} {a['dtype']} [{', '.join(map(str, a['shape']))}]" for name, a in arrays))


def _write_card(folder: Path, run: Path, repo: str, what: str, dtype: str, adapters: bool = False) -> None:
    """Writes the model card of an export."""
    from jaxstack.hf import hub
    from jaxstack.tracking import jsonl

    cfg = parse.parse_config([f"--config={run / 'config.yaml'}"])
    log = run / "metrics.jsonl"
    records = jsonl.read_lines(log) if log.is_file() else []
    card = hub.model_card(repo, what, dtype, cfg.model, cfg.optim, cfg.data.seq_len, records, adapters)
    (folder / "README.md").write_text(card, "utf-8")


def _without_other_heads(model: ModelConfig, values: "Params") -> tuple[ModelConfig, "Params", list[str]]:
    """Returns a model and its parameters without heads that no Hugging Face model has, and the tasks of these."""
    from jaxstack import families, hf

    tasks: list[str] = [*model.sentences.tasks]
    if not tasks:
        return model, values, []
    try:
        hf.family_of(model)
    except ConfigError:
        alone = replace(model, sentences=SentencesConfig())
        return alone, {name: values[name] for name in families.spec(alone)}, tasks
    return model, values, []


def write_tokenizer(saved: "JsonObject", folder: Path, model: ModelConfig, keys: DataConfig) -> "SpecialIds":
    """Writes a run's tokenizer and chat template to the folder if there are any, and returns its special ids."""
    from jaxstack import data, hf
    from jaxstack.data.seq2seq import ids_of

    tokenizer = data.tokenizer_from_json(saved)
    content = data.to_tokenizer_json(saved)
    if content is not None:
        # Without this class, transformers takes the one of the model's family, which may split texts in another way.
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        names = {token["id"]: token["content"] for token in content.get("added_tokens", [])}
        if tokenizer.eos_id in names:
            settings["eos_token"] = names[tokenizer.eos_id]
        (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), "utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, ensure_ascii=False) + "\n", "utf-8")
    if "chat" in saved:
        (folder / "chat_template.jinja").write_text(saved["chat"]["source"], "utf-8")
    special = ids_of(keys, tokenizer) if model.family == "encoder_decoder" else None
    return hf.SpecialIds(tokenizer.eos_id) if special is None else hf.SpecialIds(special.eos, special.start)


def _read_params(run: Path) -> "Params":
    """Returns the newest parameters of a run on one device, or its initial ones if it has not begun."""
    from jaxstack.training.services import init_from

    source = init_from.find_source(str(run), "RUN")
    if not isinstance(source, Config):
        with source:
            return source.read_params()
    return _restore(source)


def _restore(run: Config, merge_adapters: bool = True) -> "Params":
    """Returns the newest parameters of a run with a checkpoint on one device."""
    from jaxstack import sharding
    from jaxstack.families.context import make_context
    from jaxstack.training.services import init_from

    model = replace(run.model, pad_vocab_to=None)
    alone = replace(run, model=model, mesh=MeshConfig(data=1), pipeline=PipelineConfig())
    mesh = sharding.make_mesh(alone.mesh, 1, sharding.find_devices()[:1])
    return init_from.restore_params(alone, make_context(alone, mesh), merge_adapters=merge_adapters)


def _write_branch(run: Path, folder: Path, branch: Literal["understanding", "generation"]) -> None:
    """Makes a run directory of one branch with the trunk, which begins at step 0 with the parameters of a run."""
    from jaxstack import sharding
    from jaxstack.checkpoint import manifest, run_dir, store
    from jaxstack.families import branches
    from jaxstack.families.context import make_context
    from jaxstack.hf import safetensors
    from jaxstack.training.services import init_from
    from jaxstack.training.state import Recipe, abstract_state, make_state, start_from

    source = init_from.find_source(str(run), "RUN")
    if source.model.family != "branches" or not isinstance(source, Config):
        raise ConfigError(f"{run} has model.family={source.model.family}, without branches. Leave out --branch.")
    saved = run_dir.checkpoints(Path(source.run.dir))
    model, values = branches.extract(replace(source.model, pad_vocab_to=None), _restore(source), branch)
    data = source.data
    if model.family == "decoder":
        data = replace(data, mask_id=None, mask_words=False, mask_phrases=None)
    cfg = replace(
        source,
        run=replace(source.run, dir=str(folder), init_from=None),
        model=model,
        data=data,
        mesh=MeshConfig(),
        pipeline=PipelineConfig(),
    )
    mesh = sharding.make_mesh(MeshConfig(data=1), cfg.microbatch_size, sharding.find_devices()[:1])
    ctx = make_context(cfg, mesh)
    state = start_from(cfg.model, make_state(Recipe.of(cfg), ctx, abstract_state(Recipe.of(cfg), ctx)), values)
    metadata = store.metadata(saved, max(manifest.complete_steps(saved))) | {"config": asdict(cfg), "next_batch": 0}
    metadata.pop("position", None)  # of the data of the other run
    with safetensors.new_folder(folder) as made:
        (made / "config.yaml").write_text(parse.to_yaml(cfg))
        (made / "tokenizer.json").write_bytes((Path(source.run.dir) / "tokenizer.json").read_bytes())
        with store.Checkpoints(cfg.checkpoint, run_dir.checkpoints(made)) as checkpoints:
            checkpoints.save(0, state, metadata)
    print(f"wrote {folder}: the run of a model with model.family={model.family}, at step 0")


def _write_adapters(run: Path, folder: Path, dtype: str, repo: str | None) -> None:
    """Writes the newest adapters of a run, or those that it starts with, and prints what the folder contains."""
    import jax.numpy as jnp

    from jaxstack import hf
    from jaxstack.hf import hub, peft, safetensors
    from jaxstack.models.context import Context
    from jaxstack.training.services import init_from

    source = init_from.find_source(str(run), "RUN")
    base: str | None
    if isinstance(source, hf.PretrainedFolder):
        with source:
            adapters = source.adapters
            base = str(source.folder)
            if adapters is None:
                raise ConfigError(f"{run} has no adapters yet. Train it until it has saved a checkpoint.")
            model = replace(source.model, lora=adapters.lora)
            family = source.family
            values = peft.place(adapters, source.model, Context())
    else:
        if not isinstance(source, Config) or not source.model.lora.rank:
            raise ConfigError(f"{run} has no adapters: model.lora.rank=0. Leave out --adapter to write the model.")
        base = _base_folder(str(source.run.init_from))
        model = source.model
        family = hf.family_of(source.model.base)
        values = _restore(source, merge_adapters=False)
    with safetensors.new_folder(folder) as made:
        peft.save_adapters(made, family, model, values, jnp.dtype(dtype), base)
        if repo is not None:
            _write_card(
                made, run, repo, f"Adapters of rank {model.lora.rank} for a {family} model", dtype, adapters=True
            )
    print(f"wrote {folder}: adapters of rank {model.lora.rank} for {base or f'a {family} model'} in {dtype}")
    if base is None:
        print("Their base model is the run of run.init_from: write it with `jaxstack export`, and name it to PEFT.")
    if repo is not None:
        print(f"sent it to {hub.push(folder, repo)}")


def _base_folder(name: str) -> str | None:
    """Returns the Hugging Face folder that `run.init_from` leads to, or `None` if it leads to a trained run."""
    from jaxstack import hf
    from jaxstack.training.services import init_from

    if not (Path(name) / "config.yaml").is_file():
        return name  # it may have been removed
    source = init_from.find_source(name, "run.init_from")
    if not isinstance(source, hf.PretrainedFolder):
        return None
    with source:
        return None if source.adapters else str(source.folder)
