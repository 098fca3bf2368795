"""Measures a mesh briefly and fits a cost model to it."""

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax.sharding import Mesh

from echo_jax import benchmark
from echo_jax.benchmark import Case
from echo_jax.config import EchoConfig
from echo_jax.cost_model.fitting import Sample, fit
from echo_jax.cost_model.model import CostModel

SIZES = tuple(1 << n for n in (14, 17, 20, 22, 24))  # bytes, 16 KiB to 16 MiB
LARGE_SIZES = tuple(1 << n for n in (18, 20, 22, 24, 26, 28))  # for fast links
_CHAIN = 4  # sums that are timed together, each depending on the previous one


def calibrate(
    mesh: Mesh,
    *,
    sizes: Sequence[int] = SIZES,
    chunks: Sequence[int] = (1, 4),
    dtype: str = "bfloat16",
    config: EchoConfig = EchoConfig(),
    repetitions: int = 5,
) -> CostModel:
    """Measures a mesh briefly and fits a cost model to it.

    The timed sums follow each other without a pause. The burst of a shaped link
    (``burst_bytes`` of :class:`Link`) is used up by the first of them and cannot be
    measured; if it is known, set it on the link of the result.

    Args:
      mesh: a mesh of one axis. It may span processes, which must all make this call.
      sizes: message sizes to measure, in bytes on each rank.
      chunks: numbers of pieces to measure.
      dtype: of the messages.
      config: of the echo calls; its min_bytes is ignored.
      repetitions: timed rounds of each size.

    Returns:
      The cost model of an all-reduce on this mesh, for any size and number of pieces.

    Raises:
      ValueError: for a mesh of one rank, and as :func:`fit`.
    """
    if mesh.size < 2:
        raise ValueError("1 rank sends nothing: calibrate a mesh of at least 2 ranks.")
    cases = _cases(chunks, dtype, config)
    samples, itemsize = [], jnp.dtype(dtype).itemsize
    for size in sizes:
        shape = benchmark.message_shape(size // itemsize)
        times = benchmark.time_cases(
            list(cases.values()), mesh, shape, length=_CHAIN, repetitions=repetitions
        )
        samples += [
            Sample(
                message_bytes=math.prod(shape) * itemsize,
                seconds=times[case.name].median,
                num_chunks=count,
            )
            for count, case in cases.items()
        ]
    # Gloo, between the processes of CPUs, begins all sends of an all_to_all together;
    # what NCCL does with many ranks was not measured.
    at_once = mesh.devices.flat[0].platform == "cpu"
    return fit(samples, mesh.size, dtype=dtype, config=config, at_once=at_once)


def _cases(
    chunks: Sequence[int], dtype: str, config: EchoConfig
) -> dict[int | None, Case]:
    """The cases to time by number of pieces; the exact sum has the key None."""
    cases: dict[int | None, Case] = {None: Case(name="exact", dtype=dtype)}
    for count in chunks:
        cut = dataclasses.replace(config, min_bytes=0, path="auto", num_chunks=count)
        cases[count] = Case(name=f"echo {count}", config=cut, dtype=dtype)
    return cases
