"""Fits the parameters of a cost model to measured times."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from echo_jax.config import EchoConfig
from echo_jax.cost_model.model import CodecSpeed, CostModel, ExactSpeed, Link

_OUTLIER = 0.1  # relative error above which the loss grows linearly, not as the square
_LEAST = 1e-12  # least fraction of an exact byte's time that is the link's


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One measured sum.

    Raises:
      ValueError: for a time that is not positive and finite, or a size, a number of
        pieces or a rate that is not positive.
    """

    message_bytes: int  # size of a rank's tensor
    seconds: float  # time of the sum
    num_chunks: int | None = None  # number of pieces of an echo call; None: exact sum
    bytes_per_second: float | None = None  # nominal rate of the link; None: unknown

    def __post_init__(self):
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds={self.seconds} must be above 0 and finite.")
        for name in ("message_bytes", "num_chunks", "bytes_per_second"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value} must be above 0.")


def fit(
    samples: Sequence[Sample],
    ranks: int,
    *,
    dtype: str = "bfloat16",
    config: EchoConfig = EchoConfig(),
    burst_bytes: int = 0,
    at_once: bool = False,
) -> CostModel:
    """Fits a cost model to measured times.

    A robust least-squares fit of relative errors; no parameter is negative. The time of
    an exact sum that does not depend on its size is attributed to the latency of its
    steps.

    If the rates of the links are known, all parameters are fitted together, because
    exact sums and echo's use the same link. Exact sums over links of two rates separate
    the time of sending from that of adding, and show how far the two overlap.

    If the rate is unknown, the exact sums determine the link first, and the echo calls
    then the codec. Adding cannot be separated from sending: all time of an exact byte
    is attributed to the link, unless the echo calls show that the link is faster. The
    time of a stall is attributed to the codec.

    Args:
      samples: exact sums and echo calls, of at least two sizes each. To fit the overlap
        of codec and transport, some echo calls must have more than one piece.
      ranks: number of ranks that were measured. For other numbers of ranks and other
        links, replace the fields of the result.
      dtype: of the messages.
      config: of the echo calls.
      burst_bytes: of the links, see :class:`Link`; assumed, not fitted.
      at_once: of the links, likewise.

    Returns:
      The model, with the fastest of the measured links.

    Raises:
      ValueError: if there are too few samples or only one rank, if the rate is given
        for some samples only, or if a burst is given without rates.

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
    link = Link(
        latency_seconds=0.0,
        bytes_per_second=rate,
        burst_bytes=burst_bytes,
        at_once=at_once,
    )
    start = CostModel(
        ranks=ranks,
        link=link,
        exact=ExactSpeed(),
        codec=CodecSpeed(piece_seconds=0.0, value_seconds=0.0),
        dtype=dtype,
        config=config,
    )
    if rated:
        return _fit_together(start, samples)
    return _fit_codec(_fit_line(start, samples), samples)


def predict(model: CostModel, sample: Sample) -> float:
    """Seconds that the model predicts for a sample, on the sample's link."""
    return _seconds(_linked(model, sample.bytes_per_second), sample)


class _Unknown(NamedTuple):
    """A parameter to fit: a field of one of the model's parts."""

    part: str
    field: str
    start: float  # initial value, by which the parameter is also scaled
    least: float = 0.0
    most: float = math.inf


def _linked(model: CostModel, bytes_per_second: float | None) -> CostModel:
    """The model with a link of this rate; unchanged if the rate is not known."""
    return model if bytes_per_second is None else model.over(bytes_per_second)


def _seconds(model: CostModel, sample: Sample) -> float:
    if sample.num_chunks is None:
        return model.exact_seconds(sample.message_bytes)
    return model.echo_seconds(sample.message_bytes, sample.num_chunks)


def _check(samples: Sequence[Sample], ranks: int) -> bool:
    """Refuses samples that cannot be fitted; returns whether they have rates."""
    exact = {s.message_bytes for s in samples if s.num_chunks is None}
    echo = {s.message_bytes for s in samples if s.num_chunks is not None}
    for name, sizes in (("exact", exact), ("echo", echo)):
        if len(sizes) < 2:
            raise ValueError(
                f"{len(sizes)} sizes of {name} sums were measured, two are needed to "
                "separate the cost of a call from that of a byte."
            )
    if ranks < 2:
        raise ValueError(f"ranks={ranks} send nothing: measure at least 2 ranks.")
    known = sum(s.bytes_per_second is not None for s in samples)
    if 0 < known < len(samples):
        raise ValueError(
            f"the rate of the link is known for {known} of {len(samples)} samples: "
            "give bytes_per_second to all of them, or to none."
        )
    return known > 0


def _fit_together(model: CostModel, samples: Sequence[Sample]) -> CostModel:
    """Fits all parameters together, on links of known rates."""
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
    # With a single rate, adding cannot be separated from sending. Without several
    # pieces, overlap and stall cannot be separated from the rest.
    if len({s.bytes_per_second for s in exact}) > 1:
        unknowns.append(_Unknown("exact", "overlap", 0.5, 0.0, 1.0))
    if _has_pieces(echo):
        unknowns.append(_Unknown("codec", "overlap", 0.25, 0.0, 1.0))
        unknowns.append(_Unknown("link", "stall", 0.25, 0.0, 1.0))

    def guess(figures: np.ndarray) -> CostModel:
        return _with_figures(model, unknowns, figures)

    return guess(_nearest(guess, samples, unknowns))


def _fit_line(model: CostModel, samples: Sequence[Sample]) -> CostModel:
    """Fits latency and rate of the link: a line through the times of exact sums."""
    # Imported here because it loads slowly and most commands do not need it.
    from scipy import optimize

    exact = [s for s in samples if s.num_chunks is None]
    seconds = np.array([s.seconds for s in exact])
    steps = 2 * (model.ranks - 1)
    sent = steps / model.ranks * np.array([s.message_bytes for s in exact])
    columns = np.stack([np.full(len(exact), float(steps)), sent], axis=1)
    found, _ = optimize.nnls(columns / seconds[:, None], np.ones(len(exact)))
    latency, byte_seconds = (float(figure) for figure in found)
    rate = 1 / byte_seconds if byte_seconds else math.inf
    link = dataclasses.replace(
        model.link, latency_seconds=latency, bytes_per_second=rate
    )
    return dataclasses.replace(model, link=link)


def _fit_codec(model: CostModel, samples: Sequence[Sample]) -> CostModel:
    """Fits the time of a piece, the time of a value, and overlap, for a given link.

    The time of a value may become negative during the fit. This means that the link is
    faster than the exact sums suggest, and the difference is then attributed to the
    adding of exact sums.
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
    """The same exact sums, with a fraction of a byte's time moved to adding."""
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
    """The parameters that minimize the relative errors of the model."""
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
    """The longest time of a sum divided by its values, that of a small message."""
    return max(s.seconds / max(1, model.values(s.message_bytes)) for s in echo)


def _has_pieces(echo: Sequence[Sample]) -> bool:
    return any((s.num_chunks or 1) > 1 for s in echo)
