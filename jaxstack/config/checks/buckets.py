"""The checks of `data.buckets`: lengths of rows against each other, the batch, the model and the mesh."""

import math
from itertools import pairwise

from jaxstack.common.counts import plural
from jaxstack.config.bounds import require
from jaxstack.config.data import DataConfig
from jaxstack.config.groups import Groups
from jaxstack.config.parallel import MeshConfig, sequence_parts

_SHOWN = 5  # lengths in an error message


def check_buckets(cfg: Groups) -> None:
    """Checks that the lengths of `data.buckets` ascend, and that data, model and mesh allow them.

    Raises:
      ConfigError: they do not.
    """
    data = cfg.data
    require(
        bool(data.buckets) or data.max_padding == type(data).max_padding,
        f"data.max_padding={data.max_padding} is for data.buckets=auto, but data.buckets is empty. Use auto, or leave "
        f"data.max_padding out.",
    )
    if data.keeps_documents:
        _check_documents(cfg)
    if data.buckets in ("auto", ()):
        return
    lengths = data.lengths
    require(
        lengths[0] > 0 and all(a < b for a, b in pairwise(lengths)),
        f"data.buckets={_show(data)} is not in ascending order of lengths from 1 on. Sort it, and name each once.",
    )
    require(
        lengths[-1] == data.seq_len,
        f"data.buckets={_show(data)} does not end with data.seq_len={data.seq_len}, the longest row. Use "
        f"--data.seq_len={lengths[-1]}, or change the last bucket.",
    )
    stages = cfg.pipeline.microbatches if cfg.mesh.known_sizes["pipe"] > 1 else None
    require_lengths(cfg, cfg.mesh, stages or 1)


def _check_documents(cfg: Groups) -> None:
    """Refuses what has no documents, or would compute something else in rows of another length."""
    data = cfg.data
    model = cfg.model
    key = f"data.buckets={_show(data)}" if data.buckets else "data.packing=best_fit"
    require(
        not (data.buckets and data.packing),
        f"{key} puts one document in each row, but data.packing={str(data.packing).lower()} several. Use one of them.",
    )
    require(
        not data.denoisers,
        f"{key} keeps documents complete, but data.denoisers fills rows with text of one length. Use one of them.",
    )
    fixed = model.masks_tokens or model.family in ("contrastive", "diffusion")
    require(
        not fixed,
        f"{key} is for rows of documents, but the rows of model.family={model.family} are always full. Leave it out.",
    )
    capacity = model.moe.capacity_factor if model.moe.num_experts else None
    require(
        capacity is None or not data.buckets,
        f"{key}: padding would change how many tokens model.moe.capacity_factor={capacity} allows. Use "
        f"capacity_factor=null (dropless), or no buckets.",
    )


def require_lengths(cfg: Groups, mesh: MeshConfig, microbatches: int) -> None:
    """Checks that a mesh divides the batches of all buckets.

    Args:
      mesh: the sizes of its axes; an open one counts as 1.
      microbatches: number of microbatches of a pipeline.

    Raises:
      ConfigError: it does not divide the rows or the length of one. The message has lengths that work.
    """
    data = cfg.data
    sizes = mesh.known_sizes
    parts = sequence_parts(mesh)
    if data.buckets in ("auto", ()):
        return
    rows = cfg.train.grad_accum * microbatches * math.prod(sizes[axis] for axis in ("data", "fsdp", "expert"))
    pairs = cfg.model.family == "encoder_decoder"
    works = working_lengths(data, rows, parts, pairs)
    wrong = [length for length in data.lengths if length not in works]
    near = sorted(sorted(works, key=lambda n: max(n / wrong[0], wrong[0] / n))[:_SHOWN]) if wrong else []
    advice = f"Lengths that work: {', '.join(map(str, near))}" if near else "No length works"
    needs = [f"divide the {plural(data.batch_size * data.seq_len, 'token', spec=',')} of a batch into whole rows"]
    if rows > 1:
        needs.append(f"leave a multiple of {plural(rows, 'row')} for mesh, train.grad_accum and microbatches")
    if parts > 1:
        needs.append(f"be a multiple of {parts} for mesh.context={sizes['context']} and mesh.tensor={sizes['tensor']}")
    if pairs:
        needs.append(f"shorten data.target_len={data.target_length} in proportion")
    require(
        not wrong,
        f"data.buckets={_show(data)}: rows of {', '.join(map(str, wrong))} tokens do not work. A length must "
        f"{' and '.join(needs)}. {advice}.",
    )


def working_lengths(data: DataConfig, rows: int, parts: int, pairs: bool) -> list[int]:
    """Returns all lengths that a bucket may have, ascending.

    Args:
      data: the longest row, and the tokens of a batch.
      rows: what the number of rows must be a multiple of.
      parts: what a length must be a multiple of.
      pairs: whether rows have targets, whose number is in proportion.
    """
    tokens = data.batch_size * data.seq_len
    targets = data.target_length if pairs else 0
    return [
        length
        for length in range(parts, data.seq_len + 1, parts)
        if tokens % (length * rows) == 0 and targets * length % (data.seq_len * parts) == 0
    ]


def _show(data: DataConfig) -> str:
    return "auto" if data.buckets == "auto" else str(list(data.buckets))
