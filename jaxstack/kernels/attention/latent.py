"""Attention of new tokens to a cache of latents, in the absorbed form of latent attention (arXiv:2405.04434, 2.1.2).

All heads read the same cache. A score is the product of a query with the latent, plus the product of its rotated part
with the rotated key. The result is a mean of latents.

Shape suffixes: B batch, S new tokens, H heads, L width of the latent, R width of the rotated key, T slots of the cache.
"""

import jax
import jax.numpy as jnp

from jaxstack.kernels.attention.reference import MASKED


@jax.named_scope("attention")
def cached_latent_attention(
    q: jax.Array,
    turned: jax.Array,
    latent: jax.Array,
    key: jax.Array,
    keys: jax.Array,
    latents: jax.Array,
    distance: jax.Array,
    *,
    scale: float,
    window: int = 0,
    softcap: float | None = None,
) -> jax.Array:
    """Returns means of latents [B, S, H, L] for the newest S tokens of each sequence.

    The cache is read in place, as by `cached_attention`.

    Args:
      q: queries, multiplied by their head's matrix of keys [B, S, H, L].
      turned: rotated parts of the queries [B, S, H, R].
      latent: latents of the tokens [B, S, L].
      key: rotated keys of the tokens [B, S, R].
      keys: cached rotated keys [B, R, T].
      latents: cached latents [B, T, L].
      distance: tokens from the token in each slot to the first of the newest tokens [B, T]. 0 or less masks the slot.
      scale, window, softcap: see `attention`.
    """
    new = jnp.arange(q.shape[1])
    ahead = distance[:, None] + new[:, None]  # [B, S, T]
    visible = jnp.broadcast_to((distance > 0)[:, None], ahead.shape)
    own = new[:, None] - new
    visible_own = own >= 0
    if window:
        visible &= ahead < window
        visible_own &= own < window
    sums = {"preferred_element_type": jnp.float32}
    cached = jnp.einsum("bshl,btl->bsht", q, latents, **sums) + jnp.einsum("bshr,brt->bsht", turned, keys, **sums)
    among = jnp.einsum("bshl,btl->bsht", q, latent, **sums) + jnp.einsum("bshr,btr->bsht", turned, key, **sums)
    scores = scale * jnp.concatenate([cached, among], -1)  # [B, S, H, T + S]
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    seen = jnp.concatenate([visible, jnp.broadcast_to(visible_own, (*visible.shape[:2], new.size))], -1)
    weights = jax.nn.softmax(jnp.where(seen[:, :, None], scores, MASKED), -1).astype(latent.dtype)
    slots = latents.shape[1]
    mixed = jnp.einsum("bsht,btl->bshl", weights[..., :slots], latents, **sums)
    mixed += jnp.einsum("bsht,btl->bshl", weights[..., slots:], latent, **sums)
    return mixed.astype(q.dtype)
