"""Every notebook runs from the first cell to the last, and draws what it says."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.py"))
LONG = ("04_where_the_error_goes", "05_train_tiny")


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.long] * (path.stem in LONG))
        for path in NOTEBOOKS
    ],
)
def test_notebook_runs(path):
    """As a script: what jupytext makes of it has the same cells."""
    environment = {
        **os.environ,
        "MPLBACKEND": "agg",
        "NPROC": "16",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    environment.pop("XLA_FLAGS", None)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout


def test_notebooks_are_percent_files():
    assert len(NOTEBOOKS) == 5
    for path in NOTEBOOKS:
        text = path.read_text()
        assert "format_name: percent" in text
        assert text.count("# %% [markdown]\n") >= 2
        assert "plt.show()" in text
