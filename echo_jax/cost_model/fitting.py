"""The figures of a cost model that come nearest to measured times."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from echo_jax.config import EchoConfig
from echo_jax.cost_model.model import CodecSpeed, CostModel, ExactSpeed, Link

_OUTLIER = 0.1  # relative error from which on a sample counts less than its square
_LEAST = 1e-12  # part of the time of an exact byte that stays the link's


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One measured sum.

    Raises:
      ValueError: for a time that is not above zero, or not finite.
    """

    message_bytes: int  # of a rank
    seconds: float  # of the sum
    num_chunks: int | None = None  # pieces of an echo call; None: an exact sum
    bytes_per_second: float | None = None  # nominal, of the link; None: not known

    def __post_init__(self):
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds={self.seconds} must be above 0 and finite.")


def fit(
    samples: Sequence[Sample],
    ranks: int,
    *,
    dtype: str = "bfloat16",
    config: EchoConfig = EchoConfig(),
    burst_bytes: int = 0,
) -> CostModel:
    """The cost model that comes nearest to measured times.

    Least squares of relative errors; no figure is negative. What a sum takes whatever
    its size counts as the latency of its steps.

    Where links of known rates were measured, all figures are found at once, since exact
    sums and echo's share the link: two rates tell the bytes of an exact sum on the link
    from those that are added, and how much of the one happens beside the other.

    On one link of unknown rate exact sums give the link, then echo's the codec. What an
    exact byte takes counts as the link's, unless echo's bytes are faster; what a stall
    takes counts as the codec's, and nothing tells adding from sending.

    Args:
      samples: exact sums of two sizes at least, and echo's; of more numbers of pieces
        than one if overlap is to be known.
      ranks: that were measured; for other numbers of ranks, and other links, replace
        the fields of the result.
      dtype: of the messages.
      config: of the echo calls.
      burst_bytes: of the links, see :class:`Link`. An assumption: nothing here looks
        for it.

    Returns:
      The model, on the fastest of the links that were measured.

    Raises:
      ValueError: if there are too few samples, only one rank, rates of some samples
        alone, or a burst of links of unknown rates.

    Example:
        >>> made = [
        ...     Sample(message_bytes=size, seconds=1e-3 + 1e-9 * size, num_chunks=cut)
        ...     for size in (1 << 16, 1 << 20, 1 << 24)
        ...     for cut in (None, 1, 4)
        ... ]
        >>> round(fit(made, 2).link.bytes_per_second / 1e9, 3)
        1.0
    """
    rated = _check(samples, ranks)
    if burst_bytes and not rated:
        raise ValueError(
            f"burst_bytes={burst_bytes} belong to links of known rates: give the "
            "samples bytes_per_second, or set the burst of the result's link."
        )
    rate = max(s.bytes_per_second or 0.0 for s in samples) if rated else math.inf
    start = CostModel(
        ranks=ranks,
        link=Link(latency_seconds=0.0, bytes_per_second=rate, burst_bytes=burst_bytes),
        exact=ExactSpeed(),
        codec=CodecSpeed(piece_seconds=0.0, value_seconds=0.0),
        dtype=dtype,
        config=config,
    )
    if rated:
        return _fit_together(start, samples)
    return _fit_codec(_fit_line(start, samples), samples)


def predict(model: CostModel, sample: Sample) -> float:
    """Seconds that the model gives a sample, on the sample's link."""
    return _seconds(_linked(model, sample.bytes_per_second), sample)


class _Unknown(NamedTuple):
    """A figure that is looked for: a field of one of the model's parts."""

    part: str
    field: str
    start: float  # also its unit
    least: float = 0.0
    most: float = math.inf


def _linked(model: CostModel, bytes_per_second: float | None) -> CostModel:
    """Over a sample's link; the model's own where that is not known."""
    return model if bytes_per_second is None else model.over(bytes_per_second)


def _seconds(model: CostModel, sample: Sample) -> float:
    if sample.num_chunks is None:
        return model.exact_seconds(sample.message_bytes)
    return model.echo_seconds(sample.message_bytes, sample.num_chunks)


def _check(samples: Sequence[Sample], ranks: int) -> bool:
    """Refuses what cannot be fitted; whether the rates of the links are known."""
    exact = {s.message_bytes for s in samples if s.num_chunks is None}
    echo = {s.message_bytes for s in samples if s.num_chunks is not None}
    for name, sizes in (("exact", exact), ("echo", echo)):
        if len(sizes) < 2:
            raise ValueError(
                f"{len(sizes)} sizes of {name} sums were measured, two are needed to "
                "tell the cost of a call from that of a byte."
            )
    if ranks < 2:
        raise ValueError(f"ranks={ranks} send nothing: measure on 2 at least.")
    known = sum(s.bytes_per_second is not None for s in samples)
    if 0 < known < len(samples):
        raise ValueError(
            f"the rate of the link is known for {known} of {len(samples)} samples: "
            "give bytes_per_second to all of them, or to none."
        )
    return known > 0


