"""Rotary positions: their frequencies, scaling for longer contexts, and the rotation of queries and keys.

Suffixes: B batch, S sequence, H heads, K head width, R rotated elements of a head.
"""

import math

import jax
import jax.numpy as jnp

from jaxstack.config import ModelConfig


def rope_tables(cfg: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine of RoPE (Su et al. 2021, arXiv:2104.09864, section 3.4.2), float32.

    `cfg.rope_scaling` reduces frequencies, see `_scaled`.

    Args:
      positions: integer positions in tokens, [..., S].

    Returns:
      Two arrays [..., S, R/2], of the R elements of a head that are rotated.
    """
    half = cfg.rotary_width // 2
    frequencies = cfg.rope_theta ** -(jnp.arange(half, dtype=jnp.float32) / half)  # radians per token
    factor = 1.0
    if cfg.rope_scaling.factor != 1:
        frequencies, factor = _scaled(cfg, frequencies)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    tables = jnp.cos(angles), jnp.sin(angles)
    return tables if factor == 1 else (tables[0] * factor, tables[1] * factor)


def _scaled(cfg: ModelConfig, frequencies: jax.Array) -> tuple[jax.Array, float]:
    """Returns the frequencies [R/2] for a longer context, and the factor on cosine and sine.

    `llama3` is Llama 3.1's rule, and `dynamic` raises RoPE's base (NTK). `yarn` is by Peng et al. 2023
    (arXiv:2309.00071, section 3.2), and `longrope` by Ding et al. 2024 (arXiv:2402.13753), with the factor on cosine
    and sine of Phi-3.5.
    """
    scaling = cfg.rope_scaling
    if scaling.kind == "longrope":
        wider = math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_position))
        sharper = wider if scaling.attention_factor is None else scaling.attention_factor
        return frequencies / jnp.asarray(scaling.factors, jnp.float32), sharper
    if scaling.kind == "dynamic":
        half = len(frequencies)
        longer = scaling.factor if scaling.long_context else 1.0  # than the original context
        base = scaling.factor * longer - (scaling.factor - 1)
        return frequencies * base ** -(jnp.arange(half, dtype=jnp.float32) / max(half - 1, 1)), 1.0
    if scaling.kind == "linear":
        return frequencies / scaling.factor, 1.0
    # `keep` is 0 where few turns fit in the original context (the frequency is scaled in full), and 1 where many do.
    if scaling.kind == "llama3":
        turns = scaling.original_max_position * frequencies / (2 * jnp.pi)
        keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        return frequencies * _mixed(keep, scaling.factor), 1.0
    half = len(frequencies)
    low, high = (
        half * math.log(scaling.original_max_position / (2 * math.pi * turns)) / math.log(cfg.rope_theta)
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )  # the elements that turn as often in the original context
    low = max(math.floor(low) if scaling.truncate else low, 0)
    high = min(math.ceil(high) if scaling.truncate else high, 2 * half - 1)
    keep = 1 - (jnp.arange(half) - low) / (high - low or 0.001)
    factor = scaling.attention_factor
    return frequencies * _mixed(keep, scaling.factor), 0.1 * math.log(scaling.factor) + 1 if factor is None else factor


def _mixed(keep: jax.Array, factor: float) -> jax.Array:
    """Returns what frequencies are multiplied by: 1 where `keep` is 1, and 1 / factor where it is 0."""
    keep = jnp.clip(keep, 0.0, 1.0)
    return keep + (1 - keep) / factor


def rotate(x: jax.Array, rope: tuple[jax.Array, jax.Array], interleaved: bool = False) -> jax.Array:
    """Applies RoPE to the first R elements of each head, where R / 2 is the width of the tables.

    In the half-rotation form of most Hugging Face models, element i forms a pair with i + R/2.

    Args:
      x: queries or keys [B, S, H, K].
      rope: cosine and sine, [S, R/2] or [B, S, R/2].
      interleaved: whether pairs are neighbours, the elements 2i and 2i + 1 (GPT-J, Cohere).
    """
    cos, sin = (table[..., None, :] for table in rope)
    width = 2 * cos.shape[-1]
    wide = x[..., :width].astype(jnp.float32)
    # The gradient of `split` is one concatenation; the gradients of two slices are padded to full width and added.
    a, b = (wide[..., ::2], wide[..., 1::2]) if interleaved else jnp.split(wide, 2, axis=-1)
    pairs = a * cos - b * sin, b * cos + a * sin
    rotated = jnp.stack(pairs, axis=-1).reshape(wide.shape) if interleaved else jnp.concatenate(pairs, axis=-1)
    rotated = rotated.astype(x.dtype)
    return rotated if width == x.shape[-1] else jnp.concatenate([rotated, x[..., width:]], axis=-1)
