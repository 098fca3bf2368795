"""What every kernel backend must do, checked against the definition, ``kernels.xla``.

A backend is a module or object with ``send``, ``reduce`` and ``return_`` over a batch
of messages. :data:`CASES` are small enough for an interpreter; :func:`check` runs one.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from echo_jax.kernels import xla
from echo_jax.wire import blocks as blocking
from echo_jax.wire import compact, packing, quantizer
from echo_jax.wire.compact import Compact, Nibbles
from echo_jax.wire.format import ALLOWED_BITS, WireFormat

# Codes of values within a few units in the last place of a rounding edge may differ.
DIFFERING_CODES = 1e-5
COMPACT = {"int8": Compact, "int4": Nibbles}
# An odd number, while each width has ten formats: so that a block size does not meet
# the same residual at every width.
_RESIDUALS = (
    *(None, "int8", "bfloat16", "int4", "float32"),
    *("float32", "int8", "bfloat16", "int4"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One message, or a batch of them, and how it is sent."""

    bits: int = 4
    block_size: int = 64
    rotate: bool = False
    shape: tuple[int, int] = (6, 256)
    dtype: str = "float32"
    residual: str | None = "float32"
    ranks: int = 3
    batch: int = 1
    scale: float = 1.0
    special: str = "none"  # "nan", "inf", "zeros" or "tiny": what one block holds
    stream: bool = False
    pieces: int = 1  # that the message is sent in, one after the other
    added: int = 1  # ranks whose payloads are added up where the message is decoded

    @property
    def fmt(self) -> WireFormat:
        return WireFormat(
            bits=self.bits, block_size=self.block_size, rotate=self.rotate
        )

    def __str__(self) -> str:
        default = Case()
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(default, field.name)
        ]
        return "-".join(changed).replace(" ", "") or "default"


def _cases() -> list[Case]:
    cases = [
        Case(bits=bits, block_size=size, rotate=rotate, residual=residual)
        for (bits, size, rotate), residual in zip(
            itertools.product(ALLOWED_BITS, (16, 32, 64, 128, 256), (False, True)),
            itertools.cycle(_RESIDUALS),
            strict=False,
        )
    ]
    for rotate in (False, True):
        cases += [
            Case(rotate=rotate, dtype=dtype, residual="int8", stream=True)
            for dtype in ("float32", "bfloat16", "float16")
        ]
        cases += [
            Case(rotate=rotate, shape=shape, dtype="bfloat16", residual="int8")
            for shape in ((1, 1), (5, 200), (3, 65), (7, 1000), (129, 64), (1, 4160))
        ]
        cases += [
            Case(rotate=rotate, special=special, residual=residual)
            for special in ("nan", "inf", "zeros", "tiny")
            for residual in ("float32", "int8", "int4")
        ]
        cases += [
            Case(rotate=rotate, scale=scale, residual=residual)
            for scale in (1e30, 1e-30)
            for residual in ("float32", "int8")
        ]
        cases += [Case(rotate=rotate, ranks=ranks) for ranks in (1, 2, 8, 17)]
        cases += [Case(rotate=rotate, batch=3, shape=(5, 100), residual="bfloat16")]
        cases += [
            Case(rotate=rotate, pieces=pieces, residual=residual, **extra)
            for pieces, residual, extra in (
                (3, "int8", {"batch": 2, "shape": (5, 200), "dtype": "bfloat16"}),
                (2, "int4", {"ranks": 2, "shape": (300, 64), "dtype": "bfloat16"}),
                (4, "float32", {"stream": True}),
                (100, None, {"bits": 8}),
            )
        ]
        cases += [
            Case(rotate=rotate, added=added, **extra)
            for added, extra in (
                (2, {"ranks": 2, "dtype": "bfloat16", "shape": (5, 200)}),
                (2, {"ranks": 2, "bits": 6, "pieces": 3, "stream": True}),
                (3, {"batch": 2, "stream": True, "special": "nan"}),
                (20, {"bits": 8, "shape": (3, 65), "block_size": 32}),
            )
        ]
    cases += [
        Case(bits=6, rotate=rotate, dtype="bfloat16", stream=True, **extra)
        for extra in (
            {"shape": (7, 1000), "residual": "int4", "block_size": 32},
            {"shape": (5, 200), "residual": "int8", "pieces": 3},
        )
        for rotate in (False, True)
    ]
    return list(dict.fromkeys(cases))


