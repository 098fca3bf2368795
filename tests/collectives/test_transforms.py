"""Meshes of several axes, and jit, vmap, scan and donation around the calls."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import echo_jax as echo
from tests.ranks import bits_of, draw, mesh, on_ranks

CONFIG = echo.EchoConfig(min_bytes=0, residual_dtype="float32")


def _two_calls(x, axis_name):
    """Two calls and the flush, as a scan whose carry is the residual."""
    residual = echo.init_residual(x, axis_name, config=CONFIG)

    def step(residual, scale):
        y, residual = echo.echo_psum(x * scale, residual, axis_name, config=CONFIG)
        return residual, y

    residual, ys = lax.scan(step, residual, jnp.array([1.0, 0.5]))
    rest, _ = echo.flush(jnp.zeros_like(x), residual, axis_name, config=CONFIG)
    return ys, rest


_on_simulated_ranks = on_ranks(lambda x: _two_calls(x, "tp"))


def _alone(parts):
    """The same on simulated ranks that know of no other axis."""
    ys, rest = _on_simulated_ranks(parts)
    return np.asarray(ys)[0], np.asarray(rest)[0]


@pytest.mark.parametrize(
    ("sizes", "axis_name", "check_vma"),
    [
        ({"dp": 2, "tp": 4}, "tp", True),
        ({"dp": 2, "tp": 4}, "tp", False),
        ({"dp": 2, "tp": 4}, "dp", True),
        ({"dp": 2, "tp": 4}, ("dp", "tp"), True),
        ({"dp": 2, "tp": 4}, ("tp", "dp"), True),
        ({"dp": 2, "tp": 4}, ("tp", "dp"), False),
        ({"pp": 2, "dp": 2, "tp": 2}, "dp", True),
        ({"pp": 2, "dp": 2, "tp": 2}, ("pp", "tp"), True),
        ({"pp": 2, "dp": 2, "tp": 2}, ("pp", "tp"), False),
    ],
    ids=str,
)
def test_c11_groups_of_a_larger_mesh_do_what_they_would_alone(
    sizes, axis_name, check_vma
):
    """Bit for bit, also with the axes in another order than the mesh's."""
    names, shape = tuple(sizes), tuple(sizes.values())
    # Small integers: their rotation is exact, so that backends agree to the last bit.
    x = np.random.default_rng(0).integers(-99, 99, (*shape, 5, 70)).astype(np.float32)
    lead = len(names)

    def body(x):
        x = x.reshape(x.shape[lead:])
        return [
            part.reshape(*([1] * lead), *part.shape)
            for part in _two_calls(x, axis_name)
        ]

    spec = P(*names)
    ys, rest = jax.jit(
        jax.shard_map(
            body, mesh=mesh(**sizes), in_specs=spec, out_specs=spec, check_vma=check_vma
        )
    )(x)
    group = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    others = [name for name in names if name not in group]
    order = [names.index(name) for name in (*others, *group)]
    tail = lambda a: [*order, *range(lead, a.ndim)]  # noqa: E731
    ranks = int(np.prod([sizes[name] for name in group]))

    def groups(a):
        a = np.asarray(a).transpose(tail(a))
        return a.reshape(-1, ranks, *a.shape[lead:])

    for inputs, outputs, rests in zip(groups(x), groups(ys), groups(rest), strict=True):
        expected_ys, expected_rest = _alone(inputs)
        for copy in outputs:
            np.testing.assert_array_equal(copy, expected_ys)
        for copy in rests:
            np.testing.assert_allclose(copy, expected_rest, atol=1e-3, rtol=0)
        exact = 1.5 * inputs.astype(np.float64).sum(axis=0)
        total = outputs[0].astype(np.float64).sum(axis=0) + rests[0]
        assert np.linalg.norm(total - exact) <= 2e-5 * np.linalg.norm(exact)


