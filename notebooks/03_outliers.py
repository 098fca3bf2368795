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
# # Outliers
#
# Does error feedback keep up when activations have outliers, or when their distribution
# shifts? After half of the calls such an event happens. Shown is the error of the
# values beside the outliers, relative to the error before the event.
# `experiments/outliers.py` records the figures.

# %%
import pathlib
import sys

import matplotlib.pyplot as plt
import numpy as np

HERE = pathlib.Path(__file__).parent if "__file__" in globals() else pathlib.Path()
sys.path.insert(0, str(HERE.resolve().parent / "experiments"))

import outliers

SETTINGS = outliers.Settings(blocks=64, calls=40)
HALF = SETTINGS.calls // 2
KINDS = {
    "rotated": {"rotate": True},
    "not rotated": {"rotate": False, "residual_dtype": "float32"},
    "not rotated, residual in bfloat16": {"rotate": False},
    "not rotated, no feedback": {"rotate": False, "feedback": False},
}


def level(errors):
    """Error over its level before the event, mean over blocks."""
    before = np.median(errors[HALF // 2 : HALF])
    return errors.mean(axis=1) / before


def curves(event, size):
    """One line for each way to send."""
    _, axis = plt.subplots(figsize=(6, 3.2))
    for name, kind in KINDS.items():
        errors = level(outliers.run(SETTINGS, event, size, **kind))
        axis.plot(np.arange(SETTINGS.calls) - HALF, errors, label=name)
    axis.set(yscale="log", xlabel="calls after the event", ylabel="error over before")
    axis.set_title(f"{event.replace('_', ' ')}, {size:,.0f}")
    axis.legend(fontsize="small")
    axis.grid(alpha=0.3)
    plt.show()


# %% [markdown]
# ## A spike of growing size, for one call
#
# How many calls does it take until the error of every block is below twice its usual
# level again?

# %%
print(f"{'size':>8}", *(f"{name:>34}" for name in KINDS))
needed = {}
for size in (10.0, 100.0, 1e3, 1e4, 1e5):
    cells = []
    for name, kind in KINDS.items():
        errors = outliers.run(SETTINGS, "spike", size, **kind)
        calls = outliers.recovery(errors, "spike")
        needed[name, size] = -1 if (calls < 0).any() else calls.max()
        text = "never" if needed[name, size] < 0 else f"{needed[name, size]} calls"
        cells.append(f"{text} (worst {level(errors)[HALF:].max():,.0f})")
    print(f"{size:8,.0f}", *(f"{cell:>34}" for cell in cells))
assert needed["rotated", 1e4] == 2
assert needed["not rotated", 1e4] == 3
curves("spike", 1e4)

# %% [markdown]
# The error of a spike of 10,000 is repaid within two calls with rotation and within
# three without. The rotation turns the spike into 64 equal magnitudes, which the code
# represents almost exactly. Without rotation, the rounding error is huge for one call,
# and a residual in bfloat16 is itself rounded while it is huge; that part is never
# repaid.
#
# ## A shift of the distribution
#
# When values grow, nothing has to be repaid first. When they shrink, the old residual
# is large compared with them for a few calls.

# %%
curves("shift_up", 100.0)
curves("shift_down", 100.0)

# %% [markdown]
# ## Channels that become outliers and stay
#
# The error does not return to its old level, because the other values of the block are
# sent with a coarser scale from then on. The rotation spreads this error over the
# block.

# %%
curves("channels", 100.0)

# %% [markdown]
# ## Massive tokens
#
# Each token is a row, and blocks never span two rows, so that a massive token does not
# change the error of any other.

# %%
import jax.numpy as jnp

import echo_jax as echo

fmt = echo.WireFormat()
x = np.random.default_rng(0).standard_normal((16, 256)).astype(np.float32)
massive = x.copy()
massive[3] *= 1e4
plain, other = (
    np.asarray(echo.dequantize(echo.quantize(jnp.asarray(v), fmt), v.shape, v.dtype))
    for v in (x, massive)
)
rows = np.arange(16) != 3
print("other tokens unchanged:", (plain[rows] == other[rows]).all())
assert (plain[rows] == other[rows]).all()
