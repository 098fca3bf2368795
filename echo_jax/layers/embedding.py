"""Vocabulary-parallel embedding, readout and cross entropy."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Integer

from echo_jax.collectives import exact
from echo_jax.layers.partitioning import Initializer, make_param
from echo_jax.typing import AnyFloat

embedding_init = nnx.initializers.normal(1.0)


class VocabParallelEmbed(nnx.Module):
    """A table of token embeddings with its rows sharded over the axis.

    Rows beyond ``num_embeddings`` pad the table to a multiple of ``pad_to``, so that
    every vocabulary fits every mesh; readouts mask them. A token outside the vocabulary
    has the embedding NaN.

    Args:
      num_embeddings: size of the vocabulary.
      features: width of an embedding.
      axis_name: the tensor-parallel axis.
      pad_to: the number of rows is a multiple of this.
      embedding_init: initializer of the table.
      dtype: of the embeddings handed out.
      param_dtype: of the table.
      rngs: random keys.
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        axis_name: str = "tensor",
        pad_to: int = 1,
        embedding_init: Initializer = embedding_init,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        """See the class."""
        rows = -(-num_embeddings // pad_to) * pad_to
        shape, spec = (rows, features), (axis_name, None)
        self.embedding = make_param(
            embedding_init, shape, spec, dtype=param_dtype, rngs=rngs
        )
        self.num_embeddings = num_embeddings
        self.axis_name, self.dtype = axis_name, dtype

    def __call__(self, tokens: Integer[Array, "..."]) -> AnyFloat:
        """This rank's part of the lookup ``(..., features)``: zero for others' tokens.

        The sum over ranks is the embedding. Take it with ``echo_psum``: the residual
        then lets the first layer correct the rounding error of the embedding.
        """
        table = self.embedding[...].astype(self.dtype)
        tokens = _wide(tokens)
        local = tokens - lax.axis_index(self.axis_name) * table.shape[0]
        mine = (local >= 0) & (local < table.shape[0])
        rows = jnp.take(table, jnp.where(mine, local, 0), axis=0)
        rows = jnp.where(mine[..., None], rows, 0)
        known = (tokens >= 0) & (tokens < self.num_embeddings)
        return jnp.where(known[..., None], rows, jnp.nan)

    def attend(self, x: AnyFloat, out_dtype=None) -> Float[Array, "... local_vocab"]:
        """This rank's logits from the table itself, for tied embeddings."""
        table = self.embedding[...].astype(self.dtype)
        logits = jnp.matmul(
            x.astype(self.dtype), table.T, preferred_element_type=out_dtype
        )
        return mask_padding(logits, self.num_embeddings, self.axis_name)


class VocabParallelReadout(nnx.Module):
    """Logits with the vocabulary sharded over the axis; they are never gathered.

    Args:
      features: width of the stream.
      num_embeddings: size of the vocabulary.
      axis_name: the tensor-parallel axis.
      pad_to: the number of columns is a multiple of this; the extra ones are masked.
      kernel_init: initializer of the kernel.
      dtype: of the computation.
      param_dtype: of the kernel.
      rngs: random keys.
    """

    def __init__(
        self,
        features: int,
        num_embeddings: int,
        *,
        axis_name: str = "tensor",
        pad_to: int = 1,
        kernel_init: Initializer = nnx.initializers.lecun_normal(),
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        """See the class."""
        columns = -(-num_embeddings // pad_to) * pad_to
        shape, spec = (features, columns), (None, axis_name)
        self.kernel = make_param(kernel_init, shape, spec, dtype=param_dtype, rngs=rngs)
        self.num_embeddings = num_embeddings
        self.axis_name, self.dtype = axis_name, dtype

    def __call__(self, x: AnyFloat, out_dtype=None) -> Float[Array, "... local_vocab"]:
        """This rank's logits ``(..., vocab / N)`` from the normed stream."""
        kernel = self.kernel[...].astype(self.dtype)
        logits = jnp.matmul(
            x.astype(self.dtype), kernel, preferred_element_type=out_dtype
        )
        return mask_padding(logits, self.num_embeddings, self.axis_name)


def _wide(tokens: Integer[Array, "..."]) -> Integer[Array, "..."]:
    """Token ids in 32 bits or more, where the size of the vocabulary has room too."""
    return tokens.astype(jnp.promote_types(tokens.dtype, jnp.int32))


def mask_padding(logits: AnyFloat, num_embeddings: int, axis_name: str) -> AnyFloat:
    """Gives the columns beyond the vocabulary the lowest finite logit."""
    columns = logits.shape[-1]
    if columns * lax.axis_size(axis_name) == num_embeddings:
        return logits  # a pass over all logits that would change none
    column = lax.axis_index(axis_name) * columns + jnp.arange(columns)
    return jnp.where(column < num_embeddings, logits, jnp.finfo(logits.dtype).min)


def vocab_parallel_cross_entropy(
    logits: Float[Array, "*batch local_vocab"],
    labels: Integer[Array, "*batch"],
    axis_name: str = "tensor",
) -> Float[Array, "*batch"]:
    """Cross entropy in nats of each token, from logits sharded over the axis.

    Ranks exchange three numbers for each token (the maximum, the sum of exponentials
    and the label's logit) instead of the logits.

    Sharding: ``logits`` vary along the axis; ``labels`` and the result are replicated.

    Args:
      logits: this rank's part of the vocabulary, in order of rank.
      labels: token ids in the whole vocabulary.
      axis_name: the tensor-parallel axis.

    Returns:
      The loss of each token, in float32; NaN for a label that no rank holds, and as
      good as infinite (3e38) for one of the columns that :func:`mask_padding` masks.

    Source: Shoeybi et al., "Megatron-LM", 2019, section 3.
    """
    labels = _wide(labels)
    peak = lax.stop_gradient(jnp.max(logits, axis=-1)).astype(jnp.float32)
    peak = lax.pmax(peak, axis_name)
    columns = logits.shape[-1]
    local = labels - lax.axis_index(axis_name) * columns
    normalizer, label_logit = _reduce_vocabulary(logits, peak, local)
    normalizer = exact.psum(normalizer, axis_name)
    label_logit = exact.psum(label_logit, axis_name)
    known = (labels >= 0) & (labels < columns * lax.axis_size(axis_name))
    return jnp.where(known, jnp.log(normalizer) - label_logit, jnp.nan)


# Gradients keep the logits in their own dtype, and nothing else as large.
@jax.checkpoint
def _reduce_vocabulary(logits: AnyFloat, peak: AnyFloat, label: Integer[Array, "..."]):
    """This rank's sum of exponentials, and its label's logit or zero, both shifted."""
    shifted = logits.astype(jnp.float32) - peak[..., None]
    is_label = jnp.arange(logits.shape[-1]) == label[..., None]
    label_logit = jnp.sum(jnp.where(is_label, shifted, 0.0), axis=-1)
    return jnp.sum(jnp.exp(shifted), axis=-1), label_logit
