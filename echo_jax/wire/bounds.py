"""Closed-form bounds on the error, in block coordinates.

All magnitudes are largest absolute values in block coordinates, that is after the
rotation if the format rotates; ``peak`` bounds one rank's partial sum there. The owner
of a chunk is the rank that sums it.

One rounding is off by at most half a scale, ``|v - Q(v)| <= c max|v|`` with ``c`` the
contraction constant. With feedback the send residual therefore obeys
``|w'| <= c (peak + |w|)``, a contraction whose fixed point ``peak c/(1 - c)`` bounds it
after any number of calls. The reduce residual obeys the same inequality with
``|sum x| + 2 N |w|`` in place of ``peak``, because the owner adds
``sum_i Q(a_i) = sum_i (x_i + w_i - w_i')``. The errors of successive calls telescope:
the error of the stream is ``-(sum_i w_i + v)``, whatever the depth.

In this worst case the residuals of all ranks are as large as they can be and have the
same sign. In practice rounding errors of different ranks are nearly independent and
uniform, so that they add up like ``sqrt(ranks)``: see :func:`typical_bound`.

Source: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression
Schemes", 2019, for the contraction argument; "Echo: Error-Compensated 4-Bit
Tensor-Parallel Communication for LLM Training and Inference", arXiv 2610.14277, 2026,
for its use along depth.
"""

import dataclasses
import functools
import math
from typing import Literal

from echo_jax.wire.format import WireFormat, check_format

# A bfloat16 has 8 significant bits: rounding a scale to nearest changes it by at most
# this relative amount.
_SCALE_ROUNDING = 2.0**-8

ResidualDtype = Literal["float32", "bfloat16", "int8", "int4"]

# The largest error of storing a residual between calls, relative to the largest
# residual that one rounding can leave (half a scale). The integers divide a scale into
# 255 or 15 steps, made slightly wider by HAIR in compact.py; half a step can be lost.
_STORAGE_ROUNDING = {
    "float32": 0.0,
    "bfloat16": 2.0**-9,
    "int8": (1.0 + 2.0**-5) / 255,
    "int4": (1.0 + 2.0**-5) / 15,
}

# The numerical integral over the largest of many Gaussian magnitudes: number of steps,
# and upper limit in standard deviations.
_INTEGRAL_STEPS = 2000
_INTEGRAL_END = 10.0


def contraction(fmt: WireFormat) -> float:
    """``c``: the largest error of one rounding, relative to the block's peak.

    This is ``1/(2**bits - 1)``, increased for rounding the scale to bfloat16 and for
    the roundings of float32 arithmetic: two in computing the scale and two in computing
    ``v / s``, which shift the edge between two codes by at most
    ``2**(bits - 1) 2**-23`` scales.
    """
    float32_roundings = 2.0 ** (fmt.bits - 22)
    return (1.0 + _SCALE_ROUNDING + float32_roundings) / (2**fmt.bits - 1)


def rotation_gain(fmt: WireFormat) -> float:
    """The largest factor by which entering block coordinates can raise a block's peak.

    With rotation ``block_size * 2**-forward_exponent``, reached by a block of equal
    values; 1 without. The peak of Gaussian values rises by only about
    ``sqrt(block_size) * 2**-forward_exponent``.
    """
    return fmt.block_size * 2.0**-fmt.forward_exponent if fmt.rotate else 1.0


def inverse_gain(fmt: WireFormat) -> float:
    """The largest factor by which leaving block coordinates can increase an error."""
    return fmt.block_size * 2.0**-fmt.inverse_exponent if fmt.rotate else 1.0


@functools.cache
def gaussian_contraction(fmt: WireFormat) -> float:
    """Root mean square error of rounding a Gaussian block, relative to its values.

    An error that is uniform within half a scale has the root mean square
    ``c M / sqrt(3)``, where ``M`` is the block's largest magnitude. For ``B`` standard
    Gaussian values, ``E[M**2] = int 2 t (1 - erf(t / sqrt(2))**B) dt``. The result is
    the same with and without rotation, since rotated independent Gaussian values are
    again independent Gaussian values.
    """
    step = _INTEGRAL_END / _INTEGRAL_STEPS
    square = step * sum(
        2.0 * t * (1.0 - math.erf(t / math.sqrt(2.0)) ** fmt.block_size)
        for t in (step * index for index in range(_INTEGRAL_STEPS))
    )
    return contraction(fmt) * math.sqrt(square / 3.0)


