"""``echo_psum`` with more to choose: the numbers that arrive, without the bytes.

What each rounding does is an argument of the program, so that one program serves every
plan of one :class:`Form`. With nothing of the kind chosen the results are the
library's, whose pieces are used where they exist.
"""

import dataclasses
import functools
import math
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

import echo_jax as echo
from echo_jax import axes
from echo_jax.residual import Residual
from echo_jax.wire import blocks as blocking
from echo_jax.wire.quantizer import MIN_SCALE, inverse_scales
from echo_jax.wire.rotation import rotate, transform, unrotate

WIDEST = 16  # bits of a code; above 8 as good as exact, to measure the rest
BFLOAT16_FRACTION = 7  # bits
_HALVES = np.exp2(np.arange(WIDEST + 1) - 1.0).astype(np.float32)
_HALVES[0] = 1.0  # no such code
_FACTORS = np.array([1.0 / (h - 0.5) for h in _HALVES.astype(float)], np.float32)


class Rounding(NamedTuple):
    """What one rounding sends; numbers, traced or not."""

    bits: int = 4  # of a code, 2 to 16
    kept: int = 0  # largest values of each span that travel in bfloat16 beside it
    # Of a scale. 7 is bfloat16; fewer make a byte of it, with all other bits exponent.
    fraction: int = BFLOAT16_FRACTION
    uneven: int = 0  # 1 for levels that are closer near 0, up to 5 bits
    scales: int = 1  # of which a block takes the best: 1, 2 or 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """What all calls of a program have in common."""

    block_size: int = 64
    rotate: bool = True
    span: int = 64  # values among which the largest are kept: a multiple of a block
    # Coordinates in which they are looked for: of the model, or of rotated blocks.
    coordinates: Literal["model", "rotated"] = "model"

    @property
    def format(self) -> echo.WireFormat:
        """Blocks and rotation; its bits mean nothing."""
        return echo.WireFormat(block_size=self.block_size, rotate=self.rotate)

    @property
    def config(self) -> echo.EchoConfig:
        """What to make a residual with."""
        return echo.EchoConfig(format=self.format, min_bytes=0, backend="xla")

    def cost(self, rounding: Rounding) -> float:
        """Bits a value: code, its part of a scale, kept values and their places."""
        bits, kept, fraction, *_ = rounding
        scale = 16 if fraction == BFLOAT16_FRACTION else 8
        place = math.ceil(math.log2(self.span))
        return bits + scale / self.block_size + kept * (16 + place) / self.span


def sum_ranks(
    told, partial, residual: Residual, stream=None, *, form: Form, axis_name: str
):
    """``(stream + sum, residual)``: both roundings as told, an array ``(2, 5)``.

    Bits of 0 in the first rounding stand for an exact sum, which pays what is owed.
    """
    first, second = (Rounding(*row) for row in told)

    def exactly(partial, residual):
        return echo.flush(partial, residual, axis_name, config=form.config)

    rounded = functools.partial(
        _sum_rounded, first, second, form=form, axis_name=axis_name
    )
    y, residual = lax.cond(first.bits == 0, exactly, rounded, partial, residual)
    return (y if stream is None else stream + y), residual


def _sum_rounded(first, second, partial, residual, *, form: Form, axis_name: str):
    fmt, ranks = form.format, axes.axis_size(axis_name)
    shape = blocking.row_shape(partial.shape)
    rows = partial.reshape(shape).astype(jnp.float32)
    values = rotate(blocking.to_blocks(rows, fmt.block_size, ranks), fmt)
    values = values + residual.send.astype(jnp.float32)
    sent = round_blocks(values, first, form)
    parts = lax.all_to_all(sent, axis_name, split_axis=0, concat_axis=0, tiled=True)
    total = functools.reduce(jnp.add, parts) + residual.reduce.astype(jnp.float32)
    returned = round_blocks(total, second, form)
    owed = dataclasses.replace(
        residual,
        send=(values - sent).astype(residual.send.dtype),
        reduce=(total - returned).astype(residual.reduce.dtype),
    )
    y = lax.all_gather(returned, axis_name)
    if fmt.rotate:
        y = transform(y) * 2.0**-fmt.inverse_exponent
    y = blocking.from_blocks(y.astype(partial.dtype), shape)
    return y.reshape(partial.shape), owed


def round_blocks(values, rounding: Rounding, form: Form):
    """What is read of ``(..., block_size)`` values on the other side."""

    def apart(values):
        kept = keep_largest(values, rounding.kept, form)
        return kept + _round(values - kept, rounding)

    whole = functools.partial(_round, rounding=rounding)
    return lax.cond(rounding.kept > 0, apart, whole, values)


