# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The error bound
#
# Measured errors beside the worst-case and the typical bound, for several numbers of
# bits, block sizes, ranks and depths. Change `GRID` and run it again;
# `experiments/error_bound.py` makes the same measurement on a larger grid.

# %%
import dataclasses
import pathlib
import sys

import matplotlib.pyplot as plt
import numpy as np

HERE = pathlib.Path(__file__).parent if "__file__" in globals() else pathlib.Path()
sys.path.insert(0, str(HERE.resolve().parent / "experiments"))

import error_bound

from echo_jax.wire import gaussian_stream_error

BASE = error_bound.Cell(sweep="format", ranks=4, calls=20, values=4096)
GRID = {
    "bits": (2, 3, 4, 6, 8),
    "block_size": (16, 64, 256),
    "ranks": (2, 8, 32),
    "calls": (2, 20, 200),
}


# %%
def measure(**changes):
    """Metrics of one cell; asserts that both bounds hold."""
    cell = dataclasses.replace(BASE, **changes)
    found = error_bound.figures(cell, error_bound.run(cell, 0), cell.calls)
    assert found["measured_error"] <= found["bound"]
    assert found["measured_error"] <= found["typical_bound"]
    return found


figure, axes = plt.subplots(1, len(GRID), figsize=(4 * len(GRID), 3.2))
for axis, (name, values) in zip(axes, GRID.items(), strict=True):
    cells = [measure(**{name: value}) for value in values]
    for metric in ("bound", "typical_bound", "measured_error"):
        axis.plot(values, [cell[metric] for cell in cells], "-o", label=metric)
    axis.set(xlabel=name, xscale="log", yscale="log")
    axis.set_xticks(values, [str(value) for value in values])
    axis.grid(alpha=0.3)
    for value, cell in zip(values, cells, strict=True):
        ratio = cell["typical_bound"] / cell["measured_error"]
        print(f"{name}={value}: typical bound {ratio:.2f} times the measured maximum")
axes[0].set_ylabel("error, block coordinates")
axes[0].legend(fontsize="small")
plt.show()

# %% [markdown]
# ## The Gaussian theory, with nothing fitted
#
# `sqrt(2 r + 2 r^2)`, whatever the depth and the number of ranks.

# %%
for bits in GRID["bits"]:
    cell = dataclasses.replace(BASE, bits=bits)
    found = measure(bits=bits)["relative_rms_error"]
    theory = gaussian_stream_error(cell.config.format)
    print(f"{bits} bits: measured {found:.4f}, theory {theory:.4f}")
    assert np.isclose(found, theory, rtol=0.1)
