"""Writes the newest parameters of a run as a Hugging Face folder, which `transformers` loads."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jsonargparse import Namespace

from jaxstack.config import Config, ConfigError, MeshConfig, PipelineConfig, parse
from jaxstack.config.parse import Parser, user_path

if TYPE_CHECKING:  # the package imports JAX, for which help must not wait
    from jaxstack.data.tokenizers import JsonObject
    from jaxstack.models.params import Params


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    parser.add_argument("run", metavar="RUN", type=user_path, help="run directory")
    parser.add_argument("folder", metavar="DIR", type=user_path, help="folder to write")
    parser.add_argument(
        "--dtype", type=Literal["float32", "bfloat16"], default="float32", help="dtype of the weights in the folder"
    )


def main(args: Namespace) -> None:
    """Writes the folder and prints what it contains.

    Raises:
      ConfigError: the run cannot be read, or the folder exists.
    """
    run, folder = Path(args.run), Path(args.folder)
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{run} is not a run directory: it has no config.yaml. Name the run.dir of a training run.")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before JAX is imported: an accelerator is not needed

    from jaxstack import hf
    from jaxstack.hf import originals, safetensors

    with safetensors.new_folder(folder) as made:
        cfg = parse.parse_config([f"--config={run / 'config.yaml'}"])
        tokenizer = json.loads(path.read_text()) if (path := run / "tokenizer.json").is_file() else None
        end = None if tokenizer is None else _write_tokenizer(tokenizer, made)
        model = replace(cfg.model.base, pad_vocab_to=None)
        family = hf.save_pretrained(made, model, _read_params(run), args.dtype, cfg.data.seq_len, end)
        if found := originals.find(run):
            originals.restore(found, tokenizer, made)
    print(f"wrote {folder}: a {family} model in {args.dtype}")
    if not (folder / "tokenizer.json").is_file():
        print("The folder has no tokenizer.json, because the tokenizer of this run is not of that kind.")


def _write_tokenizer(saved: "JsonObject", folder: Path) -> int | None:
    """Writes the run's tokenizer and chat template to the folder if there are any; returns the id of the EOS token."""
    from jaxstack import data

    if saved["kind"] == "hf":
        (folder / "tokenizer.json").write_text(json.dumps(saved["tokenizer"], ensure_ascii=False), "utf-8")
        if "chat" in saved:
            (folder / "chat_template.jinja").write_text(saved["chat"]["source"], "utf-8")
    return data.tokenizer_from_json(saved).eos_id


def _read_params(run: Path) -> "Params":
    """Returns the newest parameters of a run on one device, or its initial ones if it has not begun."""
    from jaxstack import hf, sharding
    from jaxstack.models.context import Context
    from jaxstack.training import init_from

    source: Config | hf.PretrainedFolder = init_from.find_source(str(run), "RUN")
    if isinstance(source, hf.PretrainedFolder):
        with source:
            return source.read_params()
    model = replace(source.model, pad_vocab_to=None)
    alone = replace(source, model=model, mesh=MeshConfig(data=1), pipeline=PipelineConfig())
    mesh = sharding.make_mesh(alone.mesh, 1, sharding.find_devices()[:1])
    return init_from.restore_params(alone, Context.create(alone, mesh))
