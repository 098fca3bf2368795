"""The one interface that every codec backend has, and the choice among them."""

import dataclasses
from collections.abc import Callable

from echo_jax.config import Backend
from echo_jax.kernels import xla
from echo_jax.wire.format import WireFormat


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codec:
    """The stages of a two-shot all-reduce that run on one device.

    ``chunks`` is the number of ranks, ``blocks`` the blocks of one chunk:
    ``ceil(rows * ceil(width / block_size) / chunks)``. A payload has
    ``blocks * fmt.block_bytes`` bytes.

    * ``send(x, residual, *, fmt, chunks) -> (payloads, residual)``: adds the residual
      ``(chunks, blocks, block_size)`` to the rotated blocks of ``x (rows, width)``,
      quantizes and packs one payload for each rank; the new residual is what was left
      out. Without a residual returns None for it.
    * ``reduce(payloads, residual, *, fmt) -> (payload, residual)``: dequantizes one
      chunk of each rank, adds them in rank order in float32, then the residual
      ``(blocks, block_size)``, and quantizes the sum.
    * ``return_(payloads, *, shape, dtype, fmt) -> x``: dequantizes the gathered
      payloads, rotates back and casts, to rows of ``shape``.
    * ``sum_chunks(payloads, *, shape, dtype, fmt) -> x``: the sum of ``reduce`` handed
      out in full precision instead, for a reduce-scatter.
    """

    name: str
    send: Callable
    reduce: Callable
    return_: Callable
    sum_chunks: Callable


XLA = Codec(
    name="xla",
    send=xla.send,
    reduce=xla.reduce,
    return_=xla.return_,
    sum_chunks=xla.sum_chunks,
)


def get_codec(backend: Backend, fmt: WireFormat) -> Codec:
    """The codec that runs ``fmt`` under this choice of backend.

    Raises:
      ValueError: if an explicitly chosen backend cannot run. Never falls back from an
        explicit choice.
    """
    if backend in ("auto", "xla"):
        return XLA
    raise ValueError(
        f"backend={backend!r} is not part of this release, asked for by {fmt}: use "
        "backend='auto' or 'xla'."
    )
