"""The codec: how a device encodes and decodes payloads.

The ``xla`` backend defines the results that every other backend must reproduce.
"""

from echo_jax.kernels.api import Codec as Codec
from echo_jax.kernels.api import get_codec as get_codec
from echo_jax.kernels.codec import dequantize as dequantize
from echo_jax.kernels.codec import quantize as quantize
