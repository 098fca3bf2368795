"""Which calls of a model get how many bits, where bits are limited."""

import dataclasses
import math

from echo_jax.config import EchoConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """How much quantizing each all-reduce alone changes what a model predicts.

    From :func:`echo_jax.models.measure_sensitivity`, for
    :meth:`DepthPlan.from_sensitivity`.

    Raises:
      ValueError: if there is no call, or an effect is negative or not finite.
    """

    effects: tuple[float, ...]  # mean KL divergence of the logits, nats a token
    bits: int  # width at which they were measured

    def __post_init__(self):
        if not self.effects or not all(0 <= e < math.inf for e in self.effects):
            raise ValueError(
                "effects must be the divergence of each call, finite and at least 0; "
                f"got {self.effects}."
            )
        if self.bits < 1:
            raise ValueError(f"bits={self.bits} must be at least 1.")


def spend(
    sensitivity: Sensitivity,
    options: list[EchoConfig],
    costs: list[float],
    budget: float,
) -> list[int]:
    """Widens the calls, one step at a time, that gain the most for a bit.

    Args:
      sensitivity: how much harm each call does.
      options: configurations to choose from, the narrowest first.
      costs: bits per value of each option.
      budget: bits per value, added up over all calls.

    Returns:
      For each call the index of its option.
    """
    steps = [(1 << option.format.bits) - 1 for option in options]
    measured = (1 << sensitivity.bits) - 1
    harm = [[e * (measured / step) ** 2 for step in steps] for e in sensitivity.effects]
    chosen = [0] * len(harm)
    left = budget - costs[0] * len(harm)
    while True:
        gains = [
            ((harm[i][c] - harm[i][c + 1]) / (costs[c + 1] - costs[c]), i)
            for i, c in enumerate(chosen)
            # A rounding error of the sums must not forbid what just fits.
            if c + 1 < len(costs) and costs[c + 1] - costs[c] <= left + 1e-6
        ]
        if not gains:
            return chosen
        _, call = max(gains, key=lambda gain: (gain[0], -gain[1]))
        left -= costs[chosen[call] + 1] - costs[chosen[call]]
        chosen[call] += 1
