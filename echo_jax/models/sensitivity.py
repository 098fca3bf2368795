"""Which all-reduces a model can least afford to quantize."""

import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from echo_jax.collectives import exact
from echo_jax.config import EchoConfig
from echo_jax.models.decoder import Decoder
from echo_jax.models.loading import LoadedModel
from echo_jax.plan import DepthPlan, Sensitivity


def measure_sensitivity(
    model: LoadedModel,
    tokens: Int[Array | np.ndarray, "batch length"],
    *,
    config: EchoConfig = EchoConfig(),
    progress: Callable[[int, int], None] | None = None,
) -> Sensitivity:
    """Quantizes one all-reduce at a time and compares the logits with exact ones.

    One pass over the batch for each call, by one program: which call is quantized is
    an argument of it. Without feedback, since nothing before the call owes anything.

    Args:
      model: from :func:`~echo_jax.models.load`.
      tokens: a calibration batch, text of the kind that the model is for.
      config: the format to measure with.
      progress: called with the calls done and the calls in all.

    Returns:
      The mean KL divergence to the exact logits of each call, for
      :meth:`echo_jax.DepthPlan.from_sensitivity`.

    Example:
        >>> plan = DepthPlan.from_sensitivity(measure_sensitivity(model, tokens))
        >>> plan.save("plan.json", model="SmolLM2-135M", axis_size=model.ranks)
    """
    fmt, calls = config.format, model.config.num_calls
    quantized = EchoConfig(
        format=fmt, feedback=False, min_bytes=0, backend=config.backend
    )
    logits_of = jax.jit(
        model.on_ranks(
            lambda decoder, tokens, flags: _probe(decoder, tokens, flags, quantized),
            (PartitionSpec(), PartitionSpec()),
            PartitionSpec(None, None, model.axis_name),
        )
    )
    tokens, numbers = jnp.asarray(tokens), np.arange(calls)
    wanted = logits_of(model.params, tokens, numbers < 0)
    effects = []
    for call in range(calls):
        found = logits_of(model.params, tokens, numbers == call)
        # Rounding may leave a divergence of nothing a little below zero.
        effects.append(max(0.0, float(_divergence(wanted, found))))
        if progress is not None:
            progress(call + 1, calls)
    return Sensitivity(effects=tuple(effects), bits=fmt.bits)


def plot_sensitivity(
    sensitivity: Sensitivity, path: str | os.PathLike, *, plan: DepthPlan | None = None
) -> None:
    """Draws the effect of every call, and beside it the bits that a plan gives it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    calls = np.arange(len(sensitivity.effects))
    axes.bar(calls, sensitivity.effects, color="tab:blue")
    axes.set(
        xlabel="all-reduce, in order of depth",
        ylabel=f"KL to exact, this call alone in {sensitivity.bits} bits (nats)",
        yscale="log",
    )
    if plan is not None:
        bits = [config.format.bits for config in plan.bind(len(calls))]
        beside = axes.twinx()
        beside.step(calls, bits, where="mid", color="tab:orange")
        beside.set(ylabel="bits in the plan", ylim=(0, 8.5))
    figure.savefig(path)


def _probe(
    decoder: Decoder,
    tokens: Int[Array, "batch length"],
    flags: Bool[Array, "calls"],
    quantized: EchoConfig,
) -> Float[Array, "batch length local_vocab"]:
    """This rank's logits with the flagged calls quantized, all others exact."""
    axis = decoder.axis_name
    graphdef, params = nnx.split(decoder.layers)

    def layer(stream, xs):
        params, flags = xs
        module = nnx.merge(graphdef, params)
        blocks = (
            (module.attention_norm, module.attention),
            (module.mlp_norm, module.mlp),
        )
        for (norm, block), flag in zip(blocks, flags, strict=True):
            x = norm(exact.pvary(stream, axis))
            # The compiler sees that both are the same up to their sums.
            right, _ = block(x, None, config=quantized.exact())
            rounded, _ = block(x, None, config=quantized)
            stream = stream + jnp.where(flag, rounded, right)
        return stream, None

    stream = exact.psum(decoder.embed(tokens), axis)
    stream, _ = jax.lax.scan(layer, stream, (params, flags.reshape(-1, 2)))
    return decoder.read_out(exact.pvary(stream, axis))


@jax.jit
def _divergence(
    wanted: Float[Array, "batch length vocab"],
    found: Float[Array, "batch length vocab"],
) -> Float[Array, ""]:
    """Mean KL divergence over tokens; padded columns have no probability."""
    wanted = jax.nn.log_softmax(wanted.astype(jnp.float32))
    found = jax.nn.log_softmax(found.astype(jnp.float32))
    terms = jnp.where(wanted > -1e30, jnp.exp(wanted) * (wanted - found), 0.0)
    return jnp.mean(jnp.sum(terms, axis=-1))
