"""The size and kind of a decoder."""

import dataclasses
import math
from typing import Literal

import tyro

from echo_jax.layers.attention_kernel import AttentionChoice, check_choice
from echo_jax.layers.partitioning import check_divides
from echo_jax.layers.rope import RopeScaling

Remat = Literal["none", "layer", "save_sums"]

_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A pre-norm decoder of the Llama family; with ``qk_norm`` one of Qwen3's.

    Raises:
      ValueError: if a size is not positive, sizes do not fit each other, or
        ``attention="cudnn"`` is asked for with a dtype or a head that it is not used
        for.
    """

    vocab_size: int = 256  # token ids; 256 reads bytes
    num_layers: int = 4  # pairs of attention and feed-forward block
    width: int = 128  # features of the residual stream
    num_heads: int = 4  # query heads
    num_kv_heads: int = 4  # key-value heads; divides num_heads
    head_dim: int = 32  # features of one head; even
    mlp_width: int = 352  # hidden features of the feed-forward block
    rope_theta: float = 10_000.0  # base of the rotary wavelengths
    # How positions beyond those of training are reached; no option of the command line.
    rope_scaling: tyro.conf.Suppress[RopeScaling | None] = None
    qk_norm: bool = False  # normalize each query and key head before the rotation
    norm_epsilon: float = 1e-5  # added to the mean square in the norms
    tied_embeddings: bool = False  # read out with the embedding table
    # Rows of the vocabulary's tables are padded to a multiple of this, and so fit every
    # axis that divides it.
    vocab_multiple: int = 64
    dtype: str = "float32"  # of the computation, and so of the partial sums
    param_dtype: str = "float32"  # of the parameters
    # What computes the attention: cuDNN's flash attention where device, dtype and
    # head_dim allow it, else XLA's operations; or one of these always.
    attention: AttentionChoice = "auto"
    # What the backward pass recomputes: nothing; each layer, its first sum included; or
    # (the one to use where memory is short) each layer except its sums, so that no
    # collective runs twice.
    remat: Remat = "none"
    # Layers that one iteration of the loop over them computes, but for generation.
    # num_layers needs no loop: a step is faster on GPUs, since activations are not
    # copied into arrays of all layers, compiles longer, and without remat takes more
    # memory, since XLA then keeps some of what layers would compute again.
    unroll: int = 1

    def __post_init__(self):
        for name in (
            "vocab_size",
            "num_layers",
            "width",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "mlp_width",
            "vocab_multiple",
            "unroll",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be an int of at least 1.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} must divide "
                f"num_heads={self.num_heads}: each serves as many query heads."
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even for rotation.")
        if not 0 < self.rope_theta < math.inf or not 0 <= self.norm_epsilon < math.inf:
            raise ValueError(
                f"rope_theta={self.rope_theta} must be above 0 and "
                f"norm_epsilon={self.norm_epsilon} at least 0, both finite."
            )
        for name in ("dtype", "param_dtype"):
            if getattr(self, name) not in _DTYPES:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} must be one of {_DTYPES}."
                )
        check_choice(self.attention, self.dtype, self.head_dim)
        if self.remat not in ("none", "layer", "save_sums"):
            raise ValueError(
                f"remat={self.remat!r} must be 'none', 'layer' or 'save_sums'."
            )

    @property
    def num_calls(self) -> int:
        """All-reduces of the layers, in one direction: two a layer."""
        return 2 * self.num_layers

    def check_ranks(self, ranks: int, axis_name: str = "tensor") -> None:
        """Refuses a tensor-parallel axis that does not divide what it must shard.

        Raises:
          ValueError: naming the first size that does not fit.
        """
        padded = -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple
        check_divides("padded vocabulary", padded, ranks, axis_name)
        check_divides("num_heads", self.num_heads, ranks, axis_name)
        check_divides("num_kv_heads", self.num_kv_heads, ranks, axis_name)
        check_divides("mlp_width", self.mlp_width, ranks, axis_name)
