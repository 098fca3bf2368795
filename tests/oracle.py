"""The numeric contract in NumPy, written from its definition; imports no echo_jax.

Everything that the contract fixes bit for bit is float32 here too; the rotation going
in, whose order of summation it leaves open, is float64.
"""

import dataclasses
import math

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.float32
EPS32 = 2.0**-23  # spacing of float32 at 1
MIN_SCALE, MAX_SCALE = F32(2.0**-120), F32(2.0**126)


@dataclasses.dataclass(frozen=True)
class Format:
    """What the oracle needs to know of a wire format."""

    bits: int
    block: int
    rotate: bool

    @property
    def half(self) -> int:
        return 2 ** (self.bits - 1)

    @property
    def block_bytes(self) -> int:
        return self.block * self.bits // 8 + 2


def hadamard(block: int) -> np.ndarray:
    """Entry ``(i, j)`` is -1 to the number of ones that i and j share in binary."""
    i = np.arange(block)
    shared = i[:, None] & i[None, :]
    parity = np.array([[bin(v).count("1") & 1 for v in row] for row in shared])
    return 1.0 - 2.0 * parity


def gains(fmt: Format) -> tuple[float, float]:
    """The powers of two that scale the rotation going in and coming out."""
    log = int(math.log2(fmt.block))
    return 2.0 ** -(log // 2), 2.0 ** -(log - log // 2)


def to_blocks(x: np.ndarray, block: int, chunks: int = 1) -> np.ndarray:
    """``(chunks, blocks, block)``: runs of the last axis, padded with zeros."""
    x = np.asarray(x)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) if x.ndim else [x[None]]
    pieces = []
    for row in rows:
        for start in range(0, row.size, block):
            piece = np.zeros(block, x.dtype)
            run = row[start : start + block]
            piece[: run.size] = run
            pieces.append(piece)
    while len(pieces) % chunks:
        pieces.append(np.zeros(block, x.dtype))
    return np.array(pieces, x.dtype).reshape(chunks, len(pieces) // chunks, block)


def from_blocks(blocks: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Inverse of ``to_blocks``, for a tensor of this shape."""
    blocks = blocks.reshape(-1, blocks.shape[-1])
    rows, width = (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)
    per_row = math.ceil(width / blocks.shape[-1])
    flat = blocks[: rows * per_row].reshape(rows, -1)
    return flat[:, :width].reshape(shape)


def rotate(blocks: np.ndarray, fmt: Format) -> np.ndarray:
    """Into block coordinates, float64."""
    blocks = blocks.astype(np.float64)
    return blocks @ hadamard(fmt.block) * gains(fmt)[0] if fmt.rotate else blocks


def unrotate(blocks: np.ndarray, fmt: Format) -> np.ndarray:
    """Out of block coordinates, float64."""
    blocks = blocks.astype(np.float64)
    return blocks @ hadamard(fmt.block) * gains(fmt)[1] if fmt.rotate else blocks


def round_bf16(x: np.ndarray) -> np.ndarray:
    """Nearest bfloat16, ties to even, by the bits."""
    bits = np.ascontiguousarray(x, F32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) & 0xFFFF0000
    return bits.astype(np.uint32).view(F32).reshape(np.shape(x))


def scales_of(values: np.ndarray, fmt: Format) -> np.ndarray:
    """``M / (h - 1/2)`` in bfloat16; zero below 2**-120; NaN above 2**126."""
    peak = np.abs(values.astype(F32)).max(axis=-1)
    with np.errstate(over="ignore", invalid="ignore"):
        scales = round_bf16(peak * F32(1.0 / (fmt.half - 0.5)))
    scales = np.where(scales < MIN_SCALE, F32(0), scales)
    return np.where(scales <= MAX_SCALE, scales, F32(np.nan))


def codes_of(values: np.ndarray, scales: np.ndarray, fmt: Format) -> np.ndarray:
    """``clip(floor(v / s), -h, h - 1) + h`` by the reciprocal, float32."""
    usable = scales > 0
    inverse = np.where(usable, F32(1) / np.where(usable, scales, F32(1)), F32(0))
    kept = np.where(usable[..., None], values.astype(F32), F32(0))
    level = np.floor(kept * inverse[..., None])
    return (np.clip(level, -fmt.half, fmt.half - 1) + fmt.half).astype(np.uint8)


def decode(codes: np.ndarray, scales: np.ndarray, fmt: Format) -> np.ndarray:
    """``(2q + 1) s/2``, float32."""
    odd = 2 * (codes.astype(np.int64) - fmt.half) + 1
    return odd.astype(F32) * (scales.astype(F32) * F32(0.5))[..., None]


def quantize_blocks(values: np.ndarray, fmt: Format):
    """Codes, scales and the error of blocks in block coordinates, float32."""
    values = values.astype(F32)
    scales = scales_of(values, fmt)
    codes = codes_of(values, scales, fmt)
    finite = np.isfinite(scales)[..., None]
    with np.errstate(invalid="ignore"):
        error = np.where(finite, values - decode(codes, scales, fmt), F32(0))
    return codes, scales, error


def pack(codes: np.ndarray, scales: np.ndarray, fmt: Format) -> bytes:
    """The bytes of ``(blocks, block)`` codes and then of their scales."""
    body = bytearray()
    for block in codes.astype(int):
        low = 0
        for width in {2: [2], 3: [2, 1], 4: [4], 6: [4, 2], 8: [8]}[fmt.bits]:
            stride = fmt.block * width // 8
            for byte in range(stride):
                value = 0
                for slot in range(8 // width):
                    code = block[byte + slot * stride]
                    value |= (code >> low & (2**width - 1)) << (slot * width)
                body.append(value)
            low += width
    return bytes(body) + scales.astype(BF16).tobytes()


def unpack(payload: bytes, fmt: Format) -> tuple[np.ndarray, np.ndarray]:
    """Inverse of ``pack``: ``(blocks, block)`` codes and their scales."""
    blocks = len(payload) // fmt.block_bytes
    code_bytes = fmt.block_bytes - 2
    codes = np.zeros((blocks, fmt.block), np.uint8)
    for index in range(blocks):
        low, start = 0, index * code_bytes
        for width in {2: [2], 3: [2, 1], 4: [4], 6: [4, 2], 8: [8]}[fmt.bits]:
            stride = fmt.block * width // 8
            for position in range(fmt.block):
                slot, byte = divmod(position, stride)
                value = payload[start + byte] >> (slot * width) & (2**width - 1)
                codes[index, position] |= value << low
            low, start = low + width, start + stride
    scales = np.frombuffer(payload[blocks * code_bytes :], BF16).astype(F32)
    return codes, scales


def quantize(x: np.ndarray, fmt: Format) -> bytes:
    """The payload of a tensor; meant for formats that do not rotate."""
    values = rotate(to_blocks(x.astype(F32), fmt.block)[0], fmt)
    codes, scales, _ = quantize_blocks(values, fmt)
    return pack(codes, scales, fmt)


def dequantize(payload: bytes, shape: tuple[int, ...], fmt: Format) -> np.ndarray:
    """What a payload stands for, in exact arithmetic, float64."""
    codes, scales = unpack(payload, fmt)
    return from_blocks(unrotate(decode(codes, scales, fmt), fmt), shape)


def rotation_slack(blocks: np.ndarray, fmt: Format) -> np.ndarray:
    """How far a float32 transform of a block may be from the exact one.

    A sum of B terms in any order is within (B - 1) roundings of half an ulp each of the
    sum of magnitudes.
    """
    if not fmt.rotate:
        return np.zeros(blocks.shape[:-1])
    magnitude = np.abs(blocks.astype(np.float64)).sum(axis=-1) * gains(fmt)[0]
    return magnitude * (fmt.block - 1) * EPS32 / 2


@dataclasses.dataclass
class TwoShot:
    """The all-reduce over N ranks with both residuals, for a format without rotation.

    Residuals are kept in ``dtype`` between calls, sums are float32 in rank order.
    """

    fmt: Format
    ranks: int
    shape: tuple[int, ...]
    dtype: np.dtype = np.dtype(F32)
    feedback: bool = True

    def __post_init__(self):
        assert not self.fmt.rotate
        blocks = to_blocks(np.zeros(self.shape, F32), self.fmt.block, self.ranks)
        self.send = np.zeros((self.ranks, *blocks.shape), self.dtype)
        self.reduce = np.zeros(blocks.shape, self.dtype)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Outputs of one call on ``(ranks, *shape)`` inputs."""
        fmt = self.fmt
        received = []
        for rank in range(self.ranks):
            values = to_blocks(x[rank].astype(F32), fmt.block, self.ranks)
            values = values + self.send[rank].astype(F32)
            codes, scales, error = quantize_blocks(values, fmt)
            received.append(decode(codes, scales, fmt))
            if self.feedback:
                self.send[rank] = error.astype(self.dtype)
        total = received[0]
        for part in received[1:]:
            total = total + part
        total = total + self.reduce.astype(F32)
        codes, scales, error = quantize_blocks(total, fmt)
        if self.feedback:
            self.reduce = error.astype(self.dtype)
        return from_blocks(decode(codes, scales, fmt), self.shape)

    def owed(self) -> np.ndarray:
        """Everything not yet paid, float64."""
        owed = self.send.astype(np.float64).sum(axis=0) + self.reduce.astype(np.float64)
        return from_blocks(owed, self.shape)


def contraction(fmt: Format) -> float:
    """Largest rounding error over the block's peak: half a scale, and roundings.

    A bfloat16 has 8 significant bits, so the scale rounds up by at most 2**-8 of
    itself. The quotient ``v / s``, below ``2**(bits - 1)``, comes from two float32
    roundings, so that an edge moves by at most ``2**(bits - 1) 2**-23`` scales, twice
    that of half a scale; the scale itself is off by two more roundings.
    """
    widened = (1 + 2.0**-8) * (1 + 2.0**-23) ** 2 * (1 + 2.0 ** (fmt.bits - 23))
    return widened / (2**fmt.bits - 1)


def assert_payload_of(payload: bytes, values: np.ndarray, slack, fmt: Format) -> None:
    """Checks a payload of blocks known to within ``slack`` in block coordinates.

    Every scale must be that of a peak within the slack, and every code that of a value
    within the slack, or within the two float32 roundings of its quotient.
    """
    codes, scales = unpack(payload, fmt)
    peak = np.abs(values).max(axis=-1)
    factor, two_roundings = 1.0 / (fmt.half - 0.5), 1 + EPS32
    least = round_bf16((peak - slack) * factor / two_roundings)
    most = round_bf16((peak + slack) * factor * two_roundings)
    assert (np.where(least < MIN_SCALE, 0, least) <= scales).all()
    assert (scales <= most).all()
    used = scales > 0
    quotient = values[used] / scales[used].astype(np.float64)[:, None]
    reach = (slack[used] / scales[used])[:, None] + np.abs(quotient) * EPS32
    level = codes[used].astype(float) - fmt.half
    lowest, highest = level == -fmt.half, level == fmt.half - 1
    assert (lowest | (quotient >= level - reach)).all()
    assert (highest | (quotient <= level + 1 + reach)).all()


def block_error(y: np.ndarray, exact: np.ndarray, fmt: Format) -> float:
    """Largest error of ``y`` in block coordinates, where bounds hold."""
    error = np.asarray(y, np.float64) - np.asarray(exact, np.float64)
    return np.abs(rotate(to_blocks(error, fmt.block), fmt)).max(initial=0.0)


def block_peak(x: np.ndarray, fmt: Format) -> float:
    """Largest magnitude of ``x`` in block coordinates."""
    return np.abs(rotate(to_blocks(np.float64(x), fmt.block), fmt)).max(initial=0.0)


def float32_slack(x: np.ndarray, fmt: Format) -> float:
    """Room for float32 arithmetic in an all-reduce of ``(ranks, *shape)`` inputs.

    In block coordinates: each rank's rotation, N + 1 additions and the roundings of
    the output, all of at most the sum of the ranks' magnitudes there.
    """
    ranks = x.shape[0]
    magnitude = np.abs(np.float64(x)).sum(axis=0)
    blocks = to_blocks(magnitude, fmt.block)
    total = blocks.sum(axis=-1).max(initial=0.0) * (gains(fmt)[0] if fmt.rotate else 1)
    return total * (fmt.block + ranks + 1) * EPS32
