"""The wire format and its error bounds: what travels, whoever exchanges it."""

from echo_jax.wire.bounds import ErrorBound as ErrorBound
from echo_jax.wire.bounds import contraction as contraction
from echo_jax.wire.bounds import error_bound as error_bound
from echo_jax.wire.bounds import gaussian_contraction as gaussian_contraction
from echo_jax.wire.bounds import gaussian_stream_error as gaussian_stream_error
from echo_jax.wire.bounds import typical_bound as typical_bound
from echo_jax.wire.format import WireFormat as WireFormat
