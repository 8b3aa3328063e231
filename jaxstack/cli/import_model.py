"""Makes the run RUN from the Hugging Face folder DIR, with its model, tokenizer and weights.

`jaxstack train --config=RUN/config.yaml` starts the run. All flags of `jaxstack train` can be given.
"""

import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from jsonargparse import Namespace

from jaxstack.common import files
from jaxstack.common.counts import plural
from jaxstack.config import Config, ConfigError, DataConfig, ModelConfig, RunConfig, resolve
from jaxstack.config.bounds import PositiveInt
from jaxstack.config.reading import parse
from jaxstack.config.reading.parse import Parser, user_path

if TYPE_CHECKING:  # `jaxstack.hf` imports JAX, for which help must not wait
    from jaxstack import hf


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    parser.add_argument(
        "folder", metavar="DIR", type=user_path, help="Hugging Face folder: config.json and safetensors"
    )
    parser.add_argument("out", metavar="RUN", type=user_path, help="run directory to make")
    parser.add_argument(
        "--pad_vocab_to", type=PositiveInt | None, default=None, help="the same as --model.pad_vocab_to"
    )
    parser.add_argument(
        "--adapter",
        metavar="ADAPTER",
        type=user_path,
        default=None,
        help="folder in PEFT's format, with adapters of the model",
    )
    parser.add_config(default=None)


def main(args: Namespace) -> None:
    """Makes the run directory and prints what it contains.

    Raises:
      ConfigError: the folder cannot be read, or a flag contradicts it.
    """
    from jaxstack import data, hf
    from jaxstack.data import chat
    from jaxstack.data.tokenizers import same_vocabulary
    from jaxstack.hf import originals, safetensors, vocabulary_files
    from jaxstack.training.services import init_from

    folder = Path(args.folder)
    run = Path(args.out)
    flags = list(args.words)
    for path in (args.folder, args.out):
        flags.remove(next(word for word in flags if user_path(word) == path))
    flags = [re.sub(r"^--pad_vocab_to(?==|$)", "--model.pad_vocab_to", word) for word in flags]
    flags = [re.sub(r"^--adapter(?==|$)", "--run.init_adapter", word) for word in flags]
    adapter = None if args.adapter is None else Path(args.adapter)
    with safetensors.new_folder(run) as made, hf.PretrainedFolder(folder, adapter) as found:
        has_tokenizer = (folder / "tokenizer.json").is_file()
        built = None if has_tokenizer else vocabulary_files.build_tokenizer(folder, found.family)
        originals.keep(folder, made, built)
        kept = Path(originals.FOLDER, "tokenizer.json")
        own = None if built is None else run.absolute() / kept
        cfg = run_config(found, run, [*(f"--config={path}" for path in args.files), *flags], own)
        name = cfg.data.tokenizer
        path = str(made / kept) if name == str(own) else name
        template = chat.read_template(path, required=False)
        tokenizer = data.make_tokenizer(path, (), template, cfg.data.special_tokens)
        tokenizer.name = name
        if built is not None and not same_vocabulary({"kind": "hf", "tokenizer": built}, tokenizer.to_json()):
            raise ConfigError(
                f"data.tokenizer={name}, but {folder} has another tokenizer, with other token ids. Remove the flag."
            )
        init_from.require_same_tokenizer(found, str(folder), DataConfig(tokenizer=name), tokenizer)
        if name not in ("bytes", "chars"):
            cfg = resolve(cfg, tokenizer.vocab_size)
            (made / "tokenizer.json").write_text(json.dumps(tokenizer.to_json()))
        (made / "config.yaml").write_text(parse.to_yaml(cfg))
    _print_model(found, cfg.model, cfg.train.quant, cfg.run.init_adapter)
    if name in ("bytes", "chars"):
        print(f"data.tokenizer={name}, because {folder} has no tokenizer.json. {vocabulary_files.advice(folder)}")
    if name == str(own):
        print(f"{folder} has no tokenizer.json; it was built from its vocabulary as transformers builds it")
    print(f"wrote {run}; train it with `jaxstack train --config={run / 'config.yaml'}` and flags for the data")


