"""The figures of a cost model from measured times."""

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from echo_jax import benchmark
from echo_jax.benchmark import Case
from echo_jax.config import EchoConfig
from echo_jax.cost_model.model import CodecSpeed, CostModel, ExactSpeed, Link

SIZES = tuple(1 << n for n in (14, 17, 20, 22, 24))  # bytes, 16 KiB to 16 MiB
LARGE_SIZES = tuple(1 << n for n in (18, 20, 22, 24, 26, 28))  # for fast links
_NONE = 1e-12  # stands for a coefficient that is held at zero
_OUTLIER = 0.1  # relative error from which on a sample counts less than its square


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One measured sum.

    Raises:
      ValueError: for a time that is none.
    """

    message_bytes: int  # of a rank
    seconds: float  # of the sum
    num_chunks: int | None = None  # pieces of an echo call; None: an exact sum
    bytes_per_second: float | None = None  # nominal, of the link, if it is known

    def __post_init__(self):
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds={self.seconds} must be above 0 and finite.")


def fit(
    samples: Sequence[Sample],
    ranks: int,
    *,
    dtype: str = "bfloat16",
    config: EchoConfig = EchoConfig(),
) -> CostModel:
    """The cost model that comes nearest to measured times.

    Least squares of relative errors; no coefficient is negative. Exact sums give the
    link, then echo's give the codec. What a sum takes whatever its size counts as the
    latency of its steps. Where links of known rates were measured, the rates are taken
    from the samples, and what an exact byte takes besides is told apart from them;
    otherwise it counts as the link's unless echo's bytes are faster, and what a stall
    takes counts as the codec's.

    Args:
      samples: exact sums of two sizes at least, and echo's; of more numbers of pieces
        than one if overlap is to be known.
      ranks: that were measured; for other numbers of ranks, and other links, replace
        the fields of the result.
      dtype: of the messages.
      config: of the echo calls.

    Returns:
      The model, on the fastest of the links that were measured.

    Raises:
      ValueError: if there are too few samples, or only one rank.
    """
    exact = [s for s in samples if s.num_chunks is None]
    echo = [s for s in samples if s.num_chunks is not None]
    for name, found in (("exact", exact), ("echo", echo)):
        sizes = {s.message_bytes for s in found}
        if len(sizes) < 2:
            raise ValueError(
                f"{len(sizes)} sizes of {name} sums were measured, two are needed to "
                "tell the cost of a call from that of a byte."
            )
    if ranks < 2:
        raise ValueError(f"ranks={ranks} send nothing: measure on 2 at least.")
    link, speed = _fit_exact(exact, ranks)
    start = CostModel(
        ranks=ranks,
        link=link,
        exact=speed,
        codec=CodecSpeed(piece_seconds=0.0, value_seconds=0.0),
        dtype=dtype,
        config=config,
    )
    return _fit_echo(start, echo)


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

    Args:
      mesh: of one axis; may span processes, which must all make the same call.
      sizes: bytes of a rank's messages.
      chunks: numbers of pieces.
      dtype: of the messages.
      config: of the echo calls; min_bytes has no say.
      repetitions: timed rounds of each size.

    Returns:
      The model; an all-reduce on this mesh, also of other sizes and pieces.

    Raises:
      ValueError: as :func:`fit`.
    """
    if mesh.size < 2:
        raise ValueError("1 rank sends nothing: calibrate on a mesh of 2 at least.")
    exact = Case(name="exact", dtype=dtype)
    echo = {
        count: Case(
            name=f"echo {count}",
            config=dataclasses.replace(
                config, min_bytes=0, path="auto", num_chunks=count
            ),
            dtype=dtype,
        )
        for count in chunks
    }
    samples, itemsize = [], jnp.dtype(dtype).itemsize
    for size in sizes:
        shape = benchmark.message_shape(size // itemsize)
        times = benchmark.time_cases(
            [exact, *echo.values()], mesh, shape, length=4, repetitions=repetitions
        )
        sent = math.prod(shape) * itemsize
        for count, case in ((None, exact), *echo.items()):
            seconds = times[case.name].median
            samples.append(
                Sample(message_bytes=sent, seconds=seconds, num_chunks=count)
            )
    return fit(samples, mesh.size, dtype=dtype, config=config)


def predict(model: CostModel, sample: Sample) -> float:
    """Seconds that the model gives a sample, on the sample's link."""
    if sample.bytes_per_second is not None:
        model = model.over(sample.bytes_per_second)
    if sample.num_chunks is None:
        return model.exact_seconds(sample.message_bytes)
    return model.echo_seconds(sample.message_bytes, sample.num_chunks)


def _fit_exact(samples: Sequence[Sample], ranks: int) -> tuple[Link, ExactSpeed]:
    """Latency, bandwidth and own time of a byte: a line through each link's times."""
    # Here, not above: it loads for a while, and most commands do without.
    from scipy import optimize

    known = [s.bytes_per_second for s in samples if s.bytes_per_second is not None]
    if known and len(known) < len(samples):
        raise ValueError("the rate of a link is known for some samples, not for all.")
    seconds = np.array([s.seconds for s in samples])
    sent = 2 * (ranks - 1) / ranks * np.array([s.message_bytes for s in samples])
    # No link is faster than its nominal rate: what that takes is no unknown.
    wire = sent / np.array(known) if known else np.zeros(len(samples))
    columns = np.stack([np.full(len(samples), 2.0 * (ranks - 1)), sent, wire], axis=1)
    found, _ = optimize.nnls(columns / seconds[:, None], 1 - wire / seconds)
    latency, byte_seconds, more = (float(value) for value in found)
    if known:
        link = Link(
            latency_seconds=latency,
            bytes_per_second=max(known),
            efficiency=1 / (1 + more),
        )
        return link, ExactSpeed(byte_seconds=byte_seconds)
    rate = 1 / byte_seconds if byte_seconds else math.inf
    return Link(latency_seconds=latency, bytes_per_second=rate), ExactSpeed()


def _fit_echo(model: CostModel, samples: Sequence[Sample]) -> CostModel:
    """Time of a piece and of a value, overlap and stall."""
    from scipy import optimize

    measured = np.array([s.seconds for s in samples])
    values = np.array([model.values(s.message_bytes) for s in samples])
    # Units in which each unknown is about one.
    unit = np.array([measured.min(), float(np.max(measured / values)), 1.0, 1.0])
    rated = samples[0].bytes_per_second is not None
    # Without pieces nothing tells overlap and stall from the rest; on a link of unknown
    # rate nothing tells a stall, which pieces shorten, from a codec, which they hide.
    cut = any((s.num_chunks or 1) > 1 for s in samples)
    most = np.array([1.0 if cut else _NONE, 1.0 if cut and rated else _NONE])

    def errors(unknowns):
        guess = _with_codec(model, unknowns, unit)
        return np.array([predict(guess, s) for s in samples]) / measured - 1

    best = optimize.least_squares(
        errors,
        np.array([0.5, 0.1, *(most / 4)]),
        bounds=(
            np.array([0.0, 0.0 if rated else _NONE - 1, 0.0, 0.0]),
            np.array([np.inf, np.inf, *most]),
        ),
        loss="soft_l1",
        f_scale=_OUTLIER,
        xtol=1e-12,
        ftol=1e-12,
        gtol=1e-12,
    )
    return _with_codec(model, best.x, unit)


def _with_codec(model: CostModel, unknowns, unit) -> CostModel:
    """The model with a codec of these figures, each in its unit.

    A value that takes less than nothing stands for exact bytes that take longer than
    the link's: by so much the exact sum is slowed down by itself.
    """
    value = float(unknowns[1])
    piece, value_seconds, overlap, stall = (
        float(figure) for figure in unit * np.maximum(unknowns, 0.0)
    )
    link = dataclasses.replace(model.link, stall=min(stall, 1.0))
    exact = model.exact
    if value < 0:
        byte_seconds = 1 / link.bytes_per_second
        exact = dataclasses.replace(exact, byte_seconds=-value * byte_seconds)
        rate = link.bytes_per_second / (1 + value)
        link = dataclasses.replace(link, bytes_per_second=rate)
    codec = CodecSpeed(
        piece_seconds=piece, value_seconds=value_seconds, overlap=min(overlap, 1.0)
    )
    return dataclasses.replace(model, link=link, exact=exact, codec=codec)
