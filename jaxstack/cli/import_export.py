"""`jaxstack import DIR RUN [flags]` and `jaxstack export RUN DIR [--dtype bfloat16]`

`import` makes RUN, a run that has not begun: its `config.yaml` has the model and the tokenizer of the Hugging Face
folder DIR, begins with its weights, and has every flag of `jaxstack train` that is given. `export` writes a run's
newest parameters as a folder that `transformers` loads.
"""

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import yaml

from jaxstack import data, hf, sharding
from jaxstack.config import Config, ConfigError, DataConfig, MeshConfig, PipelineConfig, RunConfig, parse, resolve
from jaxstack.hf import safetensors
from jaxstack.models import family, params
from jaxstack.models.context import Context
from jaxstack.training import init_from

USAGE = "use `import DIR RUN [flags of jaxstack train]` or `export RUN DIR [--dtype float32|bfloat16]`"


def main(argv: list[str]) -> None:
    if argv[:1] in (["--help"], ["-h"]):
        print(__doc__)
        return
    if argv[:1] not in (["import"], ["export"]) or len(argv) < 3 or any(word.startswith("-") for word in argv[1:3]):
        raise ConfigError(f"{' '.join(argv[:3]) or 'nothing'} is no command; {USAGE}")
    (import_run if argv[0] == "import" else export_run)(Path(argv[1]), Path(argv[2]), argv[3:])


def import_run(folder: Path, run: Path, flags: list[str]) -> None:
    """Makes `run`, which begins with the weights of `folder`."""
    with safetensors.new_folder(run) as made, hf.PretrainedFolder(folder) as found:
        cfg = configuration(found, run, flags)
        name = cfg.data.tokenizer
        if name not in ("bytes", "chars"):
            tokenizer = data.make_tokenizer(name, ())
            cfg = resolve(cfg, tokenizer.vocab_size)
            (made / "tokenizer.json").write_text(json.dumps(tokenizer.to_json()))
        (made / "config.yaml").write_text(parse.to_yaml(cfg))
    size = params.count(family.spec(cfg.model.base))
    print(f"{folder} is a {found.family} model of {size:,} parameters in {' and '.join(found.dtypes)}")
    if found.ignored_values:
        shown = ", ".join(f"{key}={value}" for key, value in found.ignored_values.items())
        print(f"not taken over, for it acts on training alone: {shown}")
    if name in ("bytes", "chars"):
        print(
            f"data.tokenizer={name}, for {folder} has no tokenizer.json; name the model's own with --data.tokenizer=..."
        )
    print(f"wrote {run}; train it with `jaxstack train --config={run / 'config.yaml'}` and flags for the data")


def configuration(found: hf.PretrainedFolder, run: Path, flags: list[str]) -> Config:
    """The configuration that the flags mean, with model, tokenizer and weights of the folder.

    Raises:
      ConfigError: flags that say another model, or place.
    """
    folder = found.folder.resolve()
    begin = RunConfig(dir=str(run), init_from=str(folder))
    reach = found.model.max_positions or DataConfig.seq_len
    usual = {"data": {"seq_len": min(reach, DataConfig.seq_len)}}
    whole = yaml.safe_load(parse.to_yaml(Config(run=begin, model=replace(found.model, max_positions=None))))
    decided: dict[str, Any] = {
        "run": {"dir": begin.dir, "init_from": begin.init_from},
        "model": {key: value for key, value in whole["model"].items() if key != "lora"}
        | {"max_positions": found.model.max_positions},
    }
    if (folder / "tokenizer.json").is_file():
        decided["data"] = {"tokenizer": str(folder / "tokenizer.json")}
    with tempfile.TemporaryDirectory() as directory:
        first, last = Path(directory) / "usual.yaml", Path(directory) / "decided.yaml"
        first.write_text(yaml.safe_dump(usual))
        last.write_text(yaml.safe_dump(decided))
        cfg = parse.parse_config([f"--config={first}", *flags, f"--config={last}"], last)
    if different := hf.model_differences(found.model, cfg.model):
        raise ConfigError(f"{folder} holds another model ({'; '.join(different[:3])}); leave these flags out")
    if (cfg.run.dir, cfg.run.init_from) != (begin.dir, begin.init_from):
        raise ConfigError(f"run.dir and run.init_from are {run} and {folder} here; leave these flags out")
    return cfg


def export_run(run: Path, folder: Path, words: list[str]) -> None:
    """Writes the newest parameters of `run` to `folder`."""
    dtype, words = parse.take(words, "--dtype")
    dtype = dtype or "float32"
    if words or dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"{' '.join(words) or f'--dtype={dtype}'} is not understood; {USAGE}")
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{run} is no run directory: it holds no config.yaml")
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    with safetensors.new_folder(folder) as made:
        cfg = parse.parse_config([f"--config={run / 'config.yaml'}"], run)
        end = None
        if (run / "tokenizer.json").is_file():
            saved = json.loads((run / "tokenizer.json").read_text())
            end = data.tokenizer_from_json(saved).eos_id
            if saved["kind"] == "hf":
                (made / "tokenizer.json").write_text(json.dumps(saved["tokenizer"], ensure_ascii=False))
                if "chat" in saved:
                    (made / "chat_template.jinja").write_text(saved["chat"]["source"])
        source = init_from.find(str(run), "RUN")
        if isinstance(source, hf.PretrainedFolder):
            with source:
                values = source.read_params()
        else:
            alone = replace(source, mesh=MeshConfig(data=1), pipeline=PipelineConfig())
            mesh = sharding.make_mesh(alone.mesh, 1, jax.devices()[:1])
            values = init_from.restore(alone, Context.create(alone, mesh))
        family = hf.save_pretrained(made, cfg.model.base, values, dtype, cfg.data.seq_len, end)
    print(f"wrote {folder}: a {family} model in {dtype}")
    if not (folder / "tokenizer.json").is_file():
        print("without a tokenizer.json, for this run has none of that kind")
