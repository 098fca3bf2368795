"""Decoders built from the tensor-parallel layers."""

from echo_jax.models.config import DecoderConfig as DecoderConfig
from echo_jax.models.decoder import Decoder as Decoder
from echo_jax.models.decoder import DecoderLayer as DecoderLayer
