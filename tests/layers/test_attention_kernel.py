import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import echo_jax as echo
from echo_jax import platform
from echo_jax.layers import Attention, attention_kernel
from echo_jax.models import DecoderConfig
from tests import modules

BATCH, LENGTH, HEADS, KV_HEADS, DIM = 2, 37, 4, 2, 64
A100, H100, T4, CPU = (8, 0), (9, 0), (7, 5), None


def on(capability, monkeypatch):
    monkeypatch.setattr(platform, "cuda_capability", lambda: capability)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "device", "chosen"),
    [
        ("bfloat16", 64, A100, "cudnn"),
        ("float16", 128, A100, "cudnn"),
        ("bfloat16", 128, H100, "cudnn"),
        ("bfloat16", 136, H100, "xla"),
        ("bfloat16", 64, T4, "xla"),
        ("bfloat16", 64, CPU, "xla"),
        ("float32", 64, A100, "xla"),
        ("bfloat16", 60, A100, "xla"),
    ],
)
def test_auto_takes_what_the_device_can_do(
    dtype, head_dim, device, chosen, monkeypatch
):
    on(device, monkeypatch)
    assert attention_kernel.choose_implementation("auto", dtype, head_dim) == chosen


def test_a_mesh_of_cpus_beside_gpus_has_no_capability(monkeypatch):
    """Where JAX's default devices are GPUs, a shard_map may still be over others."""
    gpu = types.SimpleNamespace(device_kind="NVIDIA A100", compute_capability="8.0")
    monkeypatch.setattr(platform, "expects_gpu", lambda: True)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    mesh = jax.make_mesh((1,), ("tp",), axis_types=(AxisType.Auto,))
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    found = [platform.cuda_capability()]

    def trace(x):
        found.append(platform.cuda_capability())
        return x

    spec = PartitionSpec("tp")
    jax.eval_shape(
        jax.shard_map(trace, mesh=mesh, in_specs=spec, out_specs=spec), jnp.ones(1)
    )
    assert found == [(8, 0), None]


@pytest.mark.parametrize("choice", ["xla", "cudnn"])
def test_what_is_asked_for_is_taken(choice, monkeypatch):
    on(H100, monkeypatch)
    found = attention_kernel.choose_implementation(choice, "bfloat16", 128)
    assert found == choice


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"attention": "cudnn"}, "float32"),
        ({"attention": "cudnn", "dtype": "bfloat16", "head_dim": 36}, "and 36"),
        ({"attention": "cudnn", "dtype": "bfloat16", "head_dim": 136}, "and 136"),
    ],
)
def test_a_config_refuses_what_cudnn_is_not_used_for(fields, said):
    with pytest.raises(ValueError, match=said):
        DecoderConfig(**fields)


@pytest.mark.parametrize("device", [T4, CPU])
def test_cudnn_without_such_a_gpu_is_refused_when_called(device, monkeypatch):
    on(device, monkeypatch)
    build = lambda: Attention(  # noqa: E731
        32,
        num_heads=4,
        num_kv_heads=4,
        head_dim=8,
        attention="cudnn",
        dtype=jnp.bfloat16,
        rngs=modules.rngs(),
    )
    config = echo.EchoConfig().exact()
    run = modules.simulated(lambda m, x: m(x, None, config=config)[0], build, 2)
    with pytest.raises(ValueError, match="Take 'auto'"):
        run(modules.init(build), jnp.zeros((1, 5, 32), jnp.bfloat16))


def draw(heads: int, seed: int, length: int = LENGTH):
    shape = (BATCH, length, heads, DIM)
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values, jnp.bfloat16)