CASES = _cases()


def check(backend, case: Case, seed: int = 0) -> None:
    """Runs the three stages of one case, each on what the definition hands it."""
    payloads = _check_send(backend, case, seed)
    sums = _check_reduce(backend, case, payloads, seed)
    # Where ranks are added up, it is what they sent that is decoded.
    _check_return(backend, case, payloads if case.added > 1 else sums, seed)


def _check_send(backend, case: Case, seed: int):
    x = inputs(case, seed)
    shape = (case.batch, case.ranks, _blocks(case), case.block_size)
    residual = owed(case, shape, seed + 1)
    static = {"fmt": case.fmt, "chunks": case.ranks}
    got = jax.jit(lambda *args: _send(backend, case, *args, **static))(x, residual)
    want = jax.jit(jax.vmap(lambda *args: xla.send(*args, **static)))(x, residual)
    assert got[0].shape == want[0].shape
    _compare(case, got, want)
    if case.residual == "float32" and not case.rotate and case.special == "none":
        values = jax.vmap(
            lambda x: blocking.to_blocks(
                x.astype(jnp.float32), case.block_size, case.ranks
            )
        )(x)
        _check_identity(case, values + residual, got)
    return want[0]


def _check_reduce(backend, case: Case, payloads, seed: int):
    """Ranks' own payloads stand for one chunk of each rank: the bytes are alike."""
    shape = (case.batch, _blocks(case), case.block_size)
    residual = owed(case, shape, seed + 2)
    got = jax.jit(lambda *args: _reduce(backend, case, *args))(payloads, residual)
    want = jax.jit(jax.vmap(lambda *args: xla.reduce(*args, fmt=case.fmt)))(
        payloads, residual
    )
    assert got[0].shape == want[0].shape
    _compare(case, got, want)
    if case.residual == "float32" and case.special == "none":
        total = sum_in_rank_order(payloads, case.fmt) + residual
        _check_identity(case, total, got)
    return jnp.broadcast_to(want[0][:, None], payloads.shape)


def _check_return(backend, case: Case, payloads, seed: int) -> None:
    static = {"shape": case.shape, "dtype": jnp.dtype(case.dtype), "fmt": case.fmt}
    stream = inputs(case, seed + 3) if case.stream else None
    # The chunks in another order stand for those of another rank.
    turned = [jnp.roll(payloads, rank, axis=1) for rank in range(case.added)]
    payloads = jnp.stack(turned, axis=1)
    got = jax.jit(lambda *args: _return(backend, case, *args, **static))(
        payloads, stream
    )
    want = jax.jit(
        jax.vmap(lambda p, s: xla.return_(p, stream=s, **static))
    )(payloads, stream)  # fmt: skip
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(_bits(got), _bits(want))


def _send(backend, case: Case, x, residual, **static):
    """Sends piece after piece; puts their payloads together."""
    parts = []
    for piece in _pieces(case):
        payloads, residual = backend.send(x, residual, piece=piece, **static)
        parts.append(payloads)
    return _joined(parts, case), residual


def _reduce(backend, case: Case, payloads, residual):
    parts = []
    for piece in _pieces(case):
        part = _part(payloads, piece, case)
        sums, residual = backend.reduce(part, residual, fmt=case.fmt, piece=piece)
        parts.append(sums)
    return _joined(parts, case), residual


def _return(backend, case: Case, payloads, stream, **static):
    out = None
    for piece in _pieces(case):
        part = _part(payloads, piece, case)
        out = backend.return_(part, stream, out, piece=piece, **static)
    return out


def _pieces(case: Case):
    return blocking.cut_pieces(_blocks(case), case.pieces)


def _joined(parts, case: Case):
    """The payload of the whole from those of its pieces."""
    cut = [
        part.shape[-1] // case.fmt.block_bytes * case.fmt.code_bytes for part in parts
    ]
    pairs = list(zip(parts, cut, strict=True))
    bodies = [part[..., :size] for part, size in pairs]
    tails = [part[..., size:] for part, size in pairs]
    return jnp.concatenate([*bodies, *tails], axis=-1)


