"""4-bit, error-compensated tensor-parallel collectives for JAX."""

from echo_jax.collectives import Explanation as Explanation
from echo_jax.collectives import echo_all_gather as echo_all_gather
from echo_jax.collectives import echo_psum as echo_psum
from echo_jax.collectives import echo_psum_scatter as echo_psum_scatter
from echo_jax.collectives import echo_pvary as echo_pvary
from echo_jax.collectives import explain as explain
from echo_jax.collectives import flush as flush
from echo_jax.collectives import wire_bytes as wire_bytes
from echo_jax.config import EchoConfig as EchoConfig
from echo_jax.kernels import dequantize as dequantize
from echo_jax.kernels import quantize as quantize
from echo_jax.plan import DepthPlan as DepthPlan
from echo_jax.residual import Residual as Residual
from echo_jax.residual import init_residual as init_residual
from echo_jax.typing import Payload as Payload
from echo_jax.wire import ErrorBound as ErrorBound
from echo_jax.wire import WireFormat as WireFormat
from echo_jax.wire import error_bound as error_bound

__version__ = "0.1.0"
