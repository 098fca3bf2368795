"""What crosses ranks in compiled programs, on eight devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import echo_jax as echo
from echo_jax.collectives import exact
from tests import hlo
from tests.ranks import mesh

RANKS = 8
TO_ALL, GATHER = ("all-to-all", "u8"), ("all-gather", "u8")
SAVED = jax.checkpoint_policies.save_only_these_names("echo_psum")


def _compile(body, x, *, mode="vma", spec=P("tp")):
    run = jax.shard_map(
        body,
        mesh=mesh(tp=RANKS),
        in_specs=spec,
        out_specs=spec,
        check_vma=mode == "vma",
    )
    return jax.jit(run).lower(x).compile()


def _sent(compiled) -> dict[str, int]:
    """Bytes that a rank sends to others: all but its own part of each buffer."""
    sent: dict[str, int] = {}
    for one in hlo.collectives(compiled):
        op = one.op.replace("-", "_")
        part = one.buffer_bytes * (RANKS - 1)
        assert part % RANKS == 0
        sent[op] = sent.get(op, 0) + part // RANKS
    return sent


CALLS = [
    (4, 64, (2, 100), "bfloat16"),
    (3, 32, (5, 7, 33), "float32"),
    (8, 256, (1, 2880), "float16"),
    (6, 16, (1,), "float32"),
    (2, 128, (16, 128), "bfloat16"),
]


@pytest.mark.parametrize(("bits", "block_size", "shape", "dtype"), CALLS)
def test_c16_one_buffer_each_way_of_exactly_the_documented_bytes(
    bits, block_size, shape, dtype
):
    fmt = echo.WireFormat(bits=bits, block_size=block_size)
    config = echo.EchoConfig(format=fmt, min_bytes=0)
    x = jax.ShapeDtypeStruct((RANKS, *shape), dtype)

    def body(x):
        residual = echo.init_residual(x[0], "tp", config=config)
        y, residual = echo.echo_psum(x[0], residual, "tp", config=config)
        return y[None], residual.send[None]

    compiled = _compile(body, x)
    assert hlo.counts(compiled) == {TO_ALL: 1, GATHER: 1}
    assert _sent(compiled) == echo.wire_bytes(shape, RANKS, config, dtype=dtype)


@pytest.mark.parametrize("mode", ["vma", "no_vma"])
def test_c16_scatter_and_gather_are_one_collective_each(mode):
    config = echo.EchoConfig(min_bytes=0)
    shape = (16, 100)
    x = jax.ShapeDtypeStruct((RANKS, *shape), "bfloat16")

    def scatter(x):
        return echo.echo_psum_scatter(x[0], None, "tp", config=config)[0][None]

    def scatter_last(x):
        y, _ = echo.echo_psum_scatter(
            x[0].T, None, "tp", scatter_dimension=-1, config=config
        )
        return y[None]

    def gather(x):
        return echo.echo_all_gather(x[0], None, "tp", axis=-1, config=config)[0][None]

    compiled = _compile(scatter, x, mode=mode)
    assert hlo.counts(compiled) == {TO_ALL: 1}
    bytes_of = functools.partial(echo.wire_bytes, axis_size=RANKS, config=config)
    assert _sent(compiled) == bytes_of(shape, verb="psum_scatter")
    compiled = _compile(scatter_last, x, mode=mode)
    assert hlo.counts(compiled) == {TO_ALL: 1}
    assert _sent(compiled) == bytes_of(
        shape[::-1], verb="psum_scatter", scatter_dimension=-1
    )
    compiled = _compile(gather, x, mode=mode)
    assert hlo.counts(compiled) == {GATHER: 1}
    assert _sent(compiled) == bytes_of(shape, verb="all_gather")


def test_an_exact_call_is_one_all_reduce_and_nothing_else():
    config = echo.EchoConfig()
    x = jax.ShapeDtypeStruct((RANKS, 4, 64), "float32")

    def body(x):
        residual = echo.init_residual(x[0], "tp", config=config)
        y, residual = echo.echo_psum(x[0], residual, "tp", config=config)
        return y[None], residual.send[None]

    compiled = _compile(body, x)
    assert hlo.counts(compiled) == {("all-reduce", "f32"): 1}
    assert echo.explain((4, 64), "float32", RANKS, config).path == "exact"


def test_a_message_in_pieces_sends_the_same_bytes():
    config = echo.EchoConfig(min_bytes=0, num_chunks=3)
    x = jax.ShapeDtypeStruct((RANKS, 64, 64), "bfloat16")

    def body(x):
        return echo.echo_psum(x[0], None, "tp", config=config)[0][None]

    compiled = _compile(body, x)
    assert set(hlo.counts(compiled)) == {TO_ALL, GATHER}
    assert _sent(compiled) == echo.wire_bytes((64, 64), RANKS, config)


def test_four_bits_are_at_most_a_fraction_of_bfloat16():
    config = echo.EchoConfig(format=echo.WireFormat(bits=4, block_size=64))
    explanation = echo.explain((4, 2048, 4096), "bfloat16", RANKS, config)
    assert explanation.path == "echo"
    assert explanation.ratio <= 0.27


LAYERS, TOKENS, WIDTH, HIDDEN = 3, 32, 128, 16
CONFIG = echo.EchoConfig(min_bytes=0)


def _layer(h, weights, residual, pvary):
    scale, up, down = weights
    inner, residual = echo.echo_pvary(h, residual, "tp", config=CONFIG)
    inner = inner * lax.rsqrt(jnp.mean(inner * inner, axis=-1, keepdims=True) + 1e-6)
    inner = inner * pvary(scale)
    y = jnp.tanh(inner @ up) @ down
    y, residual = echo.echo_psum(y, residual, "tp", config=CONFIG)
    return h + y, residual


def _program(*, grad, mode="vma", scan=False, policy=None, dtype="bfloat16"):
    """A pre-norm network and its gradients, compiled for eight devices."""
    # Where types are not tracked the norm weight's partial gradients need the mirror.
    pvary = (lambda w: w) if mode == "vma" else lambda w: exact.pvary(w, "tp")
    layer = functools.partial(_layer, pvary=pvary)
    if policy is not None and scan:
        layer = jax.checkpoint(layer, policy=policy)

    def stack(weights, h, residual):
        for index in range(LAYERS):
            h, residual = layer(h, tuple(w[index] for w in weights), residual)
        return h

    if policy is not None:
        # As one piece: recomputing a layer alone would not need its own output.
        stack = jax.checkpoint(stack, policy=policy)

    def loss(weights, x):
        scale, up, down = weights
        # The part of this rank.
        weights = (scale, up[:, 0], down[:, 0])
        residual = echo.init_residual(x, "tp", config=CONFIG)
        if scan:

            def step(carry, w):
                return layer(carry[0], w, carry[1]), None

            (h, _), _ = lax.scan(step, (x, residual), weights)
        else:
            h = stack(weights, x, residual)
        return jnp.mean(jnp.square(h.astype(jnp.float32)))

    specs = ((P(), P(None, "tp"), P(None, "tp")), P())
    devices = {"mesh": mesh(tp=RANKS), "check_vma": mode == "vma"}
    if grad == "inside":
        both = jax.value_and_grad(loss, argnums=(0, 1))
        run = jax.shard_map(both, in_specs=specs, out_specs=(P(), specs), **devices)
    else:
        run = jax.shard_map(loss, in_specs=specs, out_specs=P(), **devices)
        if grad == "outside":
            run = jax.value_and_grad(run, argnums=(0, 1))
    weights = (
        jax.ShapeDtypeStruct((LAYERS, WIDTH), dtype),
        jax.ShapeDtypeStruct((LAYERS, RANKS, WIDTH, HIDDEN), dtype),
        jax.ShapeDtypeStruct((LAYERS, RANKS, HIDDEN, WIDTH), dtype),
    )
    x = jax.ShapeDtypeStruct((TOKENS, WIDTH), dtype)
    return jax.jit(run).lower(weights, x).compile()


def _narrow(compiled, layers: int) -> dict[str, int]:
    """Checks that only norm weights travel wider than u8; counts the u8 ones."""
    norm_weight_bytes = WIDTH * 4
    wide = [one for one in hlo.collectives(compiled) if one.dtype != "u8"]
    assert sum(one.buffer_bytes for one in wide) <= layers * norm_weight_bytes
    assert {one.op for one in wide} <= {"all-reduce"}
    return {
        op: number
        for (op, dtype), number in hlo.counts(compiled).items()
        if dtype == "u8"
    }


def _expected(calls: int) -> dict[str, int]:
    return {"all-to-all": calls, "all-gather": calls}


GRADS = [("outside", "vma"), ("inside", "vma"), ("inside", "no_vma")]


def test_c17_forward_only_u8_crosses_ranks():
    for scan, calls in ((False, LAYERS), (True, 1)):
        compiled = _program(grad=None, scan=scan)
        assert hlo.counts(compiled) == {TO_ALL: calls, GATHER: calls}


@pytest.mark.parametrize(("grad", "mode"), GRADS)
def test_c17_c18_backward_is_one_u8_pair_a_call_and_norm_weights(grad, mode):
    """No further all-reduce, whoever takes the gradient."""
    compiled = _program(grad=grad, mode=mode)
    assert _narrow(compiled, LAYERS) == _expected(2 * LAYERS)
    wire = echo.wire_bytes((TOKENS, WIDTH), RANKS, CONFIG)
    sent = _sent(compiled)
    for op in ("all_to_all", "all_gather"):
        assert sent[op] == 2 * LAYERS * wire[op]


@pytest.mark.parametrize(("grad", "mode"), GRADS)
def test_c17_scan_and_remat_send_nothing_else(grad, mode):
    compiled = _program(grad=grad, mode=mode, scan=True, policy=SAVED)
    assert _narrow(compiled, LAYERS) == _expected(2)


def test_c17_float32_activations_travel_as_u8_too():
    compiled = _program(grad="outside", scan=True, dtype="float32")
    assert _narrow(compiled, LAYERS) == _expected(2)


def test_c14_no_collective_runs_twice_when_outputs_are_saved_by_name():
    """Counted in an unrolled net; without the policy the forward ones run again."""
    saved = _program(grad="outside", policy=SAVED)
    assert _narrow(saved, LAYERS) == _expected(2 * LAYERS)
    again = _program(grad="outside", policy=jax.checkpoint_policies.nothing_saveable)
    assert _narrow(again, LAYERS) == _expected(3 * LAYERS - 1)


def test_one_axis_of_a_mesh_and_a_tuple_of_axes_are_one_pair_of_collectives():
    config = echo.EchoConfig(min_bytes=0)
    devices = mesh(dp=2, tp=4)
    x = jax.ShapeDtypeStruct((2, 4, 16, 64), "bfloat16")
    spec = P("dp", "tp")
    for axis_name in ("tp", ("dp", "tp")):

        def body(x, axis_name=axis_name):
            y, _ = echo.echo_psum(x[0, 0], None, axis_name, config=config)
            return y[None, None]

        run = jax.shard_map(body, mesh=devices, in_specs=spec, out_specs=spec)
        compiled = jax.jit(run).lower(x).compile()
        assert hlo.counts(compiled) == {TO_ALL: 1, GATHER: 1}
        ranks = int(np.prod([devices.shape[a] for a in np.atleast_1d(axis_name)]))
        wire = echo.wire_bytes((16, 64), ranks, config)
        for one in hlo.collectives(compiled):
            sent = one.buffer_bytes * (ranks - 1) // ranks
            assert sent == wire[one.op.replace("-", "_")]