def _part(payloads, piece, case: Case):
    """The payload of a piece from that of the whole."""
    if piece is None:
        return payloads
    size, tail = case.fmt.code_bytes, _blocks(case) * case.fmt.code_bytes
    scale = case.fmt.block_bytes - size
    return jnp.concatenate(
        [
            payloads[..., piece.start * size : piece.stop * size],
            payloads[..., tail + piece.start * scale : tail + piece.stop * scale],
        ],
        axis=-1,
    )


def inputs(case: Case, seed: int):
    """Gaussian rows with an outlier, one block of them special."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((case.batch, *case.shape)).astype(np.float32)
    x[..., x.shape[-1] // 3] *= 20.0
    if case.special != "none":
        width = min(case.block_size, case.shape[1])
        block = x[:, -1, :width]
        block[...] = {"zeros": 0.0, "tiny": 1e-39}.get(case.special, block)
        if case.special in ("nan", "inf"):
            block[:, width // 2] = float(case.special)
    return jnp.asarray(x * np.float32(case.scale)).astype(case.dtype)


def owed(case: Case, shape, seed: int):
    """A residual as calls before would have left it, or None."""
    if case.residual is None:
        return None
    rng = np.random.default_rng(seed)
    values = jnp.asarray(rng.standard_normal(shape) * 0.1 * case.scale, jnp.float32)
    if case.special in ("zeros", "tiny"):
        values = jnp.zeros(shape, jnp.float32)
    if case.residual in COMPACT:
        codes, scales = quantizer.encode(values, case.fmt)
        kind = COMPACT[case.residual]
        return compact.compress(values, codes, scales, case.fmt, kind)
    return values.astype(case.residual)


def sum_in_rank_order(payloads, fmt: WireFormat):
    """The decoded chunks of all ranks, added in rank order in float32."""
    decoded = quantizer.decode(*packing.split(payloads, fmt), fmt)
    total = decoded[:, 0]
    for rank in range(1, decoded.shape[1]):
        total = total + decoded[:, rank]
    return total


def _blocks(case: Case) -> int:
    return blocking.blocks_per_chunk(case.shape, case.block_size, case.ranks)


def _compare(case: Case, got, want) -> None:
    """Payloads and residuals agree but for codes on a rounding edge."""
    codes, scales = packing.split(got[0], case.fmt)
    wanted_codes, wanted_scales = packing.split(want[0], case.fmt)
    np.testing.assert_array_equal(scales, wanted_scales)
    same = np.asarray(codes == wanted_codes) | np.isnan(scales)[..., None]
    assert (~same).sum() <= max(1, DIFFERING_CODES * same.size), (~same).sum()
    if case.residual is None:
        assert got[1] is None
        return
    assert jax.tree.map(_typed, got[1]) == jax.tree.map(_typed, want[1])
    left, wanted = compact.expand(got[1]), compact.expand(want[1])
    assert not np.asarray(left)[np.isnan(scales)].any(), "a NaN block owes something"
    tolerance = _residual_tolerance(case, want[1], scales)
    close = np.abs(left - wanted) <= tolerance
    assert np.asarray(close | ~same).all(), np.abs(left - wanted).max()


def _residual_tolerance(case: Case, residual, scales):
    """Roundings of the rotation's sums, and a step of the compact residual."""
    scales = np.nan_to_num(np.asarray(scales))[..., None]
    peak = scales * 2.0**case.bits
    # Below the smallest normal number a GPU's matrix product may flush to zero.
    exact = (2.0**-20 * peak + 2.0**-124) * case.rotate
    if isinstance(residual, Compact):
        return scales / (compact.steps_of(type(residual)) - 1) + exact
    return exact + (2.0**-8 * scales if residual.dtype == jnp.bfloat16 else 0.0)


def _check_identity(case: Case, values, got) -> None:
    """What was sent plus what is owed is what there was, bit for bit."""
    decoded = quantizer.decode(*packing.split(got[0], case.fmt), case.fmt)
    np.testing.assert_array_equal(
        np.asarray(got[1]), np.asarray(values) - np.asarray(decoded)
    )


def _typed(leaf):
    return (leaf.shape, leaf.dtype)


def _bits(x):
    """The bits of the values, all NaNs alike."""
    values = np.asarray(x.astype(jnp.float32))
    return np.where(np.isnan(values), np.float32(np.nan), values).view(np.uint32)
