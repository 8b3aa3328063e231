"""The path from a picture to noise, on which a diffusion model learns a velocity."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxstack.config import ModelConfig


class Path(NamedTuple):
    """A point on the path from a picture x to noise e, at one time: it is a x + b e.

    The velocity is the derivative of this point with respect to time, where the path is a circle divided by pi / 2. A
    straight path (Lipman et al. 2022, arXiv:2210.02747) has the velocity e - x. A circle has a e - b x (Salimans and Ho
    2022, arXiv:2202.00512, appendix D), with a = cos(pi t / 2) and b = sin(pi t / 2).

    Attributes:
      a: share of the picture.
      b: share of the noise.
      da, db: the velocity is da x + db e.
    """

    a: jax.Array
    b: jax.Array
    da: jax.Array
    db: jax.Array

    @classmethod
    def at(cls, kind: str, time: jax.Array) -> "Path":
        """Returns the path `kind` (`model.diffusion.path`) at times from 0 to 1, such as [B, S, 1]."""
        if kind == "flow":
            return cls(1 - time, time, -jnp.ones_like(time), jnp.ones_like(time))
        a, b = jnp.cos(jnp.pi / 2 * time), jnp.sin(jnp.pi / 2 * time)
        return cls(a, b, -b, a)

    def mix(self, clean: jax.Array, noise: jax.Array) -> jax.Array:
        """Returns the noisy picture [B, S, P], from the picture and noise [B, S, P]."""
        return self.a * clean + self.b * noise

    def velocity(self, clean: jax.Array, noise: jax.Array) -> jax.Array:
        """Returns the velocity [B, S, P], which the model predicts, from the picture and noise [B, S, P]."""
        return self.da * clean + self.db * noise

    def solve(self, noisy: jax.Array, velocity: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the picture and the noise that have this noisy picture and this velocity, [B, S, P] each."""
        determinant = self.a * self.db - self.b * self.da
        clean = (self.db * noisy - self.b * velocity) / determinant
        return clean, (self.a * velocity - self.da * noisy) / determinant


def time_of(cfg: ModelConfig, timesteps: jax.Array) -> jax.Array:
    """Returns the times of timesteps [...], float32: the middles of equal parts of 0 to 1."""
    return (timesteps.astype(jnp.float32) + 0.5) / cfg.moe.max_timestep
