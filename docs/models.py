"""Renders the table of `docs/models.md`: what you can do with each Hugging Face family, by asking the code.

python docs/models.py
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

from jaxstack import families
from jaxstack.common.errors import ConfigError
from jaxstack.compress.calibrate import Walk
from jaxstack.compress.prune import smaller_sizes
from jaxstack.compress.quantize import why_own_layout
from jaxstack.config import Config, DataConfig, DenoiserConfig, MeshConfig, ModelConfig, SampleConfig, resolve
from jaxstack.families.context import make_context
from jaxstack.families.token_prediction import without_prediction
from jaxstack.hf.configs import from_json
from jaxstack.hf.families import FAMILIES
from jaxstack.models import params
from jaxstack.models.context import Context
from jaxstack.sharding import abstract_mesh

PAGE = Path(__file__).with_suffix(".md")
CHECKPOINTS = Path(__file__).parents[1] / "tests/hf/public/checkpoints.json"
AXES = ("tensor", "context", "expert", "pipe")
"""Mesh axes that not every model has. `data` and `fsdp` split every model."""
HEAD = ["`model_type`", "such as", "parameters", "generate", "quantise", "prune", *(f"`{a}`" for a in AXES)]


def published() -> dict[str, tuple[str, ModelConfig]]:
    """Returns for each family the first public checkpoint that is read, and its model."""
    files = json.loads(CHECKPOINTS.read_text(encoding="utf-8"))
    found: dict[str, tuple[str, ModelConfig]] = {}
    for name, one in sorted(files.items()):
        kind = one["config.json"]["model_type"]
        if kind in FAMILIES and kind not in found:
            try:
                model = from_json("config.json", one["config.json"]).model
                found[kind] = name, without_prediction(model)  # a run may leave modules out: --model.mtp.depth=0
            except ConfigError:  # such as a scaling of RoPE that is not read
                continue
    return {kind: found[kind] for kind in FAMILIES}


def split_over(model: ModelConfig, axis: str) -> str:
    """Returns whether two devices of a mesh axis can share a model: `yes`, `no`, or the setting that it needs."""
    if axis == "expert" and not model.moe.num_experts:
        return ""
    ways = [
        ("yes", MeshConfig(**{axis: 2})),
        ("all_gather", MeshConfig(context_method="all_gather", **{axis: 2})),
    ]
    learned = (DenoiserConfig(),) if model.family == "encoder_decoder" else ()
    for cell, mesh in ways:
        data = DataConfig(seq_len=256, target_len=64 if learned else None, batch_size=8, denoisers=learned)
        sample = SampleConfig(prompts=())  # some models train with `mesh.pipe`, and generate without it
        try:
            cfg = resolve(Config(model=model, mesh=mesh, data=data, sample=sample), None)
            layout = make_context(cfg, abstract_mesh(cfg.mesh, 8, 2)).layout
            layout.parameters(families.spec(cfg.model))
        except ConfigError:
            continue
        return cell
    return "no"


def whether(check: Callable[[], object]) -> str:
    """Returns `yes`, or `no` if the check refuses the model."""
    try:
        check()
    except ConfigError:
        return "no"
    return "yes"


def row(kind: str, name: str, model: ModelConfig) -> list[str]:
    """Returns the cells of a family."""
    size = params.count(families.spec(model))
    shown = f"{size / 1e9:.2f} B" if size >= 1e9 else f"{size / 1e6:.0f} M"
    quantised = whether(lambda: Walk.of(model, Context()))
    if quantised == "yes" and why_own_layout(model) is not None:
        quantised = "own"
    writes = "no" if model.family == "encoder" else "yes"
    prunes = whether(lambda: smaller_sizes(model, {}))
    return [f"`{kind}`", name, shown, writes, quantised, prunes, *(split_over(model, axis) for axis in AXES)]


def rendered(page: str) -> str:
    """Returns the page with the table of all families."""
    rows = [row(kind, *one) for kind, one in published().items()]
    lines = [HEAD, ["---"] * len(HEAD), *rows]
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    return re.sub(r"\| `model_type` \|.*\n(?:\|.*\n)+", lambda _: table, page, count=1)


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
