"""The choice of kernels: which implementation runs each op of a model, and how it is selected."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxstack.config import ConfigError, KernelsConfig, ModelConfig
from jaxstack.config.scheme import Scheme
from jaxstack.kernels import OP_IMPLEMENTATIONS, AttentionMask, implementation
from jaxstack.kernels.cross_entropy import CHUNK_TOKENS
from jaxstack.models.layout import Layout
from jaxstack.moe import dispatch


def _reads_no_codes(case: implementation.OpCase) -> str:
    scheme = case.get("scheme")
    return "" if scheme is None else f"reads float weights, and kernels.decode_weights asks for {scheme.weights}"


OPS = OP_IMPLEMENTATIONS | {
    "moe": dispatch.IMPLEMENTATIONS,
    "layers": {"scan": implementation.Implementation(), "unrolled": implementation.Implementation()},
    "update": {"branch": implementation.Implementation(), "select": implementation.Implementation()},
    "decode": {
        "scan": implementation.Implementation(unsupported_reason=_reads_no_codes),
        "unrolled": implementation.Implementation(),
    },
}
"""The implementations of each op, by the keys of `KernelsConfig`."""


@dataclass(frozen=True)
class Ops:
    """The implementation that runs each op of a model. The default runs on any platform.

    Attributes:
      platform: `cpu`, `gpu` or `tpu`, if it is known.
      attention, linear, norm, gelu, cross_entropy: implementation of each op in `jaxstack.kernels`.
      moe: implementation of the experts' matmuls, see `jaxstack.moe.MoEOptions`.
      layers: how the layers of a training step run: `scan`, or `unrolled`, which compiles each of them.
      update: how a bad step is skipped: `branch`, or `select` after an update that always runs.
      decode: how a new token runs through the layers: `scan`, or `unrolled` with a copy of each layer's weights.
      decode_weights: format of these copies on one device, see `jaxstack.config.KernelsConfig`; `None` means floats.
      codes: how matrices that are kept as codes are multiplied.
      max_documents: most documents of a row, `data.max_documents`; `None` means that it is not known.
      loss_chunk: tokens whose logits are in memory at a time, if `cross_entropy` is `chunked`.
      quant: 8-bit format of the matmuls of linear layers, or `none`, see `jaxstack.config.TrainConfig`.
    """

    platform: str = ""
    attention: str = "xla"
    linear: str = "xla"
    norm: str = "xla"
    gelu: str = "xla"
    cross_entropy: str = "xla"
    moe: str = "ragged"
    layers: Literal["scan", "unrolled"] = "scan"
    update: Literal["branch", "select"] = "branch"
    decode: Literal["scan", "unrolled"] = "scan"
    decode_weights: Scheme | None = None
    codes: str = "xla"
    max_documents: int | None = None
    loss_chunk: int = CHUNK_TOKENS["cpu"]
    quant: Literal["none", "int8", "fp8", "fp8_tensorwise"] = "none"

    @property
    def by_name(self) -> dict[str, str]:
        """The implementation of each op, by its key of `KernelsConfig`."""
        return {op: getattr(self, op) for op in OPS if op != "codes" or self.decode_weights is not None}

    @property
    def whole_sequences(self) -> "Ops":
        """The ops for generation, where padding is a segment of its own.

        cuDNN's attention kernel supports no segments whose number is unknown; `pallas_gpu` takes its place, as `auto`
        would choose.
        """
        return replace(self, attention={"cudnn": "pallas_gpu"}.get(self.attention, self.attention))


def implementations(
    platform: str, wanted: KernelsConfig | None = None, cases: Mapping[str, implementation.OpCase] | None = None
) -> dict[str, Any]:
    """Returns the implementation of each op on a platform.

    Args:
      platform: `cpu`, `gpu` or `tpu`.
      wanted: the implementation that is asked for, by op. `None` means `auto` for all.
      cases: shapes and dtypes of each op's operands where they are known, see `jaxstack.kernels.implementation`.

    Raises:
      ConfigError: an implementation that does not run there.
    """
    wanted, cases = wanted or KernelsConfig(), cases or {}
    try:
        return {
            op: implementation.select_implementation(op, table, getattr(wanted, op), platform, cases.get(op, {}))
            for op, table in OPS.items()
        }
    except ValueError as error:
        raise ConfigError(f"kernels.{error}") from error


def op_cases(
    model: ModelConfig, layout: Layout, scheme: Scheme | None, segments: bool, max_documents: int | None
) -> dict[str, implementation.OpCase]:
    """Returns the known shapes and dtypes of each op's operands in a run, for `implementations`.

    Args:
      model: the model whose ops run.
      layout: layout of the model's arrays on a mesh.
      scheme: format of the quantised matrices that decoding reads. `None` means floats.
      segments: whether batches have segment ids.
      max_documents: most segments of a row, if it is known.
    """
    assert layout.mesh is not None
    return {
        "attention": {
            "head_dim": model.head_width,
            "value_dim": model.value_width,
            "softcap": model.attention_softcap,
            "segments": segments,
            "max_documents": max_documents,
            "sequence_shards": layout.mesh.shape["context"],
            "context_method": layout.context_method,
            "mask": attention_mask(model),
            "bias": model.positions == "relative",
            "sinks": model.attention_sinks,
        },
        "norm": {"d_model": model.d_model, "partitioner": layout.partitioner},
        "codes": {"scheme": scheme},
        "decode": {"scheme": scheme},
        "linear": {"summed_by_xla": layout.reduce_dtype} if layout.partitioner == "auto" else {},
    }


def attention_mask(model: ModelConfig) -> AttentionMask:
    """Returns the mask that an implementation of attention must support; the most demanding mask of a model."""
    if model.family == "encoder_decoder":
        return AttentionMask(kind="cross")
    return AttentionMask(max(model.windows), "causal" if model.family == "decoder" else "full")
