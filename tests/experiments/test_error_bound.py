"""The recorded figures of experiments/error_bound.py keep the promises."""

import dataclasses
import math
import pathlib
import sys

import jax
import numpy as np
import pytest

from echo_jax.records import read_records

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

import error_bound  # noqa: E402

MODEL = ROOT / "tests" / "models" / "fixtures" / "qwen3"
RESULTS = ROOT / "experiments" / "results" / "error_bound.jsonl"


@pytest.fixture(scope="module")
def cells():
    """Metrics of each cell of each run, by its configuration."""
    found: dict[str, dict] = {}
    for record in read_records(RESULTS):
        if "sweep" in record["config"]:
            cell = found.setdefault(str(record["config"]), dict(record["config"]))
            cell[record["metric"]] = record["value"]
    return list(found.values())


def test_both_bounds_lie_above_every_measurement(cells):
    assert len(cells) > 150
    for cell in cells:
        assert cell["measured_error"] <= cell["bound"], cell
        assert cell["measured_error"] <= cell["typical_bound"], cell


def test_the_typical_bound_is_within_3x_for_rotated_gaussian_blocks(cells):
    gaussian = [
        cell
        for cell in cells
        if cell["distribution"] == "normal" and cell["rotate"] and cell["feedback"]
    ]
    assert {cell["bits"] for cell in gaussian} == {2, 3, 4, 6, 8}
    assert {2, 512} <= {cell["ranks"] for cell in gaussian}
    for cell in gaussian:
        assert cell["typical_bound"] <= 3 * cell["measured_error"], cell


def deep_ratios(cells):
    """Error after 1,000 calls over that after two, by bits and storage."""
    errors = {
        (cell["bits"], cell["residual_dtype"], cell["calls"]): cell
        for cell in cells
        if cell["sweep"] == "depth" and cell["feedback"]
    }
    return {
        (bits, dtype): cell["relative_rms_error"]
        / errors[bits, dtype, 2]["relative_rms_error"]
        for (bits, dtype, calls), cell in errors.items()
        if calls == 1000
    }


def test_error_at_depth_1000_is_within_a_tenth_of_that_at_depth_2(cells):
    ratios = deep_ratios(cells)
    assert len(ratios) == 7
    for (_, dtype), ratio in ratios.items():
        if dtype != "int4":
            assert abs(ratio - 1) <= 0.1


def test_half_a_byte_of_residual_loses_a_fifteenth_of_a_step_at_random(cells):
    """Each call but the newest leaves 1/15**2 of a rounding's variance behind."""
    expected = math.sqrt((1 + 999 / 15**2) / (1 + 1 / 15**2))
    assert deep_ratios(cells)[4, "int4"] == pytest.approx(expected, rel=0.1)


@pytest.fixture(scope="module")
def real(cells):
    return [cell for cell in cells if cell["sweep"] == "activations"]


def test_real_activations_keep_both_bounds_in_every_block(real):
    assert {cell["calls"] for cell in real} == {1, 2, 5, 10, 20, 50, 60}
    assert {cell["bits"] for cell in real} == {2, 3, 4, 8}
    assert {cell["model"] for cell in real} == {"SmolLM2-135M-Instruct.Q4_1"}
    for cell in real:
        assert cell["block_bound_ratio"] >= 1.0, cell
        assert cell["block_typical_bound_ratio"] >= 1.0, cell


def test_feedback_and_rotation_help_with_real_activations(real):
    errors = {
        (cell["feedback"], cell["rotate"]): cell["relative_rms_error"]
        for cell in real
        if cell["bits"] == 4 and cell["calls"] == 60
        if cell["residual_dtype"] == "float32"
    }
    for other in (True, False):
        assert errors[True, other] < errors[False, other]
        assert errors[other, True] < errors[other, False]


def test_activations_of_a_checkpoint_are_measured():
    """The path of the recorded run, on a small model."""
    # What has started with as many devices cannot be made to have fewer.
    assert jax.device_count() >= 2
    settings = error_bound.Settings(
        model=MODEL, model_ranks=2, tokens=16, text=pathlib.Path(__file__)
    )
    sums = error_bound.read_activations(settings)
    assert sums is not None
    assert sums.shape[:3] == (4, 2, 16)
    cell = next(error_bound.activation_cells(sums, tiny=True))
    assert (cell.ranks, cell.calls, cell.values) == (2, 4, sums[0, 0].size)
    assert cell.looks == [1, 2, 4]
    cell = dataclasses.replace(cell, residual_dtype="int4")
    measured = error_bound.run(cell, seed=0, sums=sums)
    # Peaks are those of what was summed, in block coordinates.
    plain = error_bound.run(dataclasses.replace(cell, rotate=False), 0, sums)
    assert plain["peak"].max() == np.abs(sums).max()
    for calls in cell.looks:
        found = error_bound.figures(cell, measured, calls)
        assert found["measured_error"] <= found["typical_bound"]
        assert min(found[f"block_{name}_ratio"] for name in error_bound.BOUNDS) >= 1.0


def test_without_a_model_there_is_nothing_to_read():
    assert error_bound.read_activations(error_bound.Settings()) is None
