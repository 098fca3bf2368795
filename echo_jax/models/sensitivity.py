"""Which all-reduces a model can least afford to quantize."""

import dataclasses
import functools
import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from echo_jax.config import EchoConfig
from echo_jax.models.divergence import stream_divergence
from echo_jax.models.loading import LoadedModel
from echo_jax.models.switched import run_by_choice
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
    an argument of it. With feedback the next call, which is exact, pays what the
    quantized one rounded away, as it will in use; without, the error stays.

    Args:
      model: from :func:`~echo_jax.models.load`.
      tokens: a calibration batch, text of the kind that the model is for.
      config: the format to measure with.
      progress: called with the calls done and the calls in all.

    Returns:
      The mean KL divergence to the exact logits of each call, for
      :meth:`echo_jax.DepthPlan.from_sensitivity`.

    Raises:
      ValueError: if the batch is empty or not of this shape, or holds what is no token
        of the model; or for an exact configuration, under which no call has an effect.

    Example:
        >>> plan = DepthPlan.from_sensitivity(measure_sensitivity(model, tokens))
        >>> plan.save("plan.json", model="SmolLM2-135M", axis_size=model.ranks)
    """
    if config.is_exact:
        raise ValueError(
            "an exact configuration rounds nothing that could be measured: leave out "
            "exact()."
        )
    quantized = dataclasses.replace(config, min_bytes=0)
    configs, calls = (quantized.exact(), quantized), model.config.num_calls
    whole = PartitionSpec()
    run = functools.partial(run_by_choice, configs=configs)
    stream_of = jax.jit(model.on_ranks(run, (whole, whole), whole))
    divergence = jax.jit(model.on_ranks(stream_divergence, (whole, whole), whole))
    tokens = jnp.asarray(_checked(tokens, model.config.vocab_size))
    # The embedding's sum stands in front of the calls and stays exact.
    alone = np.eye(calls + 1, dtype=np.int32)
    wanted = stream_of(model.params, tokens, 0 * alone[0])
    effects = []
    for call in range(calls):
        found = stream_of(model.params, tokens, alone[call + 1])
        effect = jnp.mean(divergence(model.params, wanted, found))
        # Rounding may leave a divergence of nothing a little below zero.
        effects.append(max(0.0, float(effect)))
        if progress is not None:
            progress(call + 1, calls)
    return Sensitivity(effects=tuple(effects), bits=config.format.bits)


def _checked(tokens: Array | np.ndarray, vocab_size: int) -> np.ndarray:
    """The batch; ids out of range would read as zeros, and no call do any harm."""
    tokens = np.asarray(tokens)
    if tokens.ndim != 2 or not tokens.size or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"tokens of shape {tokens.shape} and dtype {tokens.dtype} must be integers "
            "(batch, length), at least one: np.array([tokenizer.encode(text)])."
        )
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(
            f"tokens from {tokens.min()} to {tokens.max()} are not all among the "
            f"model's {vocab_size}: the tokenizer belongs to another model."
        )
    return tokens


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
