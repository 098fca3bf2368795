"""How long a prompt takes to its first token."""

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from echo_jax.models.generation import GenerationConfig, generate
from echo_jax.models.loading import LoadedModel
from echo_jax.plan import DepthPlan


class Times(NamedTuple):
    """Seconds of one call, of repeated measurements."""

    median: float
    fastest: float
    slowest: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Times":
        """Of single measurements."""
        return cls(statistics.median(seconds), min(seconds), max(seconds))


def time_to_first_token(
    model: LoadedModel,
    plan: DepthPlan,
    *,
    length: int = 512,
    batch: int = 1,
    repeats: int = 5,
) -> Times:
    """Times prefill and choice of the first token, compilation left out.

    Args:
      model: the model.
      plan: the configurations of its all-reduces.
      length: tokens of each prompt; drawn at random, which costs what text costs.
      batch: prompts at once.
      repeats: timed runs, after one that is not.

    Raises:
      ValueError: for a count under 1, or a prompt that is too long for the model.
    """
    if min(length, batch, repeats) < 1:
        raise ValueError(
            f"length={length}, batch={batch} and repeats={repeats} must be at least 1."
        )
    draw = np.random.default_rng(0)
    prompts = draw.integers(0, model.config.vocab_size, (batch, length)).tolist()
    config = GenerationConfig(max_new_tokens=1, stop_ids=())
    jax.block_until_ready(model.params)
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        generate(model, prompts, config=config, plan=plan)
        seconds.append(time.perf_counter() - start)
    return Times.of(seconds[1:])
