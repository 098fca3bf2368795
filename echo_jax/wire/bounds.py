"""Closed-form bounds on the error, in block coordinates.

All magnitudes are largest absolute values in block coordinates, that is after the
rotation when the format rotates; ``peak`` bounds one rank's partial sum there.

One rounding leaves at most half a scale, ``|v - Q(v)| <= c max|v|`` with ``c`` the
contraction constant. Feeding the error back makes ``|w'| <= c (peak + |w|)``, a
contraction whose fixed point ``peak c/(1 - c)`` bounds the send residual for every
number of calls. The reduce residual obeys the same with ``|sum x| + 2 N |w|`` in place
of ``peak``, since the owner adds ``sum_i Q(a_i) = sum_i (x_i + w_i - w_i')``. The
telescoped error of the stream is ``-(sum_i w_i + v)``, whatever the depth.

That worst case has every rank owe its most, in one direction. Rounding errors of
different ranks are nearly independent and uniform, so that they add up like
``sqrt(ranks)``: :func:`typical_bound`.

Source: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression
Schemes", 2019, for the contraction argument; "Echo: Error-Compensated 4-Bit
Tensor-Parallel Communication for LLM Training and Inference", arXiv 2610.14277, 2026,
for its use along depth.
"""

import dataclasses
import functools
import math
from typing import Literal

from echo_jax.wire.format import WireFormat

# A bfloat16 has 8 significant bits: rounding to the nearest moves a scale by at most
# this part of itself.
_SCALE_ROUNDING = 2.0**-8

ResidualDtype = Literal["float32", "bfloat16", "int8", "int4"]

# What storing a residual between calls changes it by at most, relative to the largest
# that a rounding can leave: half a step of 255 or 15 in a scale for the integers, and
# the hair by which compact.py makes the steps wider.
_STORAGE_ROUNDING = {
    "float32": 0.0,
    "bfloat16": 2.0**-9,
    "int8": (1.0 + 2.0**-5) / 255,
    "int4": (1.0 + 2.0**-5) / 15,
}

# Steps of the integral over a Gaussian's largest of many magnitudes, and its end.
_INTEGRAL_STEPS = 2000
_INTEGRAL_END = 10.0


def contraction(fmt: WireFormat) -> float:
    """``c``: the largest error of one rounding over the block's largest magnitude.

    ``1/(2**bits - 1)``, widened by the rounding of the scale to bfloat16 and by those
    of float32: two on the way to the scale and two on the way to ``v / s``, which move
    an edge by at most ``2**(bits - 1) 2**-23`` scales.
    """
    float32_roundings = 2.0 ** (fmt.bits - 22)
    return (1.0 + _SCALE_ROUNDING + float32_roundings) / (2**fmt.bits - 1)


def rotation_gain(fmt: WireFormat) -> float:
    """The most by which entering block coordinates can grow a block's peak.

    ``block_size * 2**-forward_exponent``, reached by a block of equal magnitudes; 1
    without rotation. A block of Gaussian values grows by about
    ``sqrt(block_size) * 2**-forward_exponent``.
    """
    return fmt.block_size * 2.0**-fmt.forward_exponent if fmt.rotate else 1.0


def inverse_gain(fmt: WireFormat) -> float:
    """The most by which leaving block coordinates can grow an error."""
    return fmt.block_size * 2.0**-fmt.inverse_exponent if fmt.rotate else 1.0


@functools.cache
def gaussian_contraction(fmt: WireFormat) -> float:
    """Root mean square error of one rounding of a Gaussian block, relative to it.

    An error uniform within half a scale has the root mean square ``c M / sqrt(3)``,
    ``M`` the block's largest magnitude; that of ``B`` standard Gaussian values has
    ``E[M**2] = int 2 t (1 - erf(t / sqrt(2))**B) dt``. Alike with and without rotation,
    which leaves independent Gaussian values what they are.
    """
    step = _INTEGRAL_END / _INTEGRAL_STEPS
    square = step * sum(
        2.0 * t * (1.0 - math.erf(t / math.sqrt(2.0)) ** fmt.block_size)
        for t in (step * index for index in range(_INTEGRAL_STEPS))
    )
    return contraction(fmt) * math.sqrt(square / 3.0)


