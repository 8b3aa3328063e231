"""What the layers of a model read in addition to the residual stream."""

from dataclasses import dataclass, field, replace

import jax

from jaxstack.common.tree import PyTree
from jaxstack.models.params import random_key


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerInputs:
    """What the layers read in addition to the residual stream. `None` where a model or a batch has no such input.

    Attributes:
      arrays: what a family or a feature adds, by name.
      distance: with a cache, for each block of a step, distance from each cached token to the first new one [B, T].
      dropout_ids: number of each token of the residual stream, for dropout [B, S/n].
      encoder: the inputs of the encoder's layers, for an encoder-decoder; of the picture's tower, for two towers;
        of the branch `understanding`, for two branches; of the text's layers, for a diffusion model that reads texts.
      key: data of the PRNG key for dropout, of a stream and of a stack, see `dropout_key`.
      layer: index of the layer in its stack.
      positions: position of each token of the residual stream, [S/n] or [B, S/n].
      rope: cosine and sine of the positions within attention.
      rope_local: cosine and sine for layers with a window, if these layers have their own base.
      segment_ids: document of each token [B, S]. `None` means one document a row.
      side: side inputs, a tree of arrays that depend on parameters: a condition, or the output of an encoder. All
        layers of a stack read the same side inputs, which get gradients.
      tokens: ids [B, S].
    """

    arrays: dict[str, jax.Array] = field(default_factory=dict)
    distance: PyTree = None
    dropout_ids: jax.Array | None = None
    encoder: "LayerInputs | None" = None
    key: jax.Array | None = None
    layer: jax.Array | int | None = None
    positions: jax.Array | None = None
    rope: tuple[jax.Array, jax.Array] | None = None
    rope_local: tuple[jax.Array, jax.Array] | None = None
    segment_ids: jax.Array | None = None
    side: PyTree = None
    tokens: jax.Array | None = None

    def adding(self, **arrays: jax.Array | None) -> "LayerInputs":
        """Returns these inputs with more `arrays`; those that are `None` are left out."""
        return replace(self, arrays=self.arrays | {name: a for name, a in arrays.items() if a is not None})

    def of_stack(self, name: str, side: PyTree) -> "LayerInputs":
        """Returns what the layers of one stack read: its side inputs, and dropout keys that no other stack has."""
        encoder = None if self.encoder is None else self.encoder.of_stack(name, self.encoder.side)
        key = None if self.key is None else jax.random.key_data(random_key(jax.random.wrap_key_data(self.key), name))
        return replace(self, side=side, encoder=encoder, key=key)

    def of_encoder(self) -> "LayerInputs":
        """Returns what the encoder's layers read, with the side inputs of their stack."""
        assert self.encoder is not None
        return replace(self.encoder, side=self.side)

    def dropout_key(self, *path: str | int | jax.Array) -> jax.Array | None:
        """Returns the dropout key of a site, or of a layer that has several sites: a PRNG key []. `None` means no
        dropout.

        Args:
          path: name of the site within the model, such as `embedding`, or index of the layer in its stack.
        """
        return None if self.key is None else random_key(jax.random.wrap_key_data(self.key), *path)