def oracle(query, key, value, mask):
    """Attention in NumPy float64; mask (batch, length, slots)."""
    query, key, value = (np.asarray(a, np.float64) for a in (query, key, value))
    share = query.shape[2] // key.shape[2]
    key, value = (np.repeat(a, share, axis=2) for a in (key, value))
    scores = np.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(query.shape[-1])
    scores = np.where(mask[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("bnts,bsnh->btnh", weights, value)


def check(got, query, key, value, mask):
    """Scores, weights and the result are rounded to bfloat16, once each at most.

    That is 2^-8 of each, on mixtures of values that are at most the largest.
    """
    wanted = oracle(query, key, value, mask)
    atol = 4 * 2.0**-8 * float(jnp.abs(value).max())
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, rtol=0, atol=atol)


@pytest.fixture(params=["xla", "cudnn"])
def choice(request):
    here = attention_kernel.choose_implementation("auto", "bfloat16", DIM)
    if request.param == "cudnn" and here == "xla":
        pytest.skip("needs an NVIDIA GPU, Ampere or later, that JAX_PLATFORMS allows")
    return request.param


def test_attention_against_float64(choice):
    query, key, value = draw(HEADS, 0), draw(KV_HEADS, 1), draw(KV_HEADS, 2)
    got = attention_kernel.attend(query, key, value, choice=choice)
    causal = np.tri(LENGTH, dtype=bool)
    check(got, query, key, value, np.broadcast_to(causal, (BATCH, LENGTH, LENGTH)))


def test_masked_attention_against_float64(choice):
    """Five new tokens after a cache, one sequence with slots that hold no token."""
    query, key, value = draw(HEADS, 0, 5), draw(KV_HEADS, 1), draw(KV_HEADS, 2)
    slot, last = np.arange(LENGTH), 20 + np.arange(5)[:, None]
    mask = (slot <= last) & (slot >= np.array([0, 7])[:, None, None])
    got = attention_kernel.attend_masked(
        query, key, value, jnp.asarray(mask), choice=choice
    )
    check(got, query, key, value, mask)


def test_a_token_that_attends_to_nothing_stays_finite(choice):
    """One NaN in a padded token's value would reach all tokens after it."""
    query, key, value = draw(HEADS, 0, 8), draw(KV_HEADS, 1, 8), draw(KV_HEADS, 2, 8)
    mask = np.tri(8, dtype=bool) & (np.arange(8) >= 3)
    mask = jnp.asarray(np.broadcast_to(mask, (BATCH, 8, 8)))
    got = attention_kernel.attend_masked(query, key, value, mask, choice=choice)
    assert bool(jnp.isfinite(got).all())


@pytest.mark.parametrize("place", ["shard_map", "vmap"])
def test_gradients_on_ranks_against_float32(choice, place):
    """Where the types of varying values are tracked, and where they are not."""
    arrays = draw(HEADS, 0), draw(KV_HEADS, 1), draw(KV_HEADS, 2)
    weight = draw(HEADS, 3)

    def gradient(arrays, weight, choice=choice):
        def loss(arrays):
            mixed = attention_kernel.attend(*arrays, choice=choice)
            return jnp.sum(mixed.astype(jnp.float32) * weight)

        return jax.grad(loss)(arrays)

    if place == "shard_map":
        mesh = jax.make_mesh((1,), ("tp",), axis_types=(AxisType.Auto,))
        spec = PartitionSpec("tp")
        specs = {"in_specs": (spec, spec), "out_specs": spec}
        got = jax.jit(jax.shard_map(gradient, mesh=mesh, **specs))(arrays, weight)
    else:  # a sequence a rank
        ranks = jax.tree.map(lambda a: a[:, None], (arrays, weight))
        got = jax.jit(jax.vmap(gradient, axis_name="tp"))(*ranks)
        got = jax.tree.map(lambda a: a[:, 0], got)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), arrays)
    # Six arrays are rounded to bfloat16 on the way: scores, weights, the mixture, both
    # of their gradients, the result.
    for ours, theirs in zip(got, gradient(wide, weight, "xla"), strict=True):
        atol = 8 * 2.0**-8 * float(jnp.abs(theirs).max())
        ours = np.asarray(ours, np.float64)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)


def test_one_token_after_a_cache(choice):
    query, key, value = draw(HEADS, 0, 1), draw(KV_HEADS, 1), draw(KV_HEADS, 2)
    mask = np.broadcast_to(np.arange(LENGTH) < 20, (BATCH, 1, LENGTH))
    got = attention_kernel.attend_masked(
        query, key, value, jnp.asarray(mask), choice=choice
    )
    check(got, query, key, value, mask)


@pytest.mark.parametrize("mask_differs", [False, True])
def test_masked_attention_of_simulated_ranks(choice, mask_differs):
    """What ``load(simulate=N)`` makes of the prefill: all ranks in one call."""
    ranks = [
        (draw(HEADS, n, 5), draw(KV_HEADS, n), draw(KV_HEADS, 10 + n)) for n in (1, 2)
    ]
    slots = np.arange(LENGTH) < np.array([20, 30])[:, None, None, None]
    masks = jnp.asarray(np.broadcast_to(slots, (2, BATCH, 5, LENGTH)))

    def attend(query, key, value, mask):
        return attention_kernel.attend_masked(query, key, value, mask, choice=choice)

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *ranks)
    if mask_differs:
        got = jax.jit(jax.vmap(attend))(*stacked, masks)
    else:
        got = jax.jit(jax.vmap(attend, in_axes=(0, 0, 0, None)))(*stacked, masks[0])
    for n, rank in enumerate(ranks):
        check(got[n], *rank, np.asarray(masks[n if mask_differs else 0]))
