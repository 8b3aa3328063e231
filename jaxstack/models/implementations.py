"""Lists the implementations of each op of a model by the keys of `KernelsConfig`, and selects those of a run."""

from collections.abc import Mapping
from typing import Any

from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

from jaxstack.config import Config, ConfigError, KernelsConfig, ModelConfig
from jaxstack.kernels import OP_IMPLEMENTATIONS, AttentionMask, implementation
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
    cfg: Config, mesh: Mesh | AbstractMesh, partitioner: str, reduce_dtype: DTypeLike
) -> dict[str, implementation.OpCase]:
    """Returns what is known of the operands of each op in a run, for `implementations`.

    Args:
      cfg: the run.
      mesh: its devices.
      partitioner: who inserts collectives.
      reduce_dtype: dtype in which gradients are summed over devices.
    """
    model = cfg.model
    return {
        "attention": {
            "head_dim": model.head_width,
            "softcap": model.attention_softcap,
            "segments": cfg.has_segments,
            "sequence_shards": mesh.shape["context"],
            "context_method": cfg.mesh.context_method,
            "mask": attention_mask(model),
            "bias": model.positions == "relative",
        },
        "norm": {"d_model": model.d_model, "partitioner": partitioner},
        "codes": {"scheme": cfg.kernels.decode_scheme},
        "decode": {"scheme": cfg.kernels.decode_scheme},
        "linear": {"summed_by_xla": reduce_dtype} if partitioner == "auto" else {},
    }


def attention_mask(model: ModelConfig) -> AttentionMask:
    """Returns the mask that an implementation of attention must support; the most demanding of those of a model."""
    if model.family == "encoder_decoder":
        return AttentionMask(kind="cross")
    return AttentionMask(max(model.windows), "causal" if model.family == "decoder" else "full")
