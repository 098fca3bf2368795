import dataclasses
import math

import pytest

from echo_jax import WireFormat
from echo_jax.wire import format as wire_format

BITS = (2, 3, 4, 6, 8)
BLOCKS = (16, 32, 64, 128, 256)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("block_size", BLOCKS)
def test_bytes_of_a_block_are_its_bits_and_one_bfloat16(bits, block_size):
    fmt = WireFormat(bits=bits, block_size=block_size)
    assert fmt.code_bytes * 8 == bits * block_size
    assert fmt.block_bytes == fmt.code_bytes + 2
    assert fmt.bits_per_value == bits + 16 / block_size
    assert sum(fmt.planes) == bits
    assert all(8 % plane == 0 for plane in fmt.planes)
    assert fmt.half_levels == 2 ** (bits - 1)


@pytest.mark.parametrize("block_size", BLOCKS)
def test_rotation_exponents_share_out_the_logarithm(block_size):
    fmt = WireFormat(block_size=block_size)
    log = math.log2(block_size)
    assert fmt.forward_exponent == math.floor(log / 2)
    assert fmt.inverse_exponent == math.ceil(log / 2)


def test_default_is_the_recommended_format():
    assert WireFormat() == WireFormat(bits=4, block_size=64, rotate=True)
    assert WireFormat().bits_per_value == 4.25


def test_format_is_frozen_and_hashable():
    fmt = WireFormat()
    assert hash(fmt) == hash(WireFormat())
    with pytest.raises(dataclasses.FrozenInstanceError):
        fmt.bits = 8


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("bits", [0, 1, 5, 7, 16, -4, 4.0, "4", None])
def test_refused_bits_are_named_with_what_is_accepted(bits):
    with pytest.raises(ValueError, match=r"bits=.*choose one of \(2, 3, 4, 6, 8\)"):
        WireFormat(bits=bits)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("block_size", [0, 8, 24, 48, 512, -64, 64.0, "64", None])
def test_refused_block_sizes_are_named_with_what_is_accepted(block_size):
    with pytest.raises(ValueError, match=r"block_size=.*power of two from 16 to 256"):
        WireFormat(block_size=block_size)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("rotate", [0, 1, None, "yes"])
def test_refused_rotation(rotate):
    with pytest.raises(ValueError, match=r"rotate=.*must be a bool"):
        WireFormat(rotate=rotate)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("field", ["bits", "block_size"])
def test_a_bool_is_no_number(field):
    with pytest.raises(ValueError, match=field):
        WireFormat(**{field: True})


def test_fields_are_keyword_only():
    with pytest.raises(TypeError, match="positional"):
        WireFormat(4, 64)


def test_the_module_agrees_with_the_documentation():
    assert wire_format.ALLOWED_BITS == BITS
    assert (wire_format.MIN_BLOCK_SIZE, wire_format.MAX_BLOCK_SIZE) == (16, 256)
