"""From a number of parameters and tokens to a configuration: the model's shape, the batch, the learning rate.

Each rule names its source. They give a place to start; runs of small models and the noise scale say more.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from jaxstack import families
from jaxstack.config import ConfigError, ModelConfig, OptimConfig
from jaxstack.models import params
from jaxstack.planner.scaling_law import BESIROGLU

REFERENCE_BATCH = 2**19
"""Tokens of a batch of nanochat's model of depth 12."""
REFERENCE_TOKENS = 1.156e9
"""Training tokens of nanochat's model of depth 12: 10.5 for each of the 110.1e6 weights of its matrices and its head
(12 x 12 x 768^2 + 32768 x 768)."""
RECIPE_LENGTH = 4096
"""Tokens of a sequence in the square-root rule, which counts batches in sequences."""
SHORT = 20
"""Tokens per parameter above which a run is over-trained, and its learning rate is lower."""


def parameters_of(model: ModelConfig) -> int:
    """Returns the number of parameters, with embeddings, as the scaling law counts them.

    Of a mixture of experts these are the parameters that each token uses.
    """
    moe = model.moe
    return sum(
        p.size * moe.choices // moe.num_experts if "experts" in p.axes else p.size
        for p in params.flat_spec(families.spec(model)).values()
    )


def batch_tokens(tokens: float) -> int:
    """Returns the tokens of a batch for a run: a power of two near 2^19 (tokens / 1.156e9)^0.383, nanochat's rule.

    The exponent is from Bergsma et al. 2025 (arXiv:2505.13738).
    """
    return 2 ** max(0, round(math.log2(REFERENCE_BATCH * (tokens / REFERENCE_TOKENS) ** 0.383)))


def optimizer(base: OptimConfig, batch: float, width: int, tokens: float, parameters: float, steps: int) -> OptimConfig:
    """Returns AdamW with the learning rate, decay of the second moment and schedule of the square-root rule.

    With B as the batch in sequences of 4096 tokens, the rate is 0.33 sqrt(B) / width, and b2 is 0.98^(B / 128), but
    between 0.9 and 0.9999: a half-life of 18e6 tokens. Runs of more than `SHORT` tokens per parameter have a lower
    rate, by the power -0.3 of their tokens. The constants are from Marin's sweeps of 2025 (its pull request 3292).
    Marin's own recipe differs: AdamC, cautious updates, and decays and caps that this rule does not set.

    Args:
      base: the optimizer, whose other keys stay.
      batch: tokens of a batch.
      width: width of the model.
      tokens: training tokens of the run.
      parameters: number of parameters of the model.
      steps: number of steps of the run.
    """
    sequences = batch / RECIPE_LENGTH
    longer = max(1.0, tokens / parameters / SHORT)
    return replace(
        base,
        name="adamw",
        lr=float(f"{0.33 * math.sqrt(sequences) / width * longer**-0.3:.3g}"),
        b2=float(f"{min(max(0.98 ** (sequences / 128), 0.9), 0.9999):.4g}"),
        warmup_steps=steps // 10,
        schedule="wsd",
        decay_fraction=0.2,
        final_lr_fraction=0.0,
    )


def _head_counts() -> Iterator[int]:
    """Yields numbers of heads that are easy to split: even ones, above 16 with steps of an eighth of a power of two."""
    yield from (1, 2, 3, *range(4, 16, 2))
    for power in range(4, 10):
        yield from range(2**power, 2 ** (power + 1), 2 ** (power - 3))


def shapes(base: ModelConfig) -> Iterator[ModelConfig]:
    """Yields models of a family with other widths, and for each the depths around the family's proportions.

    The width of a head, the query heads for each key head, the number of experts, and the ratios of heads and of the
    widths of MLP and experts to the model's stay. Depth is proportional to width, and may differ by a quarter.
    """
    per_head = base.d_model / base.num_heads
    period = len(base.windows)
    group = base.num_heads // base.kv_heads
    for heads in _head_counts():
        if (heads * per_head) % 2 or (heads > group and heads % group):
            continue
        width = round(heads * per_head)
        multiple = 128 if width >= 512 else 8
        d_ff, expert = (
            None if size is None else max(1, round(width * size / base.d_model / multiple)) * multiple
            for size in (base.d_ff, base.moe.d_ff)
        )
        depth = base.num_layers * width / base.d_model
        least = max(1, int(0.75 * depth / period))
        most = max(1, math.ceil(1.25 * depth / period))
        for layers in range(least * period, min(most * period, 10_000) + 1, period):
            yield replace(
                base,
                d_model=width,
                num_heads=heads,
                num_kv_heads=None if base.num_kv_heads is None else max(1, heads // group),
                head_dim=base.head_width,
                d_ff=d_ff,
                moe=replace(base.moe, d_ff=expert),
                num_layers=layers,
            )


def shape(base: ModelConfig, parameters: float) -> ModelConfig:
    """Returns the model of a family whose number of parameters is nearest, with about the family's proportions.

    A difference of a quarter in depth counts as much as one of a twentieth in parameters.

    Raises:
      ConfigError: the family has no model of about this size.
    """
    found: dict[float, tuple[ModelConfig, int]] = {}
    for model in shapes(base):
        count = parameters_of(model)
        proportion = model.num_layers * base.d_model / (model.d_model * base.num_layers)
        found[abs(math.log(count / parameters)) + 0.2 * abs(math.log(proportion))] = model, count
        if count > 4 * parameters:
            break
    model, count = found[min(found)]
    if not 0.5 < count / parameters < 2:
        raise ConfigError(
            f"the best size for the budget is {parameters:.3g} parameters, and the nearest model of this family has "
            f"{count:.3g}. "
            + (
                f"Raise the budget to {smallest_budget(count):.2g} FLOPs, or name a family with a smaller "
                f"vocabulary or head by --config, such as quickstart."
                if count > parameters
                else "Lower the budget."
            )
        )
    return model


def smallest_budget(parameters: float) -> float:
    """Returns the training FLOPs for which a number of parameters is best by the law."""
    law = BESIROGLU
    exponent = (law.parameters_exponent + law.tokens_exponent) / law.tokens_exponent
    return float((parameters / law.optimum(1.0)[0]) ** exponent)
