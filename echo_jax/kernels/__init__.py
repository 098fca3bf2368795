"""How a device makes what travels. ``xla`` is the definition of every other backend."""

from echo_jax.kernels.api import Codec as Codec
from echo_jax.kernels.api import get_codec as get_codec
from echo_jax.kernels.codec import dequantize as dequantize
from echo_jax.kernels.codec import quantize as quantize
