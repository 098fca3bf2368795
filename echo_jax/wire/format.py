"""The description of a wire format: bits, blocks and their size in bytes."""

import dataclasses

ALLOWED_BITS = (2, 3, 4, 6, 8)
MIN_BLOCK_SIZE = 16
MAX_BLOCK_SIZE = 256
SCALE_BYTES = 2  # one bfloat16 for each block

# How the bits of a code are divided among byte-aligned planes, lowest bits first.
_PLANES = {2: (2,), 3: (2, 1), 4: (4,), 6: (4, 2), 8: (8,)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class WireFormat:
    """How a tensor is encoded: codes of ``bits`` bits in blocks that share a scale.

    A block is ``block_size`` neighbouring values of the last axis. It is sent as its
    packed codes and one bfloat16 scale. With ``rotate`` the block is first multiplied
    by a Hadamard matrix, which spreads an outlier over the whole block.

    Example:
        >>> fmt = WireFormat(bits=4, block_size=64)
        >>> fmt.block_bytes, fmt.bits_per_value
        (34, 4.25)

    Raises:
        ValueError: if ``bits`` or ``block_size`` is not one of the supported values.
    """

    bits: int = 4  # width of a code: 2, 3, 4, 6 or 8
    block_size: int = 64  # values that share a scale: a power of two, 16..256
    rotate: bool = True  # Hadamard rotation of each block before it is quantized

    def __post_init__(self):
        if not isinstance(self.bits, int) or self.bits not in ALLOWED_BITS:
            raise ValueError(
                f"WireFormat(bits={self.bits!r}) is not supported: choose one of "
                f"{ALLOWED_BITS}."
            )
        size = self.block_size
        is_power_of_two = isinstance(size, int) and size > 0 and size & (size - 1) == 0
        if not is_power_of_two or not MIN_BLOCK_SIZE <= size <= MAX_BLOCK_SIZE:
            raise ValueError(
                f"WireFormat(block_size={size!r}) is not supported: choose a power of "
                f"two from {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}."
            )
        if not isinstance(self.rotate, bool):
            raise ValueError(f"WireFormat(rotate={self.rotate!r}) must be a bool.")

    @property
    def planes(self) -> tuple[int, ...]:
        """Widths in bits of the planes in which a block's codes are stored."""
        return _PLANES[self.bits]

    @property
    def half_levels(self) -> int:
        """Number of codes on either side of zero, ``2**(bits - 1)``."""
        return 1 << (self.bits - 1)

    @property
    def code_bytes(self) -> int:
        """Bytes of the packed codes of one block."""
        return self.block_size * self.bits // 8

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on the wire, its scale included."""
        return self.code_bytes + SCALE_BYTES

    @property
    def bits_per_value(self) -> float:
        """Bits on the wire for each value of a full block, its scale included."""
        return 8 * self.block_bytes / self.block_size

    @property
    def forward_exponent(self) -> int:
        """The rotation into block coordinates is ``2**-forward_exponent * H``."""
        return (self.block_size.bit_length() - 1) // 2

    @property
    def inverse_exponent(self) -> int:
        """The rotation out of block coordinates is ``2**-inverse_exponent * H``."""
        return self.block_size.bit_length() // 2


def check_format(fmt: WireFormat) -> None:
    """Refuses what is not a format.

    Raises:
      TypeError: naming what was given.
    """
    if not isinstance(fmt, WireFormat):
        raise TypeError(
            f"fmt must be a WireFormat, got {type(fmt).__name__}: that of an "
            "EchoConfig is config.format."
        )
