import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax import WireFormat
from echo_jax.wire import packing
from tests import oracle

BITS = (2, 3, 4, 6, 8)


def _written_out(bits: int) -> tuple[list[int], list[int]]:
    """Codes of one block of 16 and their bytes, by hand."""
    ramp = list(range(16))
    if bits == 2:
        codes = [0, 1, 2, 3, 1, 1, 1, 1, 2, 2, 2, 2, 3, 0, 3, 0]
        # Byte j has codes j, j+4, j+8, j+12, the first in the lowest bits.
        return codes, [0b11_10_01_00, 0b00_10_01_01, 0b11_10_01_10, 0b00_10_01_11]
    if bits == 3:
        codes = [0, 1, 2, 3, 4, 5, 6, 7, 7, 6, 5, 4, 3, 2, 1, 0]
        low = [0b11_11_00_00, 0b10_10_01_01, 0b01_01_10_10, 0b00_00_11_11]
        # The high bits: byte j has codes j, j+2, ..., j+14.
        return codes, [*low, 0b00_11_11_00, 0b00_11_11_00]
    if bits == 4:
        # First half in the low nibbles, second half in the high ones.
        return ramp, [0x80, 0x91, 0xA2, 0xB3, 0xC4, 0xD5, 0xE6, 0xF7]
    if bits == 6:
        codes = [value | (value % 4) << 4 for value in ramp]
        high = [0b00_00_00_00, 0b01_01_01_01, 0b10_10_10_10, 0b11_11_11_11]
        return codes, [0x80, 0x91, 0xA2, 0xB3, 0xC4, 0xD5, 0xE6, 0xF7, *high]
    codes = [255, 0, 128, 127, *range(12)]
    return codes, codes


@pytest.mark.parametrize("bits", BITS)
def test_layout_of_codes_written_out_by_hand(bits):
    codes, expected = _written_out(bits)
    fmt = WireFormat(bits=bits, block_size=16)
    packed = packing.pack_codes(jnp.array([codes], jnp.uint8), fmt)
    assert packed.tolist() == [expected]
    assert packing.unpack_codes(packed, fmt).tolist() == [codes]


def test_scales_are_bfloat16_little_endian():
    packed = packing.pack_scales(jnp.array([1.0, -2.0, 3.140625, 0.0], jnp.float32))
    assert packed.tolist() == [[0x80, 0x3F], [0x00, 0xC0], [0x49, 0x40], [0, 0]]
    assert packing.unpack_scales(packed).tolist() == [1.0, -2.0, 3.140625, 0.0]


@pytest.mark.parametrize("bits", BITS)
# The scales of 5 blocks fill no row of a block's bytes, those of the others do.
@pytest.mark.parametrize(("block_size", "blocks"), [(16, 5), (16, 8), (256, 128)])
def test_payload_is_all_codes_then_all_scales(bits, block_size, blocks):
    fmt = WireFormat(bits=bits, block_size=block_size)
    rng = np.random.default_rng(bits * block_size)
    codes = rng.integers(0, 2**bits, (3, blocks, block_size), dtype=np.uint8)
    scales = oracle.round_bf16(rng.random((3, blocks), np.float32) * 1e3)
    join = jax.jit(packing.join, static_argnames="fmt")
    payload = join(jnp.asarray(codes), jnp.asarray(scales), fmt=fmt)
    assert payload.shape == (3, blocks * fmt.block_bytes)
    assert payload.dtype == jnp.uint8
    twin = oracle.Format(bits, block_size, fmt.rotate)
    for row, row_codes, row_scales in zip(payload, codes, scales, strict=True):
        assert np.asarray(row).tobytes() == oracle.pack(row_codes, row_scales, twin)
    split = jax.jit(packing.split, static_argnames="fmt")
    read_codes, read_scales = split(payload, fmt=fmt)
    np.testing.assert_array_equal(read_codes, codes)
    np.testing.assert_array_equal(read_scales, scales)
