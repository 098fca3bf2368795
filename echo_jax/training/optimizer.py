"""The optimizer: AdamW behind a clip, and the schedule of its rate."""

import jax
import optax

from echo_jax.layers.partitioning import Params
from echo_jax.training.config import OptimizerConfig


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate of each step, from 0.

    The rate grows linearly over the warm-up; then it follows half a cosine down to
    ``final``, or (``wsd``) stays, and falls linearly over the last ``decay`` of the
    steps.

    Source: Hu et al., "MiniCPM: Unveiling the Potential of Small Language Models with
    Scalable Training Strategies", 2024, for the second.
    """
    highest, warmup = config.learning_rate, max(1, int(config.warmup * steps))
    lowest = highest * config.final
    first = highest / warmup  # no step at rate zero
    if config.schedule == "cosine":
        stop = warmup + max(1, steps - warmup)
        return optax.warmup_cosine_decay_schedule(first, highest, warmup, stop, lowest)
    decay = max(1, int(config.decay * steps))
    return optax.join_schedules(
        [
            optax.linear_schedule(first, highest, warmup),
            optax.constant_schedule(highest),
            optax.linear_schedule(highest, lowest, decay),
        ],
        [warmup, max(warmup, steps - decay)],
    )


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """AdamW behind a clip of the global norm, on the schedule of :func:`make_schedule`.

    Args:
      config: rates and decays.
      steps: how many the run has.
    """
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            make_schedule(config, steps),
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=_decays,
        ),
    )


def _decays(params: Params) -> Params:
    """Weight decay acts on matrices; the scales of norms are left alone."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key not in ("scale", "bias"), params
    )
