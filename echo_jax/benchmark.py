"""Times of one sum over a mesh, exact and in few bits, and their records.

Correctness first: :func:`check_cases` compares every case with the exact sum. A time is
that of a chain of dependent sums, as a network makes them, divided by its length; cases
take turns, so that what disturbs one disturbs all.
"""

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from echo_jax.collectives import echo_psum, explain
from echo_jax.config import EchoConfig
from echo_jax.models.timing import Times
from echo_jax.records import Record
from echo_jax.residual import Residual, init_residual
from echo_jax.wire import gaussian_contraction

_WIDTH = 8192  # features of a row of a large message; 1024 of a small one

# By how much the error of a right sum may exceed the expected one, which rests on
# rounding errors that are uniform and independent: over all formats, 8 ranks and 2**15
# values, the largest excess was 6 %.
_ERROR_SLACK = 1.1
# By how much a rank's values may be scaled in a right sum. The sum of two ranks' 2-bit
# codes has few levels, so that rounding it again takes up to 15 % off; other formats
# are within 5 %.
_SHARE_SLACK = 0.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One way to add up."""

    name: str
    config: EchoConfig | None = None  # None: lax.psum
    dtype: str = "bfloat16"  # of the tensors that are summed


def message_shape(values: int) -> tuple[int, int]:
    """Rows and features of a rank's message of about so many values."""
    width = min(_WIDTH if values >= 1 << 19 else 1024, max(values, 1))
    return max(1, values // width), width


def draw_message(
    mesh: Mesh, shape: tuple[int, ...], dtype: str, length: int = 1
) -> jax.Array:
    """Gaussian partial sums ``(ranks, *shape)``, sharded over the mesh's only axis.

    Args:
      mesh: of one axis.
      shape: of a rank's message.
      dtype: of the message.
      length: sums that follow each other; each makes values that are alike on all
        ranks larger by their number, which is taken off in advance.
    """
    (axis_name,) = mesh.axis_names
    scale = float(mesh.size) ** (1 - length)

    def draw():
        values = jax.random.normal(jax.random.key(0), (mesh.size, *shape))
        return (scale * values).astype(dtype)

    placed = NamedSharding(mesh, PartitionSpec(axis_name))
    return jax.jit(draw, out_shardings=placed)()


class TimedSum:
    """One case, compiled for one message.

    Args:
      case: how to add up.
      mesh: of one axis; may span processes, which must all make the same calls.
      shape: of a rank's message.
      length: dependent sums that are timed together.
    """

    def __init__(
        self, case: Case, mesh: Mesh, shape: tuple[int, ...], *, length: int = 1
    ):
        """See the class."""
        self.case, self.length = case, length
        self._residual = _start_residual(case, mesh, shape)
        self._chain = _chain(case, mesh, length)

    def __call__(self, x: jax.Array) -> float:
        """Seconds of one sum, of a chain that begins with this message."""
        start = time.perf_counter()
        done = jax.block_until_ready(self._chain(x, self._residual))
        seconds = time.perf_counter() - start
        self._residual, _ = done
        return seconds / self.length


def time_cases(
    cases: Sequence[Case],
    mesh: Mesh,
    shape: tuple[int, ...],
    *,
    length: int = 1,
    repetitions: int = 5,
) -> dict[str, Times]:
    """Times of every case by its name, compilation left out.

    The cases take turns and a different one begins each round.

    Args:
      cases: what is compared.
      mesh: of one axis.
      shape: of a rank's message.
      length: dependent sums that are timed together.
      repetitions: rounds, after one that is not timed.

    Raises:
      ValueError: for a count under 1.
    """
    if min(length, repetitions) < 1:
        raise ValueError(
            f"length={length} and repetitions={repetitions} must be at least 1."
        )
    sums = [TimedSum(case, mesh, shape, length=length) for case in cases]
    messages = {
        dtype: draw_message(mesh, shape, dtype, length)
        for dtype in dict.fromkeys(case.dtype for case in cases)
    }
    seconds: dict[str, list[float]] = {case.name: [] for case in cases}
    for turn in range(repetitions + 1):
        first = turn % len(sums)
        for timed in (*sums[first:], *sums[:first]):
            taken = timed(messages[timed.case.dtype])
            if turn:
                seconds[timed.case.name].append(taken)
    return {name: Times.of(found) for name, found in seconds.items()}


def check_cases(cases: Sequence[Case], mesh: Mesh, values: int = 1 << 19) -> None:
    """Refuses to go on if a sum is wrong, or not the same on all ranks.

    A case that is not exact is checked in few bits, whatever its ``min_bytes``. Its
    error must be that of rounding Gaussian values, and it must hold the values of every
    rank once: two roundings in 2 bits leave nearly as large an error as a sum of zeros
    has, and a larger one than a sum that lacks a rank.

    Args:
      cases: what is checked.
      mesh: of one axis.
      values: of a rank's message, at least a thousand for each rank, or chance
        decides.

    Raises:
      RuntimeError: naming the case.
    """
    shape = message_shape(values)
    for case in cases:
        error, scaled, same = _compare(_in_few_bits(case), mesh, shape)
        limit = _largest_error(case.config, mesh.size)
        if not error < limit:
            raise RuntimeError(
                f"{case.name}: relative error {error:.3g} of a sum of {mesh.size} "
                f"ranks, at most {limit:.3g} was to be expected."
            )
        if not scaled < _SHARE_SLACK:
            raise RuntimeError(
                f"{case.name}: {100 * scaled:.0f} % of a rank's values are missing "
                f"from a sum of {mesh.size} ranks, or in it too often, at most "
                f"{100 * _SHARE_SLACK:.0f} % was to be expected."
            )
        if not same:
            raise RuntimeError(f"{case.name}: ranks hold different sums.")


def describe(
    case: Case, shape: tuple[int, ...], ranks: int
) -> dict[str, str | int | bool]:
    """The entries of a record's ``config`` that say what was summed, and how."""
    values = int(np.prod(shape))
    entries: dict[str, str | int | bool] = {
        "case": case.name,
        "dtype": case.dtype,
        "values": values,
        "message_bytes": values * jnp.dtype(case.dtype).itemsize,
        "num_chunks": 1,
    }
    config = case.config or EchoConfig(path="exact")
    said = explain(shape, case.dtype, ranks, config)
    entries["wire_bytes"] = sum(said.wire_bytes.values())
    if case.config is None:
        return entries | {"path": "psum"}
    return entries | {"path": said.path} | configuration(case.config)


def configuration(config: EchoConfig) -> dict[str, str | int | bool]:
    """The entries of a record's ``config`` that say how a sum was configured."""
    return {
        "bits": config.format.bits,
        "block_size": config.format.block_size,
        "rotate": config.format.rotate,
        "feedback": config.feedback,
        "algorithm": config.algorithm,
        "residual_dtype": config.residual_dtype,
        "num_chunks": config.num_chunks,
        "min_bytes": config.least_bytes,
        "backend": config.backend,
    }


def sum_records(
    experiment: str, config: dict, times: Times, baseline: tuple[str, Times] | None
) -> Iterator[Record]:
    """``allreduce_ms`` of a case; and ``allreduce_speedup`` over a baseline.

    Args:
      experiment: whose record it is.
      config: everything that was chosen.
      times: of the case.
      baseline: name and times of what it is compared with.
    """
    common = {"experiment": experiment, "config": config}
    yield Record(
        metric="allreduce_ms",
        value=1e3 * times.median,
        unit="ms",
        spread=1e3 * (times.slowest - times.fastest),
        **common,
    )
    if baseline is not None:
        name, exact = baseline
        yield Record(
            metric="allreduce_speedup",
            value=exact.median / times.median,
            unit="1",
            baseline=name,
            **common,
        )


def _add(case: Case, x: jax.Array, residual: Residual | None, axis_name: str):
    if case.config is None:
        return lax.psum(x, axis_name), residual
    return echo_psum(x, residual, axis_name, config=case.config)


def _chain(case: Case, mesh: Mesh, length: int):
    """A jitted run of dependent sums: ``(x, residual) -> (residual, y)``."""
    (axis_name,) = mesh.axis_names

    def local(x, residual):
        y = x[0]
        for _ in range(length):
            # What was summed is summed again: the next call waits for this one, and
            # nothing but the sums takes time.
            y, residual = _add(case, y, residual, axis_name)
            y = lax.pcast(y, axis_name, to="varying")
        # The sum last, or XLA gives it the memory of the residual.
        return residual, y[None]

    spec = PartitionSpec(axis_name)
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(spec, spec), out_specs=(spec, spec)
    )
    return jax.jit(mapped, donate_argnums=1)


