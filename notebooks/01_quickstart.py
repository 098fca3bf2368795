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
# # Quickstart
#
# How a block is quantized, how far a sum over ranks is off, how the next call corrects
# that error, and how many bytes are sent. Ranks are simulated with `vmap`, so that a
# CPU is enough.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import echo_jax as echo

# %% [markdown]
# ## One block
#
# Four bits give sixteen levels, the odd multiples of half a scale.

# %%
x = jax.random.normal(jax.random.key(0), (1, 64))
for rotate in (False, True):
    fmt = echo.WireFormat(bits=4, block_size=64, rotate=rotate)
    payload = echo.quantize(x, fmt)
    x_hat = echo.dequantize(payload, x.shape, x.dtype, fmt)
    print(f"rotate={rotate}: {payload.size} bytes for {x.size} values,", end=" ")
    print(f"relative error {jnp.linalg.norm(x - x_hat) / jnp.linalg.norm(x):.3f}")

fmt = echo.WireFormat(rotate=False)
x_hat = echo.dequantize(echo.quantize(x, fmt), x.shape, x.dtype, fmt)
plt.figure(figsize=(5, 3))
plt.plot(x[0], x_hat[0], ".")
plt.xlabel("value")
plt.ylabel("what the reader sees")
plt.grid(alpha=0.3)
plt.show()

# %% [markdown]
# ## Sums over ranks, call after call
#
# The same function runs inside `jax.shard_map` on devices.

# %%
RANKS, CALLS = 8, 64


def stream(key, config):
    """Error of the running sum of outputs, relative to one exact output."""

    def rank():
        def call(carry, index):
            residual, missing = carry
            own = jax.random.fold_in(key, index * RANKS + jax.lax.axis_index("tp"))
            x = jax.random.normal(own, (16, 256))
            y, residual = echo.echo_psum(x, residual, "tp", config=config)
            exact = jax.lax.psum(x, "tp")
            missing = missing + y - exact
            error = jnp.linalg.norm(missing) / jnp.linalg.norm(exact)
            return (residual, missing), error

        residual = echo.init_residual((16, 256), "tp", config=config)
        carry = (residual, jnp.zeros((16, 256)))
        return jax.lax.scan(call, carry, jnp.arange(CALLS))[1]

    return jax.jit(jax.vmap(rank, axis_name="tp", axis_size=RANKS, out_axes=None))()


with_feedback = stream(jax.random.key(1), echo.EchoConfig(min_bytes=0))
without = stream(jax.random.key(1), echo.EchoConfig(min_bytes=0, feedback=False))
plt.figure(figsize=(5, 3))
plt.plot(np.arange(1, CALLS + 1), with_feedback, label="feedback")
plt.plot(np.arange(1, CALLS + 1), without, label="no feedback")
plt.xlabel("calls")
plt.ylabel("error over one output")
plt.legend()
plt.grid(alpha=0.3)
plt.show()
print(f"after {CALLS} calls: {with_feedback[-1]:.3f} with, {without[-1]:.3f} without")
assert with_feedback[-1] < 0.2 * without[-1]

# %% [markdown]
# ## What travels

# %%
for shape in ((1, 4096), (512, 4096)):
    print(shape, echo.explain(shape, "bfloat16", RANKS))
