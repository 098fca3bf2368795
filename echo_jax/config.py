"""Everything that steers one call, in one frozen object."""

import dataclasses
from typing import Literal, cast, get_args

import jax.numpy as jnp

from echo_jax import platform
from echo_jax.wire.format import WireFormat

Backend = Literal["auto", "xla", "triton", "pallas"]
Path = Literal["auto", "exact"]
ResidualDtype = Literal["float32", "bfloat16", "int8", "int4"]

# What "auto" stands for. Over a network, the launches and the two exchanges cost more
# than the bytes they save under a quarter of a MiB; between GPUs, whose own links are
# fast, under tens of MiB (measured with two H200s over NVLink). Decode steps of a few
# tokens are far below both.
_AUTO_MIN_BYTES = 1 << 18
_AUTO_MIN_BYTES_GPU = 1 << 25


@dataclasses.dataclass(frozen=True, kw_only=True)
class EchoConfig:
    """How one collective call sends its values.

    Example:
        >>> config = EchoConfig(format=WireFormat(bits=8), min_bytes=0)
        >>> config.exact().is_exact
        True

    Raises:
        ValueError: if a field is not usable, naming the field and what it accepts.
    """

    format: WireFormat = WireFormat()  # codes, blocks, rotation
    feedback: bool = True  # repay each call's rounding error in the next call
    # A call whose x has fewer bytes on a rank is an exact psum that also pays the
    # residual. Decided by the static shape; 0 never takes the exact path. "auto" is
    # 32 MiB where JAX uses GPUs, 256 KiB elsewhere.
    min_bytes: int | Literal["auto"] = "auto"
    path: Path = "auto"  # "exact" takes the exact path whatever the size
    # How the residual is kept between calls; "int8" and "int4" are a byte and half a
    # byte a value and a scale a block, in a float container (see wire/compact.py).
    residual_dtype: ResidualDtype = "bfloat16"
    # Pieces that echo_psum cuts a message into, to overlap codec and transport.
    num_chunks: int = 1
    backend: Backend = "auto"  # who runs the codec; checked when a call is made

    def __post_init__(self):
        if not isinstance(self.format, WireFormat):
            raise ValueError(f"format={self.format!r} must be a WireFormat.")
        if not isinstance(self.feedback, bool):
            raise ValueError(f"feedback={self.feedback!r} must be a bool.")
        if self.min_bytes != "auto" and (
            type(self.min_bytes) is not int or self.min_bytes < 0
        ):
            raise ValueError(
                f"min_bytes={self.min_bytes!r} must be an int of at least 0 (bytes), "
                'or "auto"; 0 sends every call through the codec.'
            )
        if self.path not in get_args(Path):
            raise ValueError(f"path={self.path!r} must be one of {get_args(Path)}.")
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
        """The same call on the exact path, whatever its size; it pays the residual."""
        return dataclasses.replace(self, path="exact")

    def with_bits(self, bits: int) -> "EchoConfig":
        """The same call with codes of another width, in bits.

        Raises:
          ValueError: for a width that no format has.
        """
        fmt = dataclasses.replace(self.format, bits=bits)
        return dataclasses.replace(self, format=fmt)

    @property
    def bits_per_value(self) -> float:
        """What a value costs on the wire, scales included: 4.25 for 4 bits at block 64.

        An exact call counts 16 bits, those of bfloat16.
        """
        return 16.0 if self.is_exact else self.format.bits_per_value

    @property
    def least_bytes(self) -> int:
        """``min_bytes`` as a number: "auto" is 32 MiB on GPUs and 256 KiB elsewhere.

        "On GPUs" means that JAX's CUDA plugin is installed and ``jax_platforms`` does
        not rule it out; no device is touched to find out. GPUs that are linked by a
        network rather than NVLink want less: ``echo-jax advise`` measures a number.
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
