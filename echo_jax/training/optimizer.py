"""The optimizer: clipped gradients, AdamW, and its learning-rate schedule."""

import jax
import optax

from echo_jax.layers.partitioning import Params
from echo_jax.training.config import OptimizerConfig


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate as a function of the steps taken.

    It rises linearly over the warm-up. Then it follows half a cosine down to ``final``
    or, with ``wsd``, stays at its height and falls linearly over the last ``decay`` of
    the steps. As in optax's own schedules the end is reached after the last step:
    ``schedule(steps)`` is ``final`` times the highest rate.

    Args:
      config: rates, and shares of the steps.
      steps: how many the run has.

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
    """Clips the gradient's global norm, then AdamW on :func:`make_schedule`.

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