@pytest.mark.parametrize("min_bytes", [0, 1 << 20])
def test_several_axes_of_simulated_ranks_are_one(min_bytes):
    """Every verb and its gradient, bit for bit as over a single axis."""
    config = dataclasses.replace(CONFIG, min_bytes=min_bytes)
    one_shot = dataclasses.replace(config, algorithm="one-shot")
    # Integers, so that sums do not depend on the order of ranks.
    xs = np.random.default_rng(0).integers(-99, 99, (6, 12, 70)).astype(np.float32)

    def verbs(x, name):
        residual = echo.init_residual(x, name, config=config)
        outputs = [
            echo.echo_psum(x, residual, name, config=c)[0] for c in (config, one_shot)
        ]
        for verb in (echo.echo_psum_scatter, echo.echo_all_gather):
            for tiled in (True, False):
                if verb is echo.echo_psum_scatter and not tiled:
                    continue
                call = lambda x, v=verb, t=tiled: v(  # noqa: E731
                    x, None, name, config=config, tiled=t
                )[0]
                y, transpose = jax.vjp(call, x)
                outputs += [y, *transpose(jnp.round(y))]
        return outputs

    one = jax.jit(jax.vmap(lambda x: verbs(x, "tp"), axis_name="tp"))(xs)
    inner = jax.vmap(lambda x: verbs(x, ("pp", "tp")), axis_name="tp")
    both = jax.jit(jax.vmap(inner, axis_name="pp"))(xs.reshape(2, 3, 12, 70))
    for a, b in zip(one, both, strict=True):
        np.testing.assert_array_equal(a, np.asarray(b).reshape(a.shape))


def test_c11_a_shard_map_over_one_axis_only_and_an_explicit_mesh():
    """The other axis left to the compiler, or a mesh whose types are in the arrays."""
    x = draw(0, 2, 4, 5, 70)

    def body(x):
        residual = echo.init_residual(x[:, 0], "tp", config=CONFIG)
        y, _ = echo.echo_psum(x[:, 0], residual, "tp", config=CONFIG)
        return y[:, None]

    whole, part = P("dp", "tp"), P(None, "tp")
    devices = mesh(dp=2, tp=4)
    full = jax.jit(jax.shard_map(body, mesh=devices, in_specs=whole, out_specs=whole))(
        x
    )
    only = jax.shard_map(
        body, mesh=devices, in_specs=part, out_specs=part, axis_names={"tp"}
    )
    placed = jax.device_put(x, NamedSharding(devices, whole))
    np.testing.assert_array_equal(jax.jit(only)(placed), full)
    explicit = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(explicit):
        placed = jax.device_put(x, NamedSharding(explicit, whole))
        run = jax.jit(jax.shard_map(body, in_specs=whole, out_specs=whole))
        typed = run(placed)
    np.testing.assert_array_equal(typed, full)


