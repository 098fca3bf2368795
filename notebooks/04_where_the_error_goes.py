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
# # Where the error goes
#
# Feedback does not remove rounding noise: it shapes the noise along depth so that it
# cancels in the sum. And not all calls of a network matter equally.

# %%
import dataclasses

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

import echo_jax as echo

# %% [markdown]
# ## The spectrum along depth: a first-order noise shaper
#
# The error of a single output is the difference between the old residual, which the
# call adds, and the new one, which it leaves.

# %%
RANKS, CALLS, SHAPE = 4, 256, (4, 256)


def errors_of_calls(config):
    """Errors of single outputs, ``(calls, values)``."""

    def rank():
        def call(residual, index):
            key = jax.random.key(index * RANKS + jax.lax.axis_index("tp"))
            x = jax.random.normal(key, SHAPE)
            y, residual = echo.echo_psum(x, residual, "tp", config=config)
            return residual, (y - jax.lax.psum(x, "tp")).ravel()

        residual = echo.init_residual(SHAPE, "tp", config=config)
        return jax.lax.scan(call, residual, jnp.arange(CALLS))[1]

    run = jax.vmap(rank, axis_name="tp", axis_size=RANKS, out_axes=None)
    return np.asarray(jax.jit(run)())


frequencies = 2 * np.pi * np.fft.rfftfreq(CALLS)
plt.figure(figsize=(6, 3.2))
power = {}
for feedback in (True, False):
    errors = errors_of_calls(echo.EchoConfig(min_bytes=0, feedback=feedback))
    spectrum = np.mean(np.abs(np.fft.rfft(errors, axis=0)) ** 2, axis=1) / CALLS
    power[feedback] = spectrum
    plt.plot(frequencies, spectrum, label="feedback" if feedback else "no feedback")
white = power[False].mean()
plt.plot(frequencies, white * 4 * np.sin(frequencies / 2) ** 2, "k:", label="theory")
plt.xlabel("frequency along depth, radians a call")
plt.ylabel("power")
plt.yscale("log")
plt.legend()
plt.grid(alpha=0.3)
plt.show()
ratio = power[True][1:].mean() / power[False][1:].mean()
print(f"power of single outputs' errors, with over without feedback: {ratio:.2f}")
print(f"at the lowest frequency: {power[True][1] / white:.4f}")

# %% [markdown]
# ## Which calls matter most
#
# A small, briefly trained decoder with one call in 4 bits and all others exact.

# %%
from echo_jax.layers import merge_module, split_module, split_ranks
from echo_jax.models import Decoder, DecoderConfig
from echo_jax.training import (
    DataConfig,
    MeshConfig,
    OptimizerConfig,
    create_state,
    make_mesh,
    make_optimizer,
    make_train_step,
)
from echo_jax.training import data as text_data

MODEL = DecoderConfig(
    num_layers=6, width=64, num_heads=4, num_kv_heads=4, head_dim=16, mlp_width=128
)
STEPS, TENSOR_RANKS = 100, 4
SIZES = DataConfig(batch_size=8, length=64)
text, _ = text_data.split_heldout(text_data.read_text(None), SIZES.length)


def batch(step):
    return jnp.asarray(text_data.draw_batch(text, sizes=SIZES, seed=0, step=step))


optimizer = make_optimizer(OptimizerConfig(), STEPS)
mesh = make_mesh(MeshConfig(data_ranks=1, tensor_ranks=1))
state, parts = create_state(MODEL, mesh, optimizer=optimizer, seed=0)
exact_plan = echo.DepthPlan.uniform(echo.EchoConfig().exact())
step = make_train_step(parts, mesh, optimizer=optimizer, plan=exact_plan)
for index in range(STEPS):
    state, metrics = step(state, batch(index))
print(f"loss {float(metrics.loss):.3f} nats a byte after {STEPS} steps")

# %%
graphdef, _, _ = split_module(jax.eval_shape(lambda: Decoder(MODEL, rngs=nnx.Rngs(0))))
cut, in_axes = split_ranks(state.params, parts.specs, "tensor", TENSOR_RANKS)
tokens = batch(STEPS)[:, :-1]


def logits(plan):
    """Logits of all ranks, joined along the vocabulary."""

    def rank(params):
        return merge_module(graphdef, params)(tokens, plan=plan)[0]

    out = jax.jit(jax.vmap(rank, in_axes=(in_axes,), axis_name="tensor"))(cut)
    return jnp.concatenate(list(out), axis=-1)


def divergence(plan):
    """Mean KL of the plan's predictions from the exact ones, nats."""
    ours = jax.nn.log_softmax(logits(plan)[..., : MODEL.vocab_size])
    return float(jnp.mean(jnp.sum(jnp.exp(reference) * (reference - ours), axis=-1)))


config = echo.EchoConfig(min_bytes=0)
exact = config.exact()
# The embedding's sum is exact as well: only the layers are looked at.
base = echo.DepthPlan(body=exact, vocab_bits=8, num_calls=MODEL.num_calls)
reference = jax.nn.log_softmax(logits(base)[..., : MODEL.vocab_size])
# Exact calls would repay the error at once: without feedback it stays.
plain = dataclasses.replace(config, feedback=False)
alone = []
for call in range(MODEL.num_calls):
    plan = dataclasses.replace(base, head=(exact,) * call + (plain,))
    alone.append(divergence(plan))
plt.figure(figsize=(6, 3.2))
plt.bar(np.arange(MODEL.num_calls), alone)
plt.xlabel("the one call in 4 bits")
plt.ylabel("KL of the predictions, nats")
plt.grid(alpha=0.3)
plt.show()
for call, value in enumerate(alone):
    print(f"call {call:2}: {value:.6f}")

# %% [markdown]
# ## Plans
#
# All calls in 4 bits, with and without feedback, and with more bits in the first and
# the last calls.

# %%
edges = echo.DepthPlan.edges(config, first=1, last=1, num_calls=MODEL.num_calls)
plans = {
    "no feedback": echo.DepthPlan.uniform(plain),
    "feedback": echo.DepthPlan.uniform(config),
    "feedback, exact last call": echo.DepthPlan.uniform(config, exact_final=True),
    "feedback, 8 bits at the ends": edges,
}
found = {name: divergence(plan) for name, plan in plans.items()}
for name, value in found.items():
    print(f"{name:30} {value:.6f}")
assert found["feedback"] < found["no feedback"]