def _fit_together(model: CostModel, samples: Sequence[Sample]) -> CostModel:
    """All figures, on links of known rates."""
    exact = [s for s in samples if s.num_chunks is None]
    echo = [s for s in samples if s.num_chunks is not None]
    latency = min(s.seconds for s in exact) / (2 * (model.ranks - 1))
    byte = min(s.seconds / s.message_bytes for s in exact)
    piece = min(s.seconds for s in echo) / 2
    unknowns = [
        _Unknown("link", "latency_seconds", latency),
        _Unknown("link", "efficiency", 0.95, 0.01, 1.0),
        _Unknown("exact", "byte_seconds", byte),
        _Unknown("codec", "piece_seconds", piece),
        _Unknown("codec", "value_seconds", _longest_value(model, echo) / 10),
    ]
    # A single rate does not tell adding from sending; without pieces nothing tells
    # what overlaps and what stalls from the rest.
    if len({s.bytes_per_second for s in exact}) > 1:
        unknowns.append(_Unknown("exact", "overlap", 0.5, 0.0, 1.0))
    if _has_pieces(echo):
        unknowns.append(_Unknown("codec", "overlap", 0.25, 0.0, 1.0))
        unknowns.append(_Unknown("link", "stall", 0.25, 0.0, 1.0))

    def guess(figures: np.ndarray) -> CostModel:
        return _with_figures(model, unknowns, figures)

    return guess(_nearest(guess, samples, unknowns))


def _fit_line(model: CostModel, samples: Sequence[Sample]) -> CostModel:
    """Latency and rate of a link: a line through the times of exact sums."""
    # Here, not above: it loads for a while, and most commands do without.
    from scipy import optimize

    exact = [s for s in samples if s.num_chunks is None]
    seconds = np.array([s.seconds for s in exact])
    steps = 2 * (model.ranks - 1)
    sent = steps / model.ranks * np.array([s.message_bytes for s in exact])
    columns = np.stack([np.full(len(exact), float(steps)), sent], axis=1)
    found, _ = optimize.nnls(columns / seconds[:, None], np.ones(len(exact)))
    latency, byte_seconds = (float(figure) for figure in found)
    rate = 1 / byte_seconds if byte_seconds else math.inf
    link = Link(latency_seconds=latency, bytes_per_second=rate)
    return dataclasses.replace(model, link=link)


def _fit_codec(model: CostModel, samples: Sequence[Sample]) -> CostModel:
    """Time of a piece and of a value, and overlap, on a link that is known.

    A value that takes less than nothing stands for exact bytes that take longer than
    the link's: by so much the exact sum is slowed down by itself.
    """
    echo = [s for s in samples if s.num_chunks is not None]
    piece = min(s.seconds for s in echo) / 2
    longest = _longest_value(model, echo)
    unknowns = [
        _Unknown("codec", "piece_seconds", piece),
        _Unknown("codec", "value_seconds", longest / 10, -longest * (1 - _LEAST)),
    ]
    if _has_pieces(echo):
        unknowns.append(_Unknown("codec", "overlap", 0.25, 0.0, 1.0))

    def guess(figures: np.ndarray) -> CostModel:
        slower = _with_slower_adding(model, -float(figures[1]) / longest)
        return _with_figures(slower, unknowns, np.maximum(figures, 0.0))

    return guess(_nearest(guess, echo, unknowns))


def _with_slower_adding(model: CostModel, part: float) -> CostModel:
    """The same exact sums, of whose bytes a part of the time is not the link's."""
    if part <= 0:
        return model
    byte_seconds = 1 / model.link.bytes_per_second
    exact = dataclasses.replace(model.exact, byte_seconds=part * byte_seconds)
    rate = model.link.bytes_per_second / (1 - part)
    return dataclasses.replace(model.over(rate), exact=exact)


def _with_figures(
    model: CostModel, unknowns: Sequence[_Unknown], figures: np.ndarray
) -> CostModel:
    fields: dict[str, dict[str, float]] = {}
    for unknown, figure in zip(unknowns, figures, strict=True):
        fields.setdefault(unknown.part, {})[unknown.field] = float(figure)
    parts = {
        part: dataclasses.replace(getattr(model, part), **found)
        for part, found in fields.items()
    }
    return dataclasses.replace(model, **parts)


def _nearest(
    guess: Callable[[np.ndarray], CostModel],
    samples: Sequence[Sample],
    unknowns: Sequence[_Unknown],
) -> np.ndarray:
    """The figures with which the guessed model's relative errors are least."""
    from scipy import optimize

    measured = np.array([s.seconds for s in samples])
    rates = {s.bytes_per_second for s in samples}
    unit = np.array([unknown.start for unknown in unknowns])
    least = np.array([unknown.least for unknown in unknowns])
    most = np.array([unknown.most for unknown in unknowns])

    def figures(x: np.ndarray) -> np.ndarray:
        return np.clip(x * unit, least, most)

    def errors(x: np.ndarray) -> np.ndarray:
        model = guess(figures(x))
        linked = {rate: _linked(model, rate) for rate in rates}
        found = [_seconds(linked[s.bytes_per_second], s) for s in samples]
        return np.array(found) / measured - 1

    best = optimize.least_squares(
        errors,
        np.ones(len(unit)),
        bounds=(least / unit, most / unit),
        loss="soft_l1",
        f_scale=_OUTLIER,
        xtol=1e-12,
        ftol=1e-12,
        gtol=1e-12,
    )
    return figures(best.x)


def _longest_value(model: CostModel, echo: Sequence[Sample]) -> float:
    """Seconds of a value where it takes longest: a small message's."""
    return max(s.seconds / max(1, model.values(s.message_bytes)) for s in echo)


def _has_pieces(echo: Sequence[Sample]) -> bool:
    return any((s.num_chunks or 1) > 1 for s in echo)
