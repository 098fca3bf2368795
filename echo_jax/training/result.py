"""What the run of one variant measured."""

import dataclasses
import statistics

import numpy as np

from echo_jax.training.config import Variant

# The final training loss is the mean over this share of the steps, the last ones.
_FINAL_SHARE = 0.1


@dataclasses.dataclass(kw_only=True)
class RunResult:
    """What one variant measured; partial if the run was stopped."""

    variant: Variant
    losses: list[float] = dataclasses.field(default_factory=list)  # of each step, nats
    heldout: list[float] = dataclasses.field(default_factory=list)  # of each batch
    bytes_per_token: dict[str, float] = dataclasses.field(default_factory=dict)
    residual_rms: float | None = None  # owed by senders after the last forward pass
    signal_db: float | None = None  # the stream above its quantization error, dB
    step_seconds: float | None = None  # median after the first step
    tokens_per_second: float | None = None  # at that median
    flops_per_second: float | None = None  # of the model's arithmetic, likewise

    @property
    def final_loss(self) -> float | None:
        """Mean training loss over the last tenth of the steps; None before any."""
        last = max(1, round(_FINAL_SHARE * len(self.losses)))
        return statistics.fmean(self.losses[-last:]) if self.losses else None

    @property
    def heldout_loss(self) -> float | None:
        """Mean held-out loss, nats; None if the run was stopped before."""
        return statistics.fmean(self.heldout) if self.heldout else None

    @property
    def heldout_spread(self) -> float | None:
        """Standard deviation over the held-out batches, nats; None without any."""
        return float(np.std(self.heldout)) if self.heldout else None


def gap_percent(result: RunResult, exact: RunResult | None) -> float | None:
    """How far the held-out loss lies above that of the exact run, in percent."""
    if exact is None or exact.heldout_loss is None or result.heldout_loss is None:
        return None
    return 100.0 * (result.heldout_loss / exact.heldout_loss - 1.0)


def gap_spread_percent(result: RunResult, exact: RunResult | None) -> float | None:
    """Standard error of the gap over the held-out batches, which both runs share.

    Pairs of batches, so that how hard a batch is cancels. None for fewer than two.
    """
    if exact is None or len(result.heldout) != len(exact.heldout):
        return None
    pairs = zip(result.heldout, exact.heldout, strict=True)
    differences = [ours - theirs for ours, theirs in pairs]
    if len(differences) < 2 or exact.heldout_loss is None:
        return None
    # NumPy's, since that of the standard library fails where a loss is NaN.
    error = float(np.std(differences, ddof=1)) / len(differences) ** 0.5
    return 100.0 * error / exact.heldout_loss
