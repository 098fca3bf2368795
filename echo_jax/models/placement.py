"""Sizes that fit an axis: padded heads, features and vocabularies.

A model whose heads do not divide the ranks is laid out with more of them. Key-value
heads may stand in several copies, each serving a part of its query heads; what is left
over is padding, heads of zeros whose output projection is zero. The padded model
computes what the unpadded one does.

Padding stays zero in training as long as no head is copied: query, key and value of
such a head are zero, hence its output and the gradient of its output projection; that
projection is zero, hence the gradients of the other three. The same holds for hidden
features, and readouts mask what pads a vocabulary.
"""

import dataclasses
import math

import numpy as np
from jaxtyping import Int

from echo_jax.models.config import DecoderConfig

NOTHING = -1  # entry of an index map that stands for padding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a model's heads and features go when its sizes are padded for an axis.

    Index maps give, for each position of the padded size, the position in the model as
    it is, or -1 for padding.

    Example:
        >>> smollm2 = DecoderConfig(num_heads=9, num_kv_heads=3, head_dim=64)
        >>> fitted = fit_to_ranks(smollm2, 2)
        >>> fitted.padded.num_heads, fitted.padded.num_kv_heads
        (12, 4)
    """

    config: DecoderConfig  # the model as it is
    padded: DecoderConfig  # the same with sizes that the ranks divide
    copies: int  # of each key-value head

    def kv_heads(self) -> Int[np.ndarray, "padded_kv_heads"]:
        """Which key-value head stands in each place."""
        place = np.arange(self.padded.num_kv_heads) // self.copies
        return np.where(place < self.config.num_kv_heads, place, NOTHING)

    def query_heads(self) -> Int[np.ndarray, "padded_heads"]:
        """Which query head stands in each place: beside its key-value head."""
        served = self.padded.num_heads // self.padded.num_kv_heads
        group = self.config.num_heads // self.config.num_kv_heads
        place, offset = np.divmod(np.arange(self.padded.num_heads), served)
        within = (place % self.copies) * served + offset
        head = self.kv_heads()[place] * group + within
        return np.where((self.kv_heads()[place] >= 0) & (within < group), head, NOTHING)

    def mlp_features(self) -> Int[np.ndarray, "padded_mlp_width"]:
        """Which hidden feature stands in each place."""
        return _extend(self.config.mlp_width, self.padded.mlp_width)

    def tokens(self) -> Int[np.ndarray, "rows"]:
        """Which token each row of the vocabulary's tables is for."""
        multiple = self.padded.vocab_multiple
        rows = -(-self.config.vocab_size // multiple) * multiple
        return _extend(self.config.vocab_size, rows)

    def features(self, heads: Int[np.ndarray, "heads"]) -> Int[np.ndarray, "features"]:
        """An index map of heads as one of their features."""
        dim = self.config.head_dim
        features = heads[:, None] * dim + np.arange(dim)
        return np.where(heads[:, None] >= 0, features, NOTHING).reshape(-1)


def fit_to_ranks(
    config: DecoderConfig, ranks: int, *, allow_copies: bool = True
) -> Placement:
    """The cheapest layout of a model over an axis of this size.

    Of all numbers of copies of a key-value head the one with the fewest rows of
    projections on a rank. A model whose heads divide the ranks stays as it is.

    Args:
      config: the model as it is.
      ranks: size of the tensor-parallel axis.
      allow_copies: whether key-value heads may stand in several copies. Without, what
        is padded stays zero in training, at the price of more padding.

    Raises:
      ValueError: if ``ranks`` is not at least 1.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1.")
    group = config.num_heads // config.num_kv_heads

    def sizes(copies: int) -> tuple[int, int]:
        """Key-value heads on a rank, and query heads of each."""
        return -(-config.num_kv_heads * copies // ranks), -(-group // copies)

    def rows(copies: int) -> int:
        kv_heads, served = sizes(copies)
        return kv_heads * (served + 1)

    copies = min(range(1, group + 1 if allow_copies else 2), key=rows)
    kv_heads, served = sizes(copies)
    padded = dataclasses.replace(
        config,
        num_kv_heads=kv_heads * ranks,
        num_heads=kv_heads * ranks * served,
        mlp_width=-(-config.mlp_width // ranks) * ranks,
        vocab_multiple=math.lcm(config.vocab_multiple, ranks),
    )
    return Placement(config=config, padded=padded, copies=copies)


def _extend(size: int, padded: int) -> Int[np.ndarray, "padded"]:
    place = np.arange(padded)
    return np.where(place < size, place, NOTHING)
