"""Closed-form bounds on the error, in block coordinates.

All magnitudes are largest absolute values in block coordinates, that is after the
rotation when the format rotates; ``peak`` bounds one rank's partial sum there.

One rounding leaves at most half a scale, ``|v - Q(v)| <= c max|v|`` with ``c`` the
contraction constant. Feeding the error back makes ``|w'| <= c (peak + |w|)``, a
contraction whose fixed point ``peak c/(1 - c)`` bounds the send residual for every
number of calls. The reduce residual obeys the same with ``|sum x| + 2 N |w|`` in place
of ``peak``, since the owner adds ``sum_i Q(a_i) = sum_i (x_i + w_i - w_i')``. The
telescoped error of the stream is ``-(sum_i w_i + v)``, whatever the depth.

Source: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression
Schemes", 2019, for the contraction argument; "Echo: Error-Compensated 4-Bit
Tensor-Parallel Communication for LLM Training and Inference", arXiv 2610.14277, 2026,
for its use along depth.
"""

import dataclasses
import math

from echo_jax.wire.format import WireFormat

# A bfloat16 has 8 significant bits: rounding to the nearest moves a scale by at most
# this part of itself.
_SCALE_ROUNDING = 2.0**-8


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErrorBound:
    """Worst-case magnitudes, in block coordinates unless said otherwise."""

    contraction: float  # c: error of one rounding over the block's largest magnitude
    send_residual: float  # bound on one rank's w after any number of calls
    reduce_residual: float  # bound on the owner's v after any number of calls
    stream: float  # bound on the telescoped error of the summed outputs
    output: float  # ``stream`` outside block coordinates, worst case


def error_bound(
    fmt: WireFormat,
    *,
    ranks: int,
    peak: float = 1.0,
    sum_peak: float | None = None,
    calls: int | None = None,
    feedback: bool = True,
) -> ErrorBound:
    """Bounds the residuals and the error of a sum of ``echo_psum`` outputs.

    Args:
      fmt: the wire format.
      ranks: axis size ``N``.
      peak: bound on the magnitude of every rank's input, in block coordinates.
      sum_peak: bound on the magnitude of the exact sum over ranks, in block
        coordinates; ``ranks * peak`` when not given.
      calls: number of calls summed. Needed without feedback, where the error grows with
        it; with feedback the bound holds for every number of calls.
      feedback: whether each call repays the error of the one before.

    Returns:
      An :class:`ErrorBound`, in the units of ``peak``.

    Raises:
      ValueError: if ``calls`` is missing without feedback, or an argument is out of
        range.

    Example:
        >>> bound = error_bound(WireFormat(bits=4), ranks=8)
        >>> round(bound.send_residual, 4)
        0.0717

    The bound on the stream grows like ``N`` (each rank owes at most one rounding of its
    own) and not with depth.
    """
    if ranks < 1 or not peak >= 0.0:
        raise ValueError(
            "error_bound needs ranks >= 1 and peak >= 0, got "
            f"ranks={ranks}, peak={peak}."
        )
    if sum_peak is not None and not sum_peak >= 0.0:
        raise ValueError(f"error_bound needs sum_peak >= 0 or None, got {sum_peak}.")
    if calls is not None and calls < 1:
        raise ValueError(f"error_bound needs calls >= 1 or None, got calls={calls}.")
    if not feedback and calls is None:
        raise ValueError(
            "Without feedback the error grows with the number of calls: pass calls=... "
            "to error_bound(..., feedback=False)."
        )
    c = contraction(fmt)
    total = ranks * peak if sum_peak is None else sum_peak
    if feedback:
        send = peak * c / (1.0 - c)
        reduce = (total + 2 * ranks * send) * c / (1.0 - c)
        stream = ranks * send + reduce
    else:
        assert calls is not None
        send = peak * c
        reduce = (total + ranks * send) * c
        stream = calls * (ranks * send + reduce)
    if math.isinf(stream):
        raise ValueError(f"error_bound overflows at peak={peak}, ranks={ranks}.")
    return ErrorBound(
        contraction=c,
        send_residual=send,
        reduce_residual=reduce,
        stream=stream,
        output=stream * inverse_gain(fmt),
    )