def test_64_bit_mode_changes_no_bit():
    x = draw(0, 4, 5, 70)

    def run(x):
        def body(x):
            residual = echo.init_residual(x, "tp", config=CONFIG)
            return echo.echo_psum(x, residual, "tp", config=CONFIG)

        return on_ranks(body)(x)

    short = run(x)
    with jax.enable_x64(True):
        long = run(x)
    for a, b in zip(jax.tree.leaves(short), jax.tree.leaves(long), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(bits_of(a), bits_of(b))


def test_c11_gradients_on_one_axis_are_of_that_axis():
    """Of data ranks each its own; the sum over them is the caller's."""
    devices = mesh(dp=2, tp=4)
    exact = CONFIG.exact()
    w, x = draw(0, 4, 16, 8), draw(1, 2, 6, 16)

    def loss(w, x):
        def local(w, x):
            h, residual = x[0], echo.init_residual(x[0], "tp", config=exact)
            h, residual = echo.echo_pvary(h, residual, "tp", config=exact)
            y, _ = echo.echo_psum(
                jnp.tanh(h @ w[0]) @ w[0].T, residual, "tp", config=exact
            )
            return lax.psum((y * y).sum(), "dp")

        return jax.shard_map(
            local, mesh=devices, in_specs=(P("tp"), P("dp")), out_specs=P()
        )(w, x)

    def dense(w, x):
        y = sum(jnp.tanh(x @ part) @ part.T for part in w)
        return (y * y).sum()

    ours = jax.jit(jax.grad(loss, argnums=(0, 1)))(w, x)
    wanted = jax.jit(jax.grad(dense, argnums=(0, 1)))(w, x)
    for a, b in zip(ours, wanted, strict=True):
        assert np.abs(a - b).max() <= 64 * 2.0**-22 * np.abs(b).max()


def test_c20_repeated_calls_do_not_recompile_and_hold_no_state():
    traces = []

    def body(x, residual):
        traces.append(None)
        return echo.echo_psum(x, residual, "tp", config=CONFIG)

    run = on_ranks(body)
    zero = on_ranks(lambda x: echo.init_residual(x, "tp", config=CONFIG))
    inputs = [draw(seed, 4, 8, 64) for seed in range(4)]

    def all_calls():
        residual, outputs = zero(inputs[0]), []
        for x in inputs:
            y, residual = run(x, residual)
            outputs.append(y)
        return outputs, residual

    first = all_calls()
    assert len(traces) == 1
    run(draw(9, 4, 8, 64), first[1])
    again = all_calls()
    assert len(traces) == 1
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(bits_of(one), bits_of(other))


def test_c20_the_residual_may_be_donated():
    spec = P("tp")

    def body(x, residual):
        y, residual = echo.echo_psum(x[0], residual, "tp", config=CONFIG)
        return residual, y[None]

    # A residual crosses the edge of shard_map whole: its leaves are split by rank.
    def start(x):
        residual = echo.init_residual(x[0], "tp", config=CONFIG)
        return residual

    x = np.random.default_rng(0).integers(-99, 99, (8, 4, 64)).astype(np.float32)
    devices = mesh(tp=8)
    zero = jax.jit(jax.shard_map(start, mesh=devices, in_specs=spec, out_specs=spec))(x)
    run = jax.jit(
        jax.shard_map(
            body, mesh=devices, in_specs=(spec, spec), out_specs=(spec, spec)
        ),
        donate_argnums=1,
    )
    kept, y = run(x, zero)
    assert zero.send.is_deleted()
    again, z = run(x, kept)

    def twice(x):
        residual = echo.init_residual(x, "tp", config=CONFIG)
        first, residual = echo.echo_psum(x, residual, "tp", config=CONFIG)
        second, _ = echo.echo_psum(x, residual, "tp", config=CONFIG)
        return first, second

    for ours, simulated in zip((y, z), on_ranks(twice)(x), strict=True):
        np.testing.assert_array_equal(ours, simulated)
    assert again.layout == kept.layout == zero.layout


@pytest.mark.parametrize("mode", ["vmap", "vma"])
def test_an_inner_vmap_is_a_call_for_each_entry(mode):
    x = np.random.default_rng(0).integers(-99, 99, (4, 3, 2, 70)).astype(np.float32)

    def one(x):
        residual = echo.init_residual(x, "tp", config=CONFIG)
        y, residual = echo.echo_psum(x, residual, "tp", config=CONFIG)
        z, residual = echo.echo_psum(x, residual, "tp", config=CONFIG)
        return y, z, residual.send, residual.reduce

    batched = on_ranks(jax.vmap(one), mode=mode)(x)
    run = on_ranks(one, mode=mode)
    for entry in range(3):
        for whole, part in zip(batched, run(x[:, entry]), strict=True):
            np.testing.assert_array_equal(whole[:, entry], part)


def test_a_branch_not_taken_is_no_call():
    def body(x, take):
        residual = echo.init_residual(x, "tp", config=CONFIG)
        residual = jax.tree.map(lambda leaf: leaf + 0.5, residual)
        return lax.cond(
            take,
            lambda: echo.echo_psum(x, residual, "tp", config=CONFIG),
            lambda: (jnp.zeros_like(x), residual),
        )

    x = draw(0, 4, 2, 64)
    run = on_ranks(body, replicated=(1,))
    _, kept = run(x, False)
    assert (np.asarray(kept.send) == 0.5).all()
    _, paid = run(x, True)
    assert not (np.asarray(paid.send) == 0.5).any()
