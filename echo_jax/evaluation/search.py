"""Better plans of the same cost, by measuring neighbours."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from echo_jax.config import EchoConfig
from echo_jax.evaluation.prose import Prose
from echo_jax.plan import DepthPlan

Progress = Callable[[int, float], None]  # rounds done, divergence now


class _Step(NamedTuple):
    """One call made a width wider or narrower."""

    call: int
    cost: float  # bits over all calls, positive for wider
    change: float  # of the divergence, measured alone


def refine_plan(
    prose: Prose,
    plan: DepthPlan,
    *,
    bits: float,
    widths: Sequence[int] = (3, 4, 6, 8),
    seconds: float = 60.0,
    progress: Progress | None = None,
) -> DepthPlan:
    """Trades bits between calls as long as the divergence on a text falls.

    Each round measures every call one width wider and one narrower, everything else
    as it is, and makes the exchanges that should gain most; what does not gain
    together is halved until it does. Unlike :meth:`echo_jax.DepthPlan.from_sensitivity`
    this sees what feedback repays. The text should not be the one that the plan is
    judged on.

    Args:
      prose: a calibration text, made for every one of ``widths``.
      plan: where to start, bound to a number of calls; its calls have such widths.
      bits: what a value may cost on average over the layers' calls, scales included.
      widths: the bits to choose from.
      seconds: no round starts later than this.
      progress: called after every round.

    Returns:
      The best plan found, at worst the one given.

    Raises:
      ValueError: if the plan costs more than ``bits``, or has another width.

    Example:
        >>> better = refine_plan(prose, plan, bits=4.5)
    """
    state = _State(plan, widths, bits)
    best, start, rounds = state.divergence(prose), time.monotonic(), 0
    while time.monotonic() - start < seconds:
        moves = state.exchanges(state.steps(prose, best))
        count, previous = len(moves), best
        while count:
            candidate = state.moved([step for move in moves[:count] for step in move])
            found = candidate.divergence(prose)
            if found < best:
                state, best = candidate, found
                break
            count //= 2
        rounds += 1
        if progress is not None:
            progress(rounds, best)
        if best == previous:
            break
    return state.plan


class _State:
    """A plan as widths, and what it may cost."""

    def __init__(self, plan: DepthPlan, widths: Sequence[int], bits: float):
        self.plan, self.widths, self.bits = plan, sorted(set(widths)), bits
        strange = {config.format.bits for config in plan} - set(self.widths)
        if strange or any(config.is_exact for config in plan):
            raise ValueError(
                f"the plan has calls of {sorted(strange)} bits or exact ones, widths="
                f"{tuple(widths)}: start from a plan of these widths."
            )
        # A rounding error of the sum must not forbid what just fits.
        self.spare = (bits - plan.average_bits) * len(plan) + 1e-6
        if self.spare < 0:
            raise ValueError(
                f"the plan costs {plan.average_bits:.3f} bits a value, more than "
                f"bits={bits}: start from a cheaper one."
            )

    def divergence(self, prose: Prose) -> float:
        return float(prose.measure(self.plan).divergence.mean())

    def moved(self, steps: Sequence[_Step]) -> "_State":
        """With these calls a width wider or narrower."""
        return _State(self._changed(steps), self.widths, self.bits)

    def steps(self, prose: Prose, now: float) -> list[_Step]:
        """Every single step with what it changes."""
        found = []
        for call, config in enumerate(self.plan):
            place = self.widths.index(config.format.bits)
            for other in (place - 1, place + 1):
                if 0 <= other < len(self.widths):
                    cost = self.widths[other] - self.widths[place]
                    step = _Step(call, cost, 0.0)
                    # One step alone may cost more than there is.
                    alone = _State(self._changed([step]), self.widths, math.inf)
                    change = alone.divergence(prose) - now
                    found.append(step._replace(change=change))
        return found

    def _changed(self, steps: Sequence[_Step]) -> DepthPlan:
        calls = list(self.plan)
        for step in steps:
            calls[step.call] = self._neighbour(calls[step.call], step.cost > 0)
        return dataclasses.replace(self.plan, head=tuple(calls), tail=())

    def exchanges(self, steps: list[_Step]) -> list[list[_Step]]:
        """Wider calls, each with the narrower ones that pay for it, best first."""
        wider = sorted(
            (step for step in steps if step.cost > 0 and step.change < 0),
            key=lambda step: step.change / step.cost,
        )
        narrower = sorted(
            (step for step in steps if step.cost < 0),
            key=lambda step: step.change / -step.cost,
        )
        moves, used, spare = [], set(), self.spare
        for step in wider:
            paying, left = [], spare - step.cost
            for payer in narrower:
                if left >= 0:
                    break
                if payer.call not in used and payer.call != step.call:
                    paying.append(payer)
                    left -= payer.cost
            net = step.change + sum(payer.change for payer in paying)
            if left < 0 or net >= 0 or step.call in used:
                continue
            moves.append([step, *paying])
            used |= {move.call for move in moves[-1]}
            spare = left
        return moves

    def _neighbour(self, config: EchoConfig, wider: bool) -> EchoConfig:
        place = self.widths.index(config.format.bits) + (1 if wider else -1)
        return config.with_bits(self.widths[place])
