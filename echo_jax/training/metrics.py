"""What a run measures besides its loss: arithmetic, bytes, quantization error."""

import math

import jax

from echo_jax.config import EchoConfig
from echo_jax.layers.partitioning import Params, Specs
from echo_jax.models import DecoderConfig
from echo_jax.models.traffic import stream_traffic
from echo_jax.training.config import TrainConfig, Variant
from echo_jax.training.gradient_plan import GradientSyncConfig
from echo_jax.training.gradient_sync import GradientSync
from echo_jax.training.step import StepMetrics
from echo_jax.wire import WireFormat


def matrix_parameters(config: DecoderConfig) -> int:
    """Parameters that a token is multiplied with: all matrices but the embedding's.

    The table of tied embeddings counts, since the readout multiplies with it.
    """
    heads = config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    attention = 2 * config.width * (heads + kv_heads)
    layer = attention + 3 * config.width * config.mlp_width
    return config.num_layers * layer + config.width * config.vocab_size


def flops_per_token(config: DecoderConfig, length: int) -> float:
    r"""Floating-point operations of a training step for each token of its batch.

    .. math:: 6 N + 12 L H T

    with :math:`N` the :func:`matrix_parameters`, :math:`L` the layers, :math:`H` the
    features of all heads and :math:`T` the length: two operations a parameter forward,
    four backward, and the two products of attention with all :math:`T` places. The
    codec's own arithmetic, the optimizer and what is recomputed do not count.

    Source: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022,
    appendix B.
    """
    features = config.num_heads * config.head_dim
    attention = 12 * config.num_layers * features * length
    return 6.0 * matrix_parameters(config) + attention


def signal_to_quantization_db(
    metrics: StepMetrics, fmt: WireFormat, *, ranks: int
) -> float | None:
    r"""How far the stream stands above its quantization error, in decibels.

    With feedback the error of the stream after the last layer is what is still owed,
    :math:`\sum_i w_i + v`, so that

    .. math:: 10 \log_{10} \frac{x^2}{(N w^2 + v^2) / g^2}

    with :math:`x`, :math:`w` and :math:`v` the root mean squares of the stream and of
    both parts of the residual, :math:`N` the ranks, whose errors are taken to be
    independent, and :math:`g` what block coordinates scale by.

    Args:
      metrics: of one step, each a scalar.
      fmt: the format of the sums.
      ranks: size of the tensor axis.

    Returns:
      None where the ratio is no positive number: nothing is owed (an exact run, or one
      without feedback), or the run has diverged.
    """
    owed = ranks * float(metrics.residual_send) ** 2
    owed += float(metrics.residual_reduce) ** 2
    if not owed > 0:
        return None
    ratio = float(metrics.stream) ** 2 / owed
    if not ratio > 0:
        return None
    # The rotation is scaled by a power of two, not always by sqrt(B).
    gain = fmt.block_size / 4.0**fmt.forward_exponent if fmt.rotate else 1.0
    return 10.0 * math.log10(ratio * gain)


def bytes_per_token(config: TrainConfig, variant: Variant) -> dict[str, float]:
    """Bytes that a rank sends to its tensor group, for each token of its batch."""
    parts = config.mesh.data_ranks * config.optimizer.accumulate
    batch = config.data.batch_size // parts
    tokens = batch * config.data.length
    total: dict[str, float] = {}
    for direction in ("forward", "backward"):
        sent = stream_traffic(
            config.model,
            config.plan(variant),
            batch=batch,
            length=config.data.length,
            ranks=config.mesh.tensor_ranks,
            direction=direction,
        )
        for collective, count in sent.items():
            total[collective] = total.get(collective, 0.0) + count / tokens
    return total


def gradient_bytes(config: TrainConfig, params: Params, specs: Specs) -> dict[str, int]:
    """Bytes that a rank sends over the data axis in a step, by collective.

    Args:
      config: of the run.
      params: global parameters, or their shapes.
      specs: how they are sharded.
    """
    ranks = config.mesh.tensor_ranks

    def local(leaf, spec) -> jax.ShapeDtypeStruct:
        cut = [ranks if name == "tensor" else 1 for name in spec]
        cut += [1] * (len(leaf.shape) - len(cut))
        shape = tuple(n // c for n, c in zip(leaf.shape, cut, strict=True))
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    sums = EchoConfig().exact()
    chosen = config.gradient_sync() or GradientSyncConfig(sums=sums)
    sync = GradientSync(config=chosen, specs=specs)
    parts = jax.tree.map(local, params, specs)
    return sync.wire_bytes(parts, config.mesh.data_ranks)