def _print_model(found: "hf.PretrainedFolder", model: ModelConfig, quant: str, adapter: str | None) -> None:
    """Prints what the folder contains, and which of its keys are not read."""
    from jaxstack import families
    from jaxstack.models import params

    size = params.count(families.spec(model.base))
    print(
        f"{found.folder} is a {found.family} model of {plural(size, 'parameter', spec=',')} in "
        f"{' and '.join(found.dtypes)}"
    )
    if found.formats:
        print(f"its matrices are quantised ({' and '.join(found.formats)}) and are read as float32")
    if found.inputs != "none":
        print(f"the run has train.quant={quant}, which rounds their inputs")
    if found.adapters is not None:
        print(f"{adapter} has adapters of rank {model.lora.rank} for {', '.join(model.lora.targets)}")
    if (capacity := found.ignored_values.pop("expert_capacity", None)) is not None:
        print(f"ignored: expert_capacity={capacity}, because jaxstack drops no token; see model.moe.capacity_factor")
    if found.ignored_values:
        shown = ", ".join(f"{key}={value}" for key, value in found.ignored_values.items())
        print(f"ignored, because they affect only training: {shown}")
    if found.unknown_values:
        shown = ", ".join(f"{key}={json.dumps(value)}" for key, value in found.unknown_values.items())
        print(f"warning: config.json has keys that jaxstack does not know, and ignores for their values: {shown}")
    if found.code:
        shown = ", ".join(sorted(map(str, found.code.values())))
        print(f"warning: auto_map names code that is not run ({shown}); the model is read as {found.family}")


def run_config(found: "hf.PretrainedFolder", run: Path, flags: Sequence[str], tokenizer: Path | None = None) -> Config:
    """Returns the configuration of the run: the folder's model, tokenizer and weights, and the flags for the rest.

    Args:
      flags: `--config` files, whose model and tokenizer are ignored, and dotted flags.
      tokenizer: the tokenizer.json that was built for a folder without one.

    Raises:
      ConfigError: a flag gives another model or directory.
    """
    from jaxstack import hf

    folder = found.folder.resolve()
    begin = RunConfig(dir=str(run), init_from=str(folder))
    usual: dict[str, Any] = {"data": _usual_data(found.model)}
    if found.inputs != "none":
        usual["train"] = {"quant": found.inputs}
    complete = json.loads(json.dumps(asdict(found.model)))  # with lists for tuples, as in YAML
    decided: dict[str, Any] = {
        "run": {"dir": begin.dir, "init_from": begin.init_from},
        "model": {key: value for key, value in complete.items() if key not in ("lora", "pad_vocab_to")}
        | {"max_positions": found.model.max_positions},
    }
    if found.adapters is not None:
        adapters = found.adapters.lora
        decided["model"]["lora"] = {"rank": adapters.rank, "alpha": adapters.alpha, "targets": [*adapters.targets]}
    if tokenizer is None and (folder / "tokenizer.json").is_file():
        tokenizer = folder / "tokenizer.json"
    if tokenizer is not None:
        decided["data"] = {"tokenizer": str(tokenizer)}
    with files.scratch_folder(Path(tempfile.gettempdir(), "jaxstack")) as scratch:
        first = scratch / "usual.yaml"
        last = scratch / "decided.yaml"
        first.write_text(yaml.safe_dump(usual))
        last.write_text(yaml.safe_dump(decided))
        cfg = parse.parse_config([f"--config={first}", *flags, f"--config={last}"])
    if different := hf.model_differences(found.model, cfg.model):
        raise ConfigError(f"{folder} contains another model ({'; '.join(different[:3])}). Remove these flags.")
    if found.adapters is not None and cfg.model.lora != found.adapters.lora:
        raise ConfigError(f"{cfg.run.init_adapter} has other adapters than model.lora. Remove the flags of model.lora.")
    if (cfg.run.dir, cfg.run.init_from) != (begin.dir, begin.init_from):
        raise ConfigError(f"run.dir and run.init_from are {run} and {folder} here. Remove these flags.")
    return cfg


def _usual_data(model: ModelConfig) -> dict[str, Any]:
    """Returns keys of the data with which every check of a configuration passes: an import needs no training data."""
    longest = (model.max_positions or DataConfig.seq_len) - model.first_position
    if model.rope_scaling.kind == "longrope":  # the factors for longer texts are a choice of the user
        longest = min(longest, model.rope_scaling.original_max_position)
    usual: dict[str, Any] = {"seq_len": min(longest, DataConfig.seq_len)}
    if model.family == "encoder_decoder":
        usual["denoisers"] = [{"rate": 0.15, "span": 3}]
    if model.labels:
        usual |= {"source": "labels", "path": "labels.jsonl"}
    return usual
