"""Bytes that a decoder's all-reduces put on the wire, from shapes and plan alone."""

import collections
from typing import Literal

from echo_jax.collectives import wire_bytes
from echo_jax.models.config import DecoderConfig
from echo_jax.plan import DepthPlan


def stream_traffic(
    config: DecoderConfig,
    plan: DepthPlan,
    *,
    batch: int,
    length: int,
    ranks: int,
    direction: Literal["forward", "backward"] = "forward",
) -> dict[str, int]:
    """Bytes that one tensor-parallel rank sends in one pass, by collective.

    Args:
      config: the decoder.
      plan: the configurations of its calls.
      batch: sequences on this rank.
      length: tokens in a sequence.
      ranks: size of the tensor axis.
      direction: forward, the embedding and two sums a layer; backward, the readout's
        mirror and two a layer.

    Returns:
      Bytes by collective. Sums of a few numbers a token (loss, norm scales) are left
      out.

    Raises:
      ValueError: for another direction, or a plan for another number of calls.
    """
    if direction not in ("forward", "backward"):
        raise ValueError(f"direction={direction!r} must be 'forward' or 'backward'.")
    plan = plan.bind(config.num_calls)
    calls = [plan.vocab, *plan]
    if direction == "backward":
        calls = [plan.backward.vocab, *plan.backward]
        if config.remat == "layer":
            # The sum of each attention runs again: what follows it needs the stream.
            calls += list(plan)[::2]
    total: collections.Counter[str] = collections.Counter()
    shape = (batch, length, config.width)
    for call in calls:
        total.update(wire_bytes(shape, ranks, call, dtype=config.dtype))
    return dict(total)
