"""Decoders built from the tensor-parallel layers; checkpoints in, text out."""

from echo_jax.models.checkpoint import Checkpoint as Checkpoint
from echo_jax.models.config import DecoderConfig as DecoderConfig
from echo_jax.models.decoder import Decoder as Decoder
from echo_jax.models.decoder import DecoderLayer as DecoderLayer
from echo_jax.models.generation import GenerationConfig as GenerationConfig
from echo_jax.models.generation import generate as generate
from echo_jax.models.loading import LoadedModel as LoadedModel
from echo_jax.models.loading import load as load
from echo_jax.models.loading import read_checkpoint as read_checkpoint
from echo_jax.models.saving import save as save
from echo_jax.models.sensitivity import measure_sensitivity as measure_sensitivity
from echo_jax.models.sensitivity import plot_sensitivity as plot_sensitivity
from echo_jax.models.tokenizer import load_tokenizer as load_tokenizer