def gaussian_stream_error(fmt: WireFormat, *, roundings: Literal[1, 2] = 2) -> float:
    """Root mean square error of the stream with feedback, relative to one exact sum.

    For Gaussian values that are independent from rank to rank. With ``k`` the Gaussian
    contraction and ``r = k**2 / (1 - k**2)``, the send residual has ``r`` times the
    variance of a rank's values and the reduce residual ``r (1 + 2 r)`` times that of
    the sum. Together this gives ``sqrt(2 r + 2 r**2)`` for any number of calls and
    ranks; in one shot, which rounds once, ``sqrt(r)``.

    Args:
      fmt: the wire format.
      roundings: of each value: 2 in two shots, 1 in one.
    """
    owed = 1.0 / (1.0 / gaussian_contraction(fmt) ** 2 - 1.0)
    return math.sqrt(owed if roundings == 1 else 2.0 * owed + 2.0 * owed**2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErrorBound:
    """Bounds on magnitudes, in block coordinates except for ``output``."""

    contraction: float  # c: largest error of one rounding, relative to the block's peak
    # Root mean square error of one rounding of Gaussian values, relative to theirs.
    gaussian_contraction: float
    send_residual: float  # bound on one rank's w after any number of calls
    reduce_residual: float  # bound on the owner's v after any number of calls
    stream: float  # bound on the telescoped error of the summed outputs
    output: float  # bound on the same error outside block coordinates


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

    The bounds hold for every input, up to the rounding of float32 additions and to
    blocks whose peak is under ``2**(bits - 121)``, which stay in the residual whole.
    They are of sums in two shots; in one shot nothing is owed but the send residuals,
    and ``ranks`` times their bound is that of the stream.

    Args:
      fmt: the wire format.
      ranks: axis size ``N``.
      peak: bound on the magnitude of every rank's input, in block coordinates.
      sum_peak: bound on the magnitude of the exact sum over ranks, in block
        coordinates; ``ranks * peak`` when not given.
      calls: number of calls summed. Needed without feedback, where the error grows with
        it; with feedback the bound holds for every number of calls.
      feedback: whether each call adds back the rounding error of the previous one.
      residual_dtype: how residuals are stored between calls. At every call, storing
        loses up to 1/512 of the residual in bfloat16, and up to 1/247 (int8) or 1/14
        (int4) of the largest error of one rounding. These losses are never added back,
        so that ``calls`` is needed for these dtypes too.

    Returns:
      An :class:`ErrorBound`, in the units of ``peak``.

    Raises:
      ValueError: if ``calls`` is missing without feedback or with a ``residual_dtype``
        that loses something, or if an argument is out of range.

    Example:
        >>> bound = error_bound(WireFormat(bits=4), ranks=8)
        >>> round(bound.send_residual, 4)
        0.0717

    The bound on the stream grows like ``N``, since every rank contributes a residual of
    its own, and not with depth. Usual errors are smaller: see
    :func:`echo_jax.wire.typical_bound`.
    """
    check_format(fmt)
    _check(ranks, peak, sum_peak, calls)
    loss = _storage_rounding(residual_dtype, calls, feedback)
    c = contraction(fmt)
    total = ranks * peak if sum_peak is None else sum_peak
    if feedback:
        send = peak * c / (1.0 - c * (1.0 + loss))
        repaid = (2.0 + loss) * ranks * send  # by how much send residuals move the sum
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
    """Bounds the error that is exceeded only with a given, small probability.

    :func:`error_bound` holds for every input; this bound is smaller and rests on two
    assumptions. Rounding errors of different ranks (and, without feedback, of different
    calls) are independent, each uniform within half a scale. And the values of a block
    are nearly Gaussian, so that adding a residual of ``k`` times their size, ``k`` the
    Gaussian contraction, raises the block's peak by ``sqrt(1 + k**2)``. Rotated blocks
    come close to this. The assumptions fail if ranks hold the same values, or if one
    outlier sets the scale of a block that is not rotated.

    Under them, the values that a rank rounds have the peak
    ``A = peak / sqrt(1 - k**2)``, and those that the owner of a chunk rounds
    ``S = sqrt((sum_peak**2 + 2 N k**2 A**2) / (1 - k**2))``. The error is a sum of
    independent uniform errors, ``N`` of half-width ``c A`` and one of ``c S``, and
    exceeds ``t c sqrt((N A**2 + S**2) / 3)`` with probability at most
    ``2 exp(-t**2 / 2)``.

    Args:
      fmt: the wire format.
      ranks: axis size ``N``.
      values: number of errors that all stay below the bound, but for ``failure``.
      peak: largest magnitude of a block, in block coordinates, as the root mean square
        over ranks. If it differs from call to call, take the root mean square over
        calls too: without feedback the plain one; with feedback an exponentially
        weighted one, in which each earlier call counts ``k**2`` times as much as the
        next; where ``residual_dtype`` loses something, the larger of the two.
      sum_peak: largest magnitude of the exact sum over ranks, in block coordinates,
        averaged over calls like ``peak``; ``ranks * peak`` when not given.
      calls: as in :func:`error_bound`.
      feedback: as in :func:`error_bound`.
      residual_dtype: as in :func:`error_bound`.
      failure: probability that any of the errors exceeds the bound.

    Returns:
      An :class:`ErrorBound`, in the units of ``peak``. Its residuals are the largest
      that rounding values of peaks ``A`` and ``S`` can leave.

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
    check_format(fmt)
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
        # What storing w and v lost in every call but the newest. These errors are
        # uniform too, within this fraction of half a scale.
        growth = 1.0 if calls is None else 1.0 + (calls - 1) * loss**2
    else:
        assert calls is not None
        own = peak**2
        owner = total**2 + ranks * square * own
        growth = float(calls)
    deviations = math.sqrt(2.0 * math.log(2.0 * values / failure))
    stream = deviations * c * math.sqrt(growth * (ranks * own + owner) / 3.0)
    # The inverse rotation adds the block's independent errors up, with signs.
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
            f"Residuals stored in {residual_dtype} are rounded at every call: pass "
            f"calls=... to error_bound(..., residual_dtype={residual_dtype!r})."
        )
    return loss


def _check(ranks: int, peak: float, sum_peak: float | None, calls: int | None) -> None:
    if type(ranks) is not int or ranks < 1 or not peak >= 0.0:
        raise ValueError(
            "error_bound needs an integer ranks >= 1 and peak >= 0, got "
            f"ranks={ranks!r}, peak={peak}."
        )
    if sum_peak is not None and not sum_peak >= 0.0:
        raise ValueError(f"error_bound needs sum_peak >= 0 or None, got {sum_peak}.")
    if calls is not None and calls < 1:
        raise ValueError(f"error_bound needs calls >= 1 or None, got calls={calls}.")
