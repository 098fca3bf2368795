"""A cost model of the mesh at hand, from a short measurement."""

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
_CHAIN = 4  # dependent sums that are timed together


def calibrate(
    mesh: Mesh,
    *,
    sizes: Sequence[int] = SIZES,
    chunks: Sequence[int] = (1, 4),
    dtype: str = "bfloat16",
    config: EchoConfig = EchoConfig(),
    repetitions: int = 5,
) -> CostModel:
    """Measures a mesh for a short while and fits a cost model to it.

    The sums of a measurement follow each other at once: what a shaped link lets pass
    before its rate holds (``burst_bytes`` of :class:`Link`) is used up by the first of
    them and stays unseen. Where it is known, set it on the link of the result.

    Args:
      mesh: of one axis; may span processes, which must all make the same call.
      sizes: bytes of a rank's messages.
      chunks: numbers of pieces.
      dtype: of the messages.
      config: of the echo calls; min_bytes has no say.
      repetitions: timed rounds of each size.

    Returns:
      The model: of an all-reduce on this mesh, also of other sizes and pieces.

    Raises:
      ValueError: for a mesh of one rank, and as :func:`fit`.
    """
    if mesh.size < 2:
        raise ValueError("1 rank sends nothing: calibrate on a mesh of 2 at least.")
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
    return fit(samples, mesh.size, dtype=dtype, config=config)


def _cases(
    chunks: Sequence[int], dtype: str, config: EchoConfig
) -> dict[int | None, Case]:
    """The exact sum under None, and echo's under their numbers of pieces."""
    cases: dict[int | None, Case] = {None: Case(name="exact", dtype=dtype)}
    for count in chunks:
        cut = dataclasses.replace(config, min_bytes=0, path="auto", num_chunks=count)
        cases[count] = Case(name=f"echo {count}", config=cut, dtype=dtype)
    return cases