def keep_largest(values, count, form: Form):
    """The ``count`` largest values of each span in bfloat16, zeros elsewhere.

    In the coordinates of the blocks, whichever the values were looked for in.
    """
    turned = form.rotate and form.coordinates == "model"
    found = unrotate(values, form.format) if turned else values
    *chunks, blocks, size = found.shape
    missing = -blocks % (form.span // size)
    padded = jnp.pad(found, [(0, 0)] * len(chunks) + [(0, missing), (0, 0)])
    spans = padded.reshape(*chunks, -1, form.span)
    places = jnp.arange(form.span)

    def take(_, carry):
        left, kept = carry
        largest = jnp.argmax(jnp.abs(left), axis=-1, keepdims=True)
        here = places == largest
        return jnp.where(here, 0.0, left), jnp.where(here, left, kept)

    _, kept = lax.fori_loop(0, count, take, (spans, jnp.zeros_like(spans)))
    kept = lax.reduce_precision(kept, 8, BFLOAT16_FRACTION)
    kept = kept.reshape(padded.shape)[..., :blocks, :]
    return rotate(kept, form.format) if turned else kept


def _round(values, rounding: Rounding):
    """The best that one of the scales allowed makes of each block."""
    peak = jnp.max(jnp.abs(values), axis=-1)
    best = _round_to(values, peak, 0, rounding)

    def compare(number, best):
        found = _round_to(values, peak, number, rounding)
        better = _square(values - found) < _square(values - best)
        return jnp.where(better[..., None], found, best)

    return lax.fori_loop(1, rounding.scales, compare, best)


def _square(x):
    return jnp.sum(jnp.square(x), axis=-1)


def _round_to(values, peak, number, rounding: Rounding):
    """Rounded with one of the scales; ``number`` 0 ends at the largest value."""
    top = peak * jnp.asarray(_SHRUNK)[rounding.bits, number]
    uneven = (rounding.uneven > 0) & (rounding.bits <= 5)
    return lax.cond(uneven, _unevenly, _evenly, values, top, rounding)


def _evenly(values, top, rounding: Rounding):
    """``quantizer.encode`` and ``decode`` with the width as an argument."""
    half = jnp.asarray(_HALVES)[rounding.bits]
    scales = _round_scales(top * jnp.asarray(_FACTORS)[rounding.bits], rounding)
    inverse = inverse_scales(scales)[..., None]
    level = jnp.floor(jnp.where(inverse > 0.0, values * inverse, 0.0))
    level = jnp.clip(level, -half, half - 1.0)
    return (2.0 * level + 1.0) * (scales * 0.5)[..., None]


def _unevenly(values, top, rounding: Rounding):
    """To the nearest of a table's integers times the scale."""
    levels = jnp.asarray(_TABLES)[rounding.bits]
    scales = _round_scales(top * np.float32(1 / _TOP), rounding)
    inverse = inverse_scales(scales)[..., None]
    scaled = jnp.where(inverse > 0.0, values * inverse, 0.0)
    edges = (levels[1:] + levels[:-1]) / 2
    code = jnp.searchsorted(edges, scaled, method="compare_all")
    return levels[code] * scales[..., None]


def _table(*positive: int) -> np.ndarray:
    """Levels and their opposites, in order, filled up with the largest."""
    levels = np.array([*(-p for p in positive[::-1]), *positive], np.float32)
    return np.pad(levels, (0, _MOST - len(levels)), mode="edge")


# The least mean square error for Gaussian blocks of 64, ends at the largest value, as
# integers: rotated back they stay exact in float32.
_MOST, _TOP = 32, 127
_FIVE = (3, 10, 17, 24, 31, 38, 45, 53, 60, 68, 76, 84, 93, 103, 114, 127)
_TABLES = np.stack(
    [_table(*_FIVE)] * 3
    + [
        _table(13, 40, 74, 127),
        _table(6, 18, 31, 45, 60, 77, 98, 127),
    ]
    + [_table(*_FIVE)] * (WIDEST - 4)
)
# Scales to choose from, over the one that ends at the largest value.
_SHRUNK = np.tile(np.float32([1, 0.96, 0.92]), (WIDEST + 1, 1))
_SHRUNK[3], _SHRUNK[4] = (1, 0.8, 0.9), (1, 0.9, 0.8)


def _round_scales(scales, rounding: Rounding):
    """Scales with so many bits of fraction, zero where too small.

    To the nearest; in a byte above 4 bits upwards, since a code that ends below the
    block's largest value would miss it by more than half a step.
    """
    fraction = jnp.asarray(rounding.fraction)
    in_byte = fraction < BFLOAT16_FRACTION
    drop = (23 - fraction).astype(jnp.uint32)
    unit = jnp.uint32(1) << drop
    bits = lax.bitcast_convert_type(scales, jnp.uint32)
    nearest = (unit >> 1) - 1 + ((bits >> drop) & 1)
    bits = bits + jnp.where(in_byte & (rounding.bits > 4), unit - 1, nearest)
    scales = lax.bitcast_convert_type(bits & ~(unit - 1), jnp.float32)
    # The exponents of a byte lie evenly around 0.
    least_in_byte = jnp.exp2(-jnp.exp2(7.0 - fraction))
    least = jnp.where(in_byte, least_in_byte, MIN_SCALE)
    return jnp.where(scales < least, 0.0, scales)