def gaussian_stream_error(fmt: WireFormat) -> float:
    """Root mean square error of the stream over that of one exact sum, with feedback.

    For Gaussian values that are independent from rank to rank. With ``k`` the Gaussian
    contraction and ``r = k**2 / (1 - k**2)``, a rank owes ``r`` of its variance, the
    owner ``r (1 + 2 r)`` of the sum's: ``sqrt(2 r + 2 r**2)`` in all, for every number
    of calls and of ranks.
    """
    owed = 1.0 / (1.0 / gaussian_contraction(fmt) ** 2 - 1.0)
    return math.sqrt(2.0 * owed + 2.0 * owed**2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErrorBound:
    """Bounds on magnitudes, in block coordinates unless said otherwise."""

    contraction: float  # c: error of one rounding over the block's largest magnitude
    # The same for Gaussian values, in root mean squares.
    gaussian_contraction: float
    send_residual: float  # bound on one rank's w after any number of calls
    reduce_residual: float  # bound on the owner's v after any number of calls
    stream: float  # bound on the telescoped error of the summed outputs
    output: float  # ``stream`` outside block coordinates


def error_bound(
    fmt: WireFormat,
    *,
    ranks: int,
    peak: float = 1.0,
    sum_peak: float | None = None,
    calls: int | None = None,
    feedback: bool = True,
    residual_dtype: ResidualDtype = "float32",
) -> ErrorBound:
    """Bounds the residuals and the error of a sum of ``echo_psum`` outputs.

    Holds for every input, up to the roundings of float32 sums.

    Args:
      fmt: the wire format.
      ranks: axis size ``N``.
      peak: bound on the magnitude of every rank's input, in block coordinates.
      sum_peak: bound on the magnitude of the exact sum over ranks, in block
        coordinates; ``ranks * peak`` when not given.
      calls: number of calls summed. Needed without feedback, where the error grows with
        it; with feedback the bound holds for every number of calls.
      feedback: whether each call repays the error of the one before.
      residual_dtype: how residuals are kept between calls. Storing them loses up to
        1/512 of what is owed in bfloat16, 1/247 in int8, 1/14 in int4, at every call,
        and that is not repaid: ``calls`` is needed then as well.

    Returns:
      An :class:`ErrorBound`, in the units of ``peak``.

    Raises:
      ValueError: if ``calls`` is missing without feedback or with a loss in storage, or
        an argument is out of range.

    Example:
        >>> bound = error_bound(WireFormat(bits=4), ranks=8)
        >>> round(bound.send_residual, 4)
        0.0717

    The bound on the stream grows like ``N`` (each rank owes at most one rounding of its
    own) and not with depth. What is usual is smaller:
    :func:`echo_jax.wire.typical_bound`.
    """
    _check(ranks, peak, sum_peak, calls)
    loss = _storage_rounding(residual_dtype, calls, feedback)
    c = contraction(fmt)
    total = ranks * peak if sum_peak is None else sum_peak
    if feedback:
        send = peak * c / (1.0 - c * (1.0 + loss))
        repaid = (2.0 + loss) * ranks * send  # by which repaying changes the sum
        reduce = (total + repaid) * c / (1.0 - c * (1.0 + loss))
        lost = (calls - 1) * loss if calls is not None else 0.0
        stream = (ranks * send + reduce) * (1.0 + lost)
    else:
        assert calls is not None
        send = peak * c
        reduce = (total + ranks * send) * c
        stream = calls * (ranks * send + reduce)
    return _bound(
        fmt, (1.0 + loss) * send, (1.0 + loss) * reduce, stream, inverse_gain(fmt)
    )


def typical_bound(
    fmt: WireFormat,
    *,
    ranks: int,
    values: int,
    peak: float = 1.0,
    sum_peak: float | None = None,
    calls: int | None = None,
    feedback: bool = True,
    residual_dtype: ResidualDtype = "float32",
    failure: float = 0.01,
) -> ErrorBound:
    """Bounds the error that is to be expected, where :func:`error_bound` bounds any.

    Assumed: rounding errors of different ranks (and without feedback of different
    calls) are independent, each uniform within half a scale; and a block's values are
    near Gaussian, so that repaying an error of ``k`` times their size, ``k`` the
    Gaussian contraction, widens its peak by ``sqrt(1 + k**2)``. Rotated blocks come
    close. Broken by ranks that hold the same values, and by a block without rotation in
    which one outlier sets the scale.

    Then what a rank rounds has peaks of ``A = peak / sqrt(1 - k**2)``, what the owner
    rounds of ``S = sqrt((sum_peak**2 + 2 N k**2 A**2) / (1 - k**2))``; the error is a
    sum of independent uniform ones with half-widths ``c A`` (``N`` times) and ``c S``,
    and exceeds ``t c sqrt((N A**2 + S**2) / 3)`` with probability at most
    ``2 exp(-t**2 / 2)``.

    Args:
      fmt: the wire format.
      ranks: axis size ``N``.
      values: number of errors that are to stay below the bound together.
      peak: root mean square over ranks of a block's largest magnitude, in block
        coordinates. Calls differ: with feedback an exponentially weighted mean square
        over calls counts, ``k**2`` the weight of the call before; without, the plain
        one; where ``residual_dtype`` loses something, the larger of the two.
      sum_peak: largest magnitude of the exact sum over ranks, in block coordinates,
        taken over calls likewise; ``ranks * peak`` when not given.
      calls: as in :func:`error_bound`.
      feedback: as in :func:`error_bound`.
      residual_dtype: as in :func:`error_bound`.
      failure: probability that an error exceeds the bound.

    Returns:
      An :class:`ErrorBound`, in the units of ``peak``; its residuals are those of
      ranks and owners with such peaks.

    Raises:
      ValueError: as :func:`error_bound`; and if ``values`` is not at least 1 or
        ``failure`` not between 0 and 1.

    Example:
        >>> worst = error_bound(WireFormat(), ranks=512, sum_peak=23.0)
        >>> usual = typical_bound(WireFormat(), ranks=512, values=4096, sum_peak=23.0)
        >>> usual.stream < worst.stream / 5
        True

    Source: Hoeffding, "Probability Inequalities for Sums of Bounded Random Variables",
    1963; the moment generating function of a uniform variable stays below that of the
    Gaussian with its variance.
    """
    _check(ranks, peak, sum_peak, calls)
    loss = _storage_rounding(residual_dtype, calls, feedback)
    if values < 1 or not 0.0 < failure < 1.0:
        raise ValueError(
            "typical_bound needs values >= 1 and failure between 0 and 1, got "
            f"values={values}, failure={failure}."
        )
    c, square = contraction(fmt), gaussian_contraction(fmt) ** 2
    total = ranks * peak if sum_peak is None else sum_peak
    if feedback:
        own = peak**2 / (1.0 - square)
        owner = (total**2 + 2.0 * ranks * square * own) / (1.0 - square)
        # What storing w and v lost in every call before the newest: uniform too, within
        # this part of half a scale.
        growth = 1.0 if calls is None else 1.0 + (calls - 1) * loss**2
    else:
        assert calls is not None
        own = peak**2
        owner = total**2 + ranks * square * own
        growth = float(calls)
    deviations = math.sqrt(2.0 * math.log(2.0 * values / failure))
    stream = deviations * c * math.sqrt(growth * (ranks * own + owner) / 3.0)
    # Coming out, a value is a sum of its block's errors with signs.
    gain = math.sqrt(fmt.block_size) * 2.0**-fmt.inverse_exponent if fmt.rotate else 1.0
    return _bound(fmt, c * math.sqrt(own), c * math.sqrt(owner), stream, gain)


def _bound(
    fmt: WireFormat, send: float, reduce: float, stream: float, gain: float
) -> ErrorBound:
    if math.isinf(stream):
        raise ValueError("error_bound overflows: peak or ranks are too large.")
    return ErrorBound(
        contraction=contraction(fmt),
        gaussian_contraction=gaussian_contraction(fmt),
        send_residual=send,
        reduce_residual=reduce,
        stream=stream,
        output=stream * gain,
    )


def _storage_rounding(residual_dtype: str, calls: int | None, feedback: bool) -> float:
    if residual_dtype not in _STORAGE_ROUNDING:
        raise ValueError(
            f"residual_dtype={residual_dtype!r} is not known: choose one of "
            f"{tuple(_STORAGE_ROUNDING)}."
        )
    if not feedback and calls is None:
        raise ValueError(
            "Without feedback the error grows with the number of calls: pass calls=... "
            "to error_bound(..., feedback=False)."
        )
    loss = _STORAGE_ROUNDING[residual_dtype] if feedback else 0.0
    if loss and calls is None:
        raise ValueError(
            f"Residuals kept in {residual_dtype} lose a little at every call: pass "
            f"calls=... to error_bound(..., residual_dtype={residual_dtype!r})."
        )
    return loss


def _check(ranks: int, peak: float, sum_peak: float | None, calls: int | None) -> None:
    if ranks < 1 or not peak >= 0.0:
        raise ValueError(
            "error_bound needs ranks >= 1 and peak >= 0, got "
            f"ranks={ranks}, peak={peak}."
        )
    if sum_peak is not None and not sum_peak >= 0.0:
        raise ValueError(f"error_bound needs sum_peak >= 0 or None, got {sum_peak}.")
    if calls is not None and calls < 1:
        raise ValueError(f"error_bound needs calls >= 1 or None, got calls={calls}.")
