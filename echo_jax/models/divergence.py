"""How far one stream's predictions are from another's, logits never gathered."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from echo_jax.collectives import exact
from echo_jax.layers.embedding import vocab_parallel_cross_entropy
from echo_jax.models.decoder import Decoder
from echo_jax.models.sampling import greedy
from echo_jax.typing import AnyFloat


class Comparison(NamedTuple):
    """Means over the tokens of each sequence, arrays ``(sequences,)``."""

    divergence: Any  # KL of the wanted predictions to the found ones, nats
    loss: Any  # cross entropy of the text under the found ones, nats
    agreement: Any  # whether both find the same token likeliest


def compare_streams(
    decoder: Decoder,
    wanted: AnyFloat,
    found: AnyFloat,
    targets: Int[Array, "batch length"],
) -> Comparison:
    """Means over the tokens of each sequence; call inside ``shard_map`` or ``vmap``.

    Args:
      decoder: one rank's.
      wanted: the stream ``(batch, length, width)`` behind the last layer.
      found: the stream to compare with it.
      targets: the tokens that follow.
    """
    axis = decoder.axis_name

    def one_sequence(arguments):
        wanted, found, targets = arguments
        wanted, found = _logits(decoder, wanted), _logits(decoder, found)
        return Comparison(
            divergence=jnp.mean(_divergence(wanted, found, axis)),
            loss=jnp.mean(vocab_parallel_cross_entropy(found, targets, axis)),
            agreement=jnp.mean(_agrees(wanted, found, axis).astype(jnp.float32)),
        )

    # A sequence at a time: two sets of logits of a batch could fill a device.
    return jax.lax.map(one_sequence, (wanted, found, targets))


def stream_divergence(
    decoder: Decoder, wanted: AnyFloat, found: AnyFloat
) -> Float[Array, "batch"]:
    """Mean KL divergence of each sequence alone; see :func:`compare_streams`."""

    def one_sequence(streams):
        wanted, found = (_logits(decoder, stream) for stream in streams)
        return jnp.mean(_divergence(wanted, found, decoder.axis_name))

    return jax.lax.map(one_sequence, (wanted, found))


def _logits(decoder: Decoder, stream: AnyFloat) -> Float[Array, "length local_vocab"]:
    return decoder.read_out(exact.pvary(stream, decoder.axis_name), jnp.float32)


def _agrees(wanted, found, axis: str) -> Bool[Array, "length"]:
    return greedy(wanted, axis) == greedy(found, axis)


def _divergence(
    wanted: Float[Array, "length local_vocab"],
    found: Float[Array, "length local_vocab"],
    axis: str,
) -> Float[Array, "length"]:
    wanted, found = _log_softmax(wanted, axis), _log_softmax(found, axis)
    # Padded columns have no probability; their logarithms are finite.
    terms = jnp.exp(wanted) * (wanted - found)
    return exact.psum(jnp.sum(terms, axis=-1), axis)


def _log_softmax(
    logits: Float[Array, "length local_vocab"], axis: str
) -> Float[Array, "length local_vocab"]:
    """This rank's log-probabilities from logits that are sharded by vocabulary."""
    peak = jax.lax.pmax(jnp.max(logits, axis=-1, keepdims=True), axis)
    total = exact.psum(jnp.sum(jnp.exp(logits - peak), axis=-1, keepdims=True), axis)
    return logits - exact.pvary(peak + jnp.log(total), axis)
