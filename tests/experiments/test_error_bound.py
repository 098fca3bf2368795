"""The recorded figures of experiments/error_bound.py keep the promises."""

import pathlib

import pytest

from echo_jax.records import read_records

ROOT = pathlib.Path(__file__).parents[2]
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


def test_error_at_depth_1000_is_within_a_tenth_of_that_at_depth_2(cells):
    errors = {
        (cell["bits"], cell["residual_dtype"], cell["calls"]): cell
        for cell in cells
        if cell["sweep"] == "depth" and cell["feedback"]
    }
    deep = [key for key in errors if key[2] == 1000]
    assert len(deep) == 5
    for bits, dtype, _ in deep:
        late, early = (
            errors[bits, dtype, calls]["relative_rms_error"] for calls in (1000, 2)
        )
        assert abs(late / early - 1) <= 0.1
