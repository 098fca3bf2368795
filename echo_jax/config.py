"""The settings of one collective call, in one frozen object."""

import dataclasses
from typing import Literal, cast, get_args

import jax.numpy as jnp

from echo_jax import platform
from echo_jax.wire.bounds import ResidualDtype
from echo_jax.wire.format import WireFormat

Backend = Literal["auto", "xla", "triton", "pallas"]
Path = Literal["auto", "exact"]
Algorithm = Literal["two-shot", "one-shot"]

# What "auto" stands for. For smaller messages, launching the codec and making its
# exchanges (two, as shipped) costs more time than the saved bytes win back: over a
# network below 64 KiB (two ranks) to 256 KiB (four), between GPUs with their fast links
# below tens of MiB (two H200s over NVLink). Decode steps of a few tokens are far below
# both.
_AUTO_MIN_BYTES = 1 << 18
_AUTO_MIN_BYTES_GPU = 1 << 25


@dataclasses.dataclass(frozen=True, kw_only=True)
class EchoConfig:
    """How one collective call encodes and sends its values.

    Example:
        >>> config = EchoConfig(format=WireFormat(bits=8), min_bytes=0)
        >>> config.exact().is_exact
        True

    Raises:
        ValueError: if a field is not usable, naming the field and what it accepts.
    """

    format: WireFormat = WireFormat()  # codes, blocks, rotation
    feedback: bool = True  # add each call's rounding error to the next call's input
    # If x has fewer bytes than this on a rank, the call is lax.psum, and the residual
    # stays as it is. Decided by the static shape; with 0 no call takes the exact path
    # for its size. "auto" is 32 MiB where JAX uses GPUs, 256 KiB elsewhere.
    min_bytes: int | Literal["auto"] = "auto"
    path: Path = "auto"  # "exact": a sum at full width, which repays the residual
    # How the residual is stored between calls. "int8" and "int4" take one byte and half
    # a byte for each value and one scale for each block, stored in arrays of a float
    # dtype (see wire/compact.py).
    residual_dtype: ResidualDtype = "bfloat16"
    # How echo_psum adds up. "two-shot": each rank adds up one chunk and hands out the
    # sum. "one-shot": each rank receives everything and adds it up itself: one exchange
    # instead of two and one rounding instead of two, but N/2 times the bytes, which
    # are as many for two ranks. The collectives with one exchange have no choice.
    algorithm: Algorithm = "two-shot"
    # Into how many pieces echo_psum cuts a message, to overlap codec and transport.
    num_chunks: int = 1
    backend: Backend = "auto"  # what runs the codec; checked when a call is made

    def __post_init__(self):
        if not isinstance(self.format, WireFormat):
            raise ValueError(f"format={self.format!r} must be a WireFormat.")
        if not isinstance(self.feedback, bool):
            raise ValueError(f"feedback={self.feedback!r} must be a bool.")
        is_number = type(self.min_bytes) is int and self.min_bytes >= 0
        if not is_number and not (
            isinstance(self.min_bytes, str) and self.min_bytes == "auto"
        ):
            raise ValueError(
                f"min_bytes={self.min_bytes!r} must be an int of at least 0 (bytes), "
                'or "auto"; 0 sends every call through the codec.'
            )
        if self.path not in get_args(Path):
            raise ValueError(f"path={self.path!r} must be one of {get_args(Path)}.")
        if self.algorithm not in get_args(Algorithm):
            raise ValueError(
                f"algorithm={self.algorithm!r} must be one of {get_args(Algorithm)}."
            )
        object.__setattr__(self, "residual_dtype", _dtype_name(self.residual_dtype))
        if type(self.num_chunks) is not int or self.num_chunks < 1:
            raise ValueError(
                f"num_chunks={self.num_chunks!r} must be an int of at least 1."
            )
        if self.backend not in get_args(Backend):
            raise ValueError(
                f"backend={self.backend!r} is not known: choose one of "
                f"{get_args(Backend)}."
            )

    def exact(self) -> "EchoConfig":
        """The same call on the exact path whatever its size, residual included."""
        return dataclasses.replace(self, path="exact")

    def with_bits(self, bits: int) -> "EchoConfig":
        """The same configuration with ``bits`` bits for each code.

        Raises:
          ValueError: for a width that :class:`WireFormat` does not support.
        """
        fmt = dataclasses.replace(self.format, bits=bits)
        return dataclasses.replace(self, format=fmt)

    @property
    def bits_per_value(self) -> float:
        """Bits for each value on the wire, scales included.

        With 4-bit codes and blocks of 64 this is 4.25. An exact call counts as 16
        bits, the width of bfloat16.
        """
        return 16.0 if self.is_exact else self.format.bits_per_value

    @property
    def least_bytes(self) -> int:
        """``min_bytes`` as a number: "auto" is 32 MiB on GPUs and 256 KiB elsewhere.

        "On GPUs" means that JAX's CUDA plugin is installed and that ``jax_platforms``
        does not exclude it; finding this out touches no device. For GPUs linked by a
        network instead of NVLink a lower value is right: ``echo-jax advise`` measures
        it.
        """
        if self.min_bytes != "auto":
            return self.min_bytes
        return _AUTO_MIN_BYTES_GPU if platform.expects_gpu() else _AUTO_MIN_BYTES

    @property
    def is_exact(self) -> bool:
        """Whether no call under this configuration is ever quantized."""
        return self.path == "exact"


def _dtype_name(dtype) -> ResidualDtype:
    """The canonical name of a residual dtype given as a name, a type or a dtype."""
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = None
    if name not in get_args(ResidualDtype):
        raise ValueError(
            f"residual_dtype={dtype!r} is not supported: choose one of "
            f"{get_args(ResidualDtype)}."
        )
    return cast(ResidualDtype, name)