def _start_residual(case: Case, mesh: Mesh, shape: tuple[int, ...]):
    """Owing nothing; None for the sums that feed nothing back."""
    config, (axis_name,) = case.config, mesh.axis_names
    if config is None or not config.feedback:
        return None

    def local():
        return init_residual(shape, axis_name, config=config)

    spec = PartitionSpec(axis_name)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=spec))()


def _in_few_bits(case: Case) -> Case:
    """The case as it is where messages are large; an exact one stays exact."""
    if case.config is None or case.config.is_exact:
        return case
    config = dataclasses.replace(case.config, min_bytes=0)
    return dataclasses.replace(case, config=config)


def _largest_error(config: EchoConfig | None, ranks: int) -> float:
    """Relative error of the sum of Gaussian values that nothing is owed to.

    One rounding leaves ``k``, the Gaussian contraction. The second one rounds a sum
    that the first has made larger by ``sqrt(1 + k**2)``.
    """
    # Every addition in 16 bits rounds by 2**-8 at most; several err independently.
    exact = 2.0**-8 * math.sqrt(ranks)
    if config is None or config.is_exact:
        return exact
    square = gaussian_contraction(config.format) ** 2
    if config.algorithm == "two-shot":
        square += square * (1.0 + square)
    return exact + _ERROR_SLACK * math.sqrt(square)


def _compare(
    case: Case, mesh: Mesh, shape: tuple[int, ...]
) -> tuple[float, float, bool]:
    """Compares a sum with the one in float32.

    Returns:
      The relative error; the part of a rank's values that is missing or too much, of
      the rank where it is largest; and whether all ranks hold the same bits.
    """
    (axis_name,) = mesh.axis_names
    word = jnp.dtype(f"uint{8 * jnp.dtype(case.dtype).itemsize}")

    def local(x):
        y, _ = _add(case, x[0], None, axis_name)
        exact = lax.psum(x[0].astype(jnp.float32), axis_name)
        own, wrong = x[0].astype(jnp.float32), y.astype(jnp.float32) - exact
        error = jnp.linalg.norm(wrong) / jnp.linalg.norm(exact)
        # Nothing but a rank's own values is correlated with them.
        scaled = jnp.abs(jnp.sum(wrong * own)) / jnp.sum(own * own)
        bits = lax.bitcast_convert_type(y, word).astype(jnp.uint32)
        bits = lax.pcast(bits, axis_name, to="varying")
        same = lax.pmin(bits, axis_name) == lax.pmax(bits, axis_name)
        return error, lax.pmax(scaled, axis_name), same.all()

    spec = PartitionSpec(axis_name)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=PartitionSpec())
    error, scaled, same = jax.jit(mapped)(draw_message(mesh, shape, case.dtype))
    return float(error), float(scaled), bool(same)
