"""How far a plan's predictions on running text are from those of exact sums."""

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Int

from echo_jax.models.divergence import Comparison, compare_streams
from echo_jax.models.loading import LoadedModel
from echo_jax.models.switched import choices, distinct_configs, run_by_choice
from echo_jax.plan import DepthPlan


class Prose:
    """Windows of running text on which plans are compared with exact sums.

    Which plan runs is an argument of one compiled program. What is kept on the device
    for the comparison is the residual stream under exact sums, not its logits, which
    are far larger.

    Args:
      model: from :func:`echo_jax.models.load`.
      windows: int32 token ids ``(windows, length)``; ``length - 1`` are predicted.
      exact_plan: what the others are compared with.
      plans: what :meth:`measure` may be asked for, or plans of the same
        configurations; those with feedback share block size and rotation.
      batch: windows at a time; divides their number.

    Raises:
      ValueError: if ``batch`` does not divide the windows, or the plans cannot share a
        residual.

    Example:
        >>> prose = Prose(model, windows, exact_plan=exact, plans=[edges], batch=8)
        >>> print(prose.measure(edges).divergence.mean())
    """

    def __init__(
        self,
        model: LoadedModel,
        windows: Int[np.ndarray, "windows length"],
        *,
        exact_plan: DepthPlan,
        plans: Sequence[DepthPlan],
        batch: int,
    ):
        """See the class."""
        if len(windows) % batch:
            raise ValueError(
                f"batch={batch} does not divide {len(windows)} windows: leave some out."
            )
        replicated = PartitionSpec()
        self._calls = model.config.num_calls
        self._configs = distinct_configs([exact_plan, *plans], self._calls)
        run = functools.partial(run_by_choice, configs=self._configs)
        self._stream_of = jax.jit(
            model.on_ranks(run, (replicated, replicated), replicated)
        )
        compare = model.on_ranks(
            compare_streams, (replicated, replicated, replicated), replicated
        )
        self._compare, self._params = jax.jit(compare), model.params
        self._batches = np.split(np.asarray(windows, np.int32), len(windows) // batch)
        self._wanted = [self._stream(part, exact_plan) for part in self._batches]

    def measure(self, plan: DepthPlan) -> Comparison:
        """Means over each window: divergence, loss, agreement, as NumPy arrays."""
        parts = [
            self._compare(self._params, wanted, self._stream(part, plan), part[:, 1:])
            for part, wanted in zip(self._batches, self._wanted, strict=True)
        ]
        columns = zip(*jax.device_get(parts), strict=True)
        return Comparison(*map(np.concatenate, columns))

    def _stream(self, windows: Int[np.ndarray, "batch length"], plan: DepthPlan):
        chosen = choices(plan, self._configs, self._calls)
        return self._stream_of(self._params, windows[:, :-1], chosen)
