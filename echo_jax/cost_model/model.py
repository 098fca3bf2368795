"""A model of the time of one all-reduce, exact and quantized, with few parameters."""

import dataclasses
import functools
import json
import math
import os
import pathlib
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp

from echo_jax.collectives import wire_bytes
from echo_jax.collectives.traffic import check_dtype
from echo_jax.config import EchoConfig
from echo_jax.files import write_text
from echo_jax.wire.blocks import blocks_per_chunk
from echo_jax.wire.format import WireFormat


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """The link over which a rank sends.

    Raises:
      ValueError: if a field is out of range: names it and its range.
    """

    latency_seconds: float  # of one step, from one rank to the next
    bytes_per_second: float  # nominal rate at which a rank sends; infinite: no limit
    efficiency: float = 1.0  # fraction of the nominal rate that messages reach
    # By which fraction an all_to_all takes longer because sending waits for receiving:
    # 0 if both run at once, 1 if one follows the other, as in gloo for large messages.
    stall: float = 0.0
    # Bytes that a sum can send before the rate limit applies: the token bucket of a
    # shaped link (tc tbf, most cloud machines), which refills while the link is idle.
    burst_bytes: int = 0
    # Whether an all_to_all sends to all other ranks at once, as gloo's does, so that it
    # waits for one latency; if not, it is charged a step for each of them.
    at_once: bool = False

    def __post_init__(self):
        _check_at_least_zero(self, "latency_seconds", "burst_bytes")
        for name in ("bytes_per_second", "efficiency"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0.")
        _check_share(self, "efficiency", "stall")
        if not isinstance(self.at_once, bool):
            raise ValueError(f"at_once={self.at_once!r} must be a bool.")

    def seconds(self, sent: int | float) -> float:
        """Time for which a sum occupies the link, without latency.

        Args:
          sent: bytes that a rank sends in all steps of the sum.
        """
        limited = max(0.0, sent / self.efficiency - self.burst_bytes)
        return limited / self.bytes_per_second


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExactSpeed:
    """The time that an exact sum takes besides the link's.

    Raises:
      ValueError: if a field is out of range: names it and its range.
    """

    byte_seconds: float = 0.0  # of adding and copying, for each byte that is sent
    # Of adding and sending, the fraction of the shorter that overlaps with the longer:
    # near 1 for a ring that adds one segment while it sends another, less if ranks
    # share cores.
    overlap: float = 0.0
    tree: bool = False  # whether a tree is used where it is faster, as NCCL does

    def __post_init__(self):
        _check_at_least_zero(self, "byte_seconds")
        _check_share(self, "overlap")
        if not isinstance(self.tree, bool):
            raise ValueError(f"tree={self.tree!r} must be a bool.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodecSpeed:
    """The time that the codec takes while all ranks run it at once.

    Raises:
      ValueError: if a field is out of range: names it and its range.
    """

    # Both are of one algorithm and, in one shot, where every rank decodes what all have
    # sent, of one number of ranks: fit them again for others.
    piece_seconds: float  # fixed time of each piece: launches and starts of exchanges
    value_seconds: float  # of each value of a rank's message, in all stages
    # Of codec and transport, the fraction of the shorter that overlaps with the longer
    # if the message is cut into many pieces.
    overlap: float = 0.0

    def __post_init__(self):
        _check_at_least_zero(self, "piece_seconds", "value_seconds")
        _check_share(self, "overlap")


@runtime_checkable
class SumTimes(Protocol):
    """A model that predicts how long sums take."""

    def exact_seconds(self, message_bytes: int) -> float:
        """Time of ``lax.psum`` of a message of so many bytes on each rank."""

    def echo_seconds(self, message_bytes: int, num_chunks: int = 1) -> float:
        """Time of ``echo_psum``, through the codec however small the message."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostModel:
    r"""Time of one all-reduce over ranks whose links are all alike.

    For :math:`N` ranks, each with a message of :math:`B` bytes and :math:`V` values:

    .. math::
        t_\text{exact} &= 2(N-1)\lambda + w + a - o_a \min(a, w),
          \quad w = L\bigl(2\tfrac{N-1}{N} B\bigr),
          \quad a = 2\tfrac{N-1}{N} B h \\
        t_\text{echo} &= K\,(p + 2(N-1)\lambda) + w + c
          - o_c\,(1 - 1/K)\min(c, w),
          \quad w = L\bigl(W_a\,(1 + s/K) + W_g\bigr), \quad c = V e

    The link needs :math:`L(W) = \max(0, W/\eta - b)\,/\,r` for :math:`W` bytes: what
    fits into the burst takes no time. :class:`Link` has the latency :math:`\lambda` of
    a step, the rate :math:`r`, the efficiency :math:`\eta`, the burst :math:`b` and the
    stall :math:`s`; :class:`ExactSpeed` the time :math:`h` of a byte and the overlap
    :math:`o_a` of adding with sending; :class:`CodecSpeed` the times :math:`p` of a
    piece and :math:`e` of a value, and the overlap :math:`o_c` of codec and transport.
    :math:`K` is the number of pieces; :math:`W_a` and :math:`W_g` are the bytes of
    :func:`echo_jax.wire_bytes` for all_to_all and all_gather.

    In one shot :math:`W_a = 0`, :math:`W_g` is :math:`N` times as large, and a piece
    waits for the :math:`N-1` steps of the all_gather alone.

    If ``exact.tree`` is set, an exact sum uses a tree where that is faster:
    :math:`2\lceil\log_2 N\rceil` steps and :math:`2B` bytes. If ``link.at_once`` is
    set, echo waits for :math:`N` steps instead of :math:`2(N-1)`: for one in the
    all_to_all, and for :math:`N-1` in the ring of the all_gather. If it is not, both
    exchanges are charged one step for each other rank, one after the other, which on
    many ranks overestimates their time rather than underestimates it. Every sum is
    assumed to find the whole burst available; of sums in quick succession, only the
    first one does.

    Example:
        >>> model = CostModel(
        ...     ranks=4,
        ...     link=Link(latency_seconds=1e-5, bytes_per_second=1e9),
        ...     exact=ExactSpeed(),
        ...     codec=CodecSpeed(piece_seconds=1e-4, value_seconds=1e-10),
        ... )
        >>> model.exact_seconds(1 << 24) > 2 * model.echo_seconds(1 << 24)
        True

    Raises:
      ValueError: for fewer than one rank, or an unsupported dtype.
    """

    ranks: int
    link: Link
    exact: ExactSpeed
    codec: CodecSpeed
    dtype: str = "bfloat16"  # of the messages
    config: EchoConfig = EchoConfig()  # of the calls; its min_bytes is ignored

    def __post_init__(self):
        if type(self.ranks) is not int or self.ranks < 1:
            raise ValueError(f"ranks={self.ranks!r} must be an int of at least 1.")
        check_dtype(self.dtype)

    def exact_seconds(self, message_bytes: int) -> float:
        """Time of ``lax.psum``: by a ring, or by a tree where that is faster.

        Args:
          message_bytes: size of a rank's tensor.
        """
        steps = 2 * (self.ranks - 1)
        ring = self._exact(steps, steps / self.ranks * message_bytes)
        if not self.exact.tree or self.ranks == 1:
            return ring
        steps = 2 * math.ceil(math.log2(self.ranks))
        return min(ring, self._exact(steps, 2.0 * message_bytes))

    def echo_seconds(self, message_bytes: int, num_chunks: int = 1) -> float:
        """Time of ``echo_psum``, through the codec however small the message.

        Args:
          message_bytes: size of a rank's tensor.
          num_chunks: number of pieces; at most the blocks of a chunk are used.
        """
        values = self.values(message_bytes)
        sent = self._wire(values)
        pieces = self._pieces(values, num_chunks)
        codec = values * self.codec.value_seconds
        exchange = sent["all_to_all"] * (1 + self.link.stall / pieces)
        wire = self.link.seconds(exchange + sent["all_gather"])
        steps = self._echo_steps() * self.link.latency_seconds
        hidden = self.codec.overlap * (1 - 1 / pieces) * min(codec, wire)
        return pieces * (self.codec.piece_seconds + steps) + codec + wire - hidden

    def values(self, message_bytes: int) -> int:
        """Number of values in a message of ``message_bytes``."""
        return message_bytes // jnp.dtype(self.dtype).itemsize

    def over(self, bytes_per_second: float) -> "CostModel":
        """The same model over a link of another nominal rate."""
        link = dataclasses.replace(self.link, bytes_per_second=bytes_per_second)
        return dataclasses.replace(self, link=link)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the model as JSON; :meth:`load` reads it.

        Raises:
          OSError: if the file, or its folder, cannot be written.
        """
        path = pathlib.Path(path)
        entries = dataclasses.asdict(self)
        if math.isinf(self.link.bytes_per_second):
            entries["link"]["bytes_per_second"] = None  # JSON has no infinity
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(entries, indent=2) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike) -> "CostModel":
        """Reads what :meth:`save` wrote.

        Raises:
          ValueError: if the file cannot be read, or holds something else.
        """
        try:
            return _from_entries(json.loads(pathlib.Path(path).read_text()))
        except OSError as error:
            raise ValueError(
                f"{path} cannot be read ({error.strerror}): make it with echo-jax "
                "advise --save FILE."
            ) from error
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(
                f"{path} holds no cost model: {reason.rstrip('.')}. Make one with "
                "echo-jax advise --save FILE."
            ) from error

    def _exact(self, steps: int, sent: float) -> float:
        adding, wire = sent * self.exact.byte_seconds, self.link.seconds(sent)
        hidden = self.exact.overlap * min(adding, wire)
        return steps * self.link.latency_seconds + wire + adding - hidden

    def _echo_steps(self) -> int:
        """Latencies that a piece waits for, one after the other."""
        others = self.ranks - 1
        if self.config.algorithm == "one-shot":
            return others
        return min(1, others) + others if self.link.at_once else 2 * others

    def _pieces(self, values: int, num_chunks: int) -> int:
        """Number of pieces of a message: at most the blocks of a chunk."""
        size = self.config.format.block_size
        return max(1, min(num_chunks, blocks_per_chunk((values,), size, self.ranks)))

    def _wire(self, values: int) -> dict[str, int]:
        """Bytes that a rank sends in the exchanges."""
        sent = {"all_to_all": 0, "all_gather": 0}
        if values:
            sent |= _wire_bytes(values, self.ranks, self.config, self.dtype)
        return sent


# Fits and break-even searches ask for the same few messages hundreds of times.
@functools.lru_cache(maxsize=1024)
def _wire_bytes(
    values: int, ranks: int, config: EchoConfig, dtype: str
) -> dict[str, int]:
    through_codec = dataclasses.replace(config, min_bytes=0, path="auto")
    return wire_bytes((values,), ranks, through_codec, dtype=dtype)


def _from_entries(entries: dict[str, Any]) -> CostModel:
    link, config = dict(entries["link"]), dict(entries["config"])
    if link["bytes_per_second"] is None:
        link["bytes_per_second"] = math.inf
    config["format"] = WireFormat(**config["format"])
    return CostModel(
        ranks=entries["ranks"],
        link=Link(**link),
        exact=ExactSpeed(**entries["exact"]),
        codec=CodecSpeed(**entries["codec"]),
        dtype=entries["dtype"],
        config=EchoConfig(**config),
    )


def _check_at_least_zero(owner, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}={value} must be at least 0, and finite.")


def _check_share(owner, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(owner, name) <= 1:
            raise ValueError(f"{name}={getattr(owner, name)} must lie in 0 to 1.")
