"""Sums that experiments/benchmark_variants.py plays, held against the library's."""

import dataclasses
import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import echo_jax as echo
from echo_jax.wire.rotation import rotate, unrotate
from tests.ranks import bits_of, draw

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "experiments"))

from variants.call import Form, Rounding, keep_largest, round_blocks, sum_ranks
from variants.plans import Variant, bits_of_edges, calls_of, spend

RANKS = 3
FORM, FORM64 = Form(block_size=32, span=64), Form()


def test_with_nothing_chosen_sums_are_the_library_s():
    """Several calls in a row, each of its own width."""
    widths = (3, 4, 8)
    x = draw(0, RANKS, len(widths), 7, 96)

    def library(bits, x, residual):
        fmt = dataclasses.replace(FORM.format, bits=bits)
        config = dataclasses.replace(FORM.config, format=fmt)
        return echo.echo_psum(x, residual, "tensor", config=config)

    def own(bits, x, residual):
        told = jnp.array([Rounding(bits=bits)] * 2)
        return sum_ranks(told, x, residual, form=FORM, axis_name="tensor")

    def rank(x, call):
        residual, sums = echo.init_residual(x[0], "tensor", config=FORM.config), []
        for bits, part in zip(widths, x, strict=True):
            y, residual = call(bits, part, residual)
            sums.append(y)
        return jnp.stack(sums), residual.send, residual.reduce

    def run(call):
        over_ranks = jax.vmap(functools.partial(rank, call=call), axis_name="tensor")
        return jax.jit(over_ranks)(x)

    for found, wanted in zip(run(own), run(library), strict=True):
        np.testing.assert_array_equal(bits_of(found), bits_of(wanted))


def test_an_exact_sum_pays_what_is_owed():
    x = draw(1, RANKS, 2, 7, 96)

    def both(x):
        residual = echo.init_residual(x[0], "tensor", config=FORM.config)
        sums = functools.partial(sum_ranks, form=FORM, axis_name="tensor")
        first, residual = sums(np.array([Rounding()] * 2), x[0], residual)
        second, _ = sums(np.array([Rounding(bits=0)] * 2), x[1], residual)
        return first + second

    found = jax.vmap(both, axis_name="tensor")(x)
    # Left over: what residuals lose in bfloat16, under 2**-9 of a rounding's error.
    np.testing.assert_allclose(found[0], x.sum((0, 1)), atol=2e-3, rtol=0)


@pytest.mark.parametrize("rotated", [True, False])
def test_the_largest_values_of_a_span_arrive_in_bfloat16(rotated):
    form = Form(block_size=32, span=64, rotate=rotated)
    x = np.array(draw(2, 3, 6, 32))
    x[1, 2, 5], x[1, 3, 7] = 1e4, -5e3  # one span
    values = rotate(jnp.array(x), form.format)
    kept = np.array(unrotate(keep_largest(values, 1, form), form.format))
    for span, found in zip(x.reshape(-1, 64), kept.reshape(-1, 64), strict=True):
        place = np.abs(span).argmax()
        assert found[place] == pytest.approx(span[place], rel=2**-8)
        assert np.abs(np.delete(found, place)).max() <= 1e-6 * np.abs(span).max()
    errors = [
        np.abs(round_blocks(values, Rounding(kept=count), form) - values)[1].max()
        for count in (0, 2)
    ]
    # What is left of 1e4 in bfloat16 stays in the rest, and is rounded with it.
    assert errors[1] < errors[0] / (10 if rotated else 50)


def test_a_scale_in_a_byte_misses_by_little_more():
    form, x = Form(), jnp.array(draw(3, 200, 64))
    found = round_blocks(x, Rounding(fraction=2), form)
    peak = np.abs(x).max(-1, keepdims=True)
    # The scale is off by an eighth of itself at most, either way.
    assert (np.abs(found - x) <= 1.01 * peak * (1 / 8 + 7 / 8 / 15)).all()
    fine = np.abs(round_blocks(x, Rounding(), form) - x)
    assert np.square(found - x).mean() < 1.1 * np.square(fine).mean()


def test_bits_are_counted_for_both_roundings():
    bits = bits_of_edges(60)
    plain = Variant(name="edges", calls=calls_of(bits))
    plan = echo.DepthPlan.edges(echo.EchoConfig(), num_calls=60)
    assert plain.bits_per_value == pytest.approx(plan.average_bits)
    kept = Variant(name="kept", calls=calls_of(bits, kept=2, fraction=2))
    more = kept.bits_per_value - plain.bits_per_value
    assert more == pytest.approx(2 * (16 + 6) / 64 - 8 / 64)


def test_spending_is_the_library_s_where_roundings_are_alike():
    effects = np.abs(np.array(draw(4, 20, 2), float))
    found = spend(effects, (3, 4, 6, 8), 4.5 - 0.25, apart=False)
    sensitivity = echo.plan.Sensitivity(effects=tuple(effects.sum(1).tolist()), bits=4)
    plan = echo.DepthPlan.from_sensitivity(sensitivity, bits=4.5)
    assert found[:, 0].tolist() == [call.format.bits for call in plan]
    apart = spend(effects, (3, 4, 5, 6, 8), 4.25, apart=True)
    assert apart.mean() <= 4.25
    assert (apart[:, 0] != apart[:, 1]).any()


@pytest.mark.parametrize("bits", [3, 4])
def test_more_scales_and_uneven_levels_miss_gaussian_values_by_less(bits):
    x = jnp.array(draw(5, 2000, 64))

    def squares(**kinds):
        found = round_blocks(x, Rounding(bits=bits, **kinds), FORM64)
        return np.square(found - x).sum(-1)

    one, two, three = (squares(scales=count) for count in (1, 2, 3))
    # Block by block: the first scale stays among those to choose from.
    assert (two <= one).all()
    assert (three <= two).all()
    assert two.mean() < 0.95 * one.mean()
    assert squares(uneven=1).mean() < 0.85 * one.mean()
    assert squares(uneven=1, scales=2).mean() < 0.8 * one.mean()


def test_uneven_levels_end_at_the_largest_value():
    x = np.array(draw(6, 50, 64))
    x[:, 3] = 1e4
    found = round_blocks(jnp.array(x), Rounding(uneven=1), FORM64)
    # A scale is off by half a unit in the last of bfloat16's eight places.
    np.testing.assert_allclose(found[:, 3], 1e4, rtol=2**-8)
