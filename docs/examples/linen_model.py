"""A small residual CNN in Flax linen, with batch norm. It has no annotations of dimensions or devices."""

import jax
import jax.numpy as jnp
from flax import linen as nn


class Residual(nn.Module):
    channels: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        shape = (self.stride, self.stride)
        y = nn.Conv(self.channels, (3, 3), shape, use_bias=False, name="conv1")(x)
        y = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9, name="norm1")(y))
        y = nn.Conv(self.channels, (3, 3), use_bias=False, name="conv2")(y)
        y = nn.BatchNorm(use_running_average=not train, momentum=0.9, name="norm2")(y)
        if x.shape != y.shape:
            x = nn.Conv(self.channels, (1, 1), shape, use_bias=False, name="shortcut")(x)
        return nn.relu(x + y)


class CNN(nn.Module):
    classes: int
    channels: int = 16

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Returns the logits [batch, classes] of images [batch, height, width, colours]."""
        x = nn.Conv(self.channels, (3, 3), name="stem")(images)
        x = Residual(2 * self.channels, stride=2, name="block")(x, train)
        return nn.Dense(self.classes, name="head")(jnp.mean(x, axis=(1, 2)))
