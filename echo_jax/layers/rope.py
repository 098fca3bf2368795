"""Rotary position embeddings, and their scaling to longer contexts."""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary wavelengths are stretched for positions beyond those of training.

    Raises:
      ValueError: for an unknown kind, or a factor or frequency out of range.
    """

    kind: Literal["linear", "llama3"] = "linear"
    # By how much all wavelengths (linear) or the long ones (llama3) grow.
    factor: float = 1.0
    # The other fields are for llama3: wavelengths above original_length / low_frequency
    # grow by factor, those below original_length / high_frequency do not change, and
    # in between the frequency is interpolated.
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    original_length: int = 8192  # positions that the model was first trained on

    def __post_init__(self):
        if self.kind not in ("linear", "llama3"):
            raise ValueError(
                f"rope scaling kind={self.kind!r} must be 'linear' or 'llama3'."
            )
        if not self.factor >= 1:
            raise ValueError(f"rope scaling factor={self.factor} must be at least 1.")
        if not 0 < self.low_frequency < self.high_frequency:
            raise ValueError(
                f"rope scaling low_frequency={self.low_frequency} must be positive and "
                f"below high_frequency={self.high_frequency}."
            )

    def stretch(self, frequencies: Float[Array, "half"]) -> Float[Array, "half"]:
        """The frequencies after scaling, in radians for each position.

        Source: Chen et al., "Extending Context Window of Large Language Models via
        Positional Interpolation", 2023 (linear); Grattafiori et al., "The Llama 3 Herd
        of Models", 2024, and the parameters in its released configurations (llama3).
        """
        if self.kind == "linear":
            return frequencies / self.factor
        turns = self.original_length * frequencies / (2 * math.pi)
        low, high = self.low_frequency, self.high_frequency
        kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
        return (1 - kept) * frequencies / self.factor + kept * frequencies


def apply_rope(
    x: Float[Array, "batch length heads head_dim"],
    positions: Int[Array, "*batch length"],
    theta: float,
    scaling: RopeScaling | None = None,
) -> Float[Array, "batch length heads head_dim"]:
    """Rotates the two halves of each head by angles that grow with position.

    Args:
      x: queries or keys.
      positions: position of each token, for each sequence if they differ.
      theta: base of the wavelengths.
      scaling: how the wavelengths are stretched.

    Returns:
      The rotated heads, in x's dtype.

    Raises:
      ValueError: if ``head_dim`` is odd.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding",
    2021; halves paired as in the Llama checkpoints of Hugging Face.
    """
    if x.shape[-1] % 2:
        raise ValueError(
            f"apply_rope pairs the halves of a head: head_dim={x.shape[-1]} is odd."
        )
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is not None:
        frequencies = scaling.stretch(frequencies)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
