"""What an all-reduce in few bits spends its time on: codec kernels and exchanges alone.

Each stage of a two-shot sum is timed by itself, as a chain of repetitions of which each
waits for the one before. Together they take longer than a sum whose pieces overlap.
"""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import echo_jax as echo
from echo_jax import benchmark
from echo_jax.kernels import get_codec
from echo_jax.wire import blocks as blocking

STAGES = ("send", "exchange", "reduce", "gather", "return", "psum")


def stage_seconds(
    mesh: Mesh,
    shape: tuple[int, int],
    config: echo.EchoConfig,
    *,
    length: int,
    repetitions: int,
) -> dict[str, float]:
    """Median seconds of each stage of one sum of bfloat16; last, that of ``psum``.

    Args:
      mesh: of one axis.
      shape: rows of a rank's message.
      config: of the sum, in one piece.
      length: repetitions that are timed together.
      repetitions: of these; the median counts.
    """
    x = benchmark.draw_message(mesh, shape, "bfloat16")
    seconds = {}
    for name in STAGES:
        chain = _chain(mesh, shape, config, name, length)
        jax.block_until_ready(chain(x))  # compiles
        times = []
        for _ in range(repetitions):
            start = time.perf_counter()
            jax.block_until_ready(chain(x))
            times.append((time.perf_counter() - start) / length)
        seconds[name] = statistics.median(times)
    return seconds


def sent_bytes(
    shape: tuple[int, int], ranks: int, config: echo.EchoConfig
) -> dict[str, int]:
    """Bytes that a rank sends to others in each stage that sends any."""
    few = echo.wire_bytes(shape, ranks, config)
    exact = echo.wire_bytes(shape, ranks, config.exact())
    return {
        "exchange": few["all_to_all"],
        "gather": few["all_gather"],
        "psum": exact["all_reduce"],
    }


def _chain(mesh: Mesh, shape, config: echo.EchoConfig, name: str, length: int):
    """A jitted chain of one stage, of any ranks' rows; returns what it made last."""
    (axis_name,) = mesh.axis_names

    def local(x):
        stage, state = _stage(x[0], shape, config, name, axis_name, mesh.size)
        made = ()
        for _ in range(length):
            state, made = stage(*state)
        return jax.tree.map(lambda leaf: leaf[None], made)

    spec = PartitionSpec(axis_name)
    run = jax.shard_map(
        local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    return jax.jit(run)


def _stage(
    x: jax.Array, shape, config: echo.EchoConfig, name: str, axis_name: str, ranks: int
) -> tuple[Callable, tuple]:
    """A stage from a state to the next state and what it made; and the first state."""
    fmt = config.format
    codec = get_codec(config.backend, fmt)
    blocks = blocking.blocks_per_chunk(shape, fmt.block_size, ranks)
    residual = echo.init_residual(x, axis_name, config=config)
    # Bytes of the message stand for payloads: what is constant would not be sent.
    payload_bytes = ranks * blocks * fmt.block_bytes
    payloads = lax.bitcast_convert_type(x, jnp.uint8).ravel()[:payload_bytes]
    payloads = payloads.reshape(ranks, -1)

    def after(operand, made):
        """The operand, one byte of which waits for what was made from it before."""
        byte = made.ravel()[:1].astype(jnp.uint8).reshape((1,) * operand.ndim)
        return lax.dynamic_update_slice(operand, byte, (0,) * operand.ndim)

    def send(x, owed):
        made, owed = codec.send(x, owed, fmt=fmt, chunks=ranks)
        return (x, owed), made

    def exchange(payloads):
        made = lax.all_to_all(payloads, axis_name, 0, 0, tiled=True)
        return (made,), made

    def reduce(payloads, owed):
        made, owed = codec.reduce(payloads, owed, fmt=fmt)
        return (payloads, owed), made

    def gather(payload):
        made = lax.all_gather(payload, axis_name)
        return (after(payload, made),), made

    def return_(payloads):
        rows = codec.return_(payloads[None], shape=shape, dtype=x.dtype, fmt=fmt)
        return (after(payloads, rows),), rows

    def psum(x):
        made = lax.psum(x, axis_name)
        return (made,), made

    return {
        "send": (send, (x, residual.send)),
        "exchange": (exchange, (payloads,)),
        "reduce": (reduce, (payloads, residual.reduce)),
        "gather": (gather, (payloads[0],)),
        "return": (return_, (payloads,)),
        "psum": (psum, (x,)),
    }[name]
