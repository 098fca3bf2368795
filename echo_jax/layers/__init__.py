"""Flax nnx layers for tensor parallelism inside ``jax.shard_map``."""

from echo_jax.layers.attention import Attention as Attention
from echo_jax.layers.cache import KVCache as KVCache
from echo_jax.layers.dense import ColumnParallelDense as ColumnParallelDense
from echo_jax.layers.dense import RowParallelDense as RowParallelDense
from echo_jax.layers.embedding import VocabParallelEmbed as VocabParallelEmbed
from echo_jax.layers.embedding import VocabParallelReadout as VocabParallelReadout
from echo_jax.layers.embedding import (
    vocab_parallel_cross_entropy as vocab_parallel_cross_entropy,
)
from echo_jax.layers.mlp import SwiGLU as SwiGLU
from echo_jax.layers.norm import RMSNorm as RMSNorm
from echo_jax.layers.partitioning import join_ranks as join_ranks
from echo_jax.layers.partitioning import merge_module as merge_module
from echo_jax.layers.partitioning import shardings as shardings
from echo_jax.layers.partitioning import simulate_ranks as simulate_ranks
from echo_jax.layers.partitioning import split_module as split_module
from echo_jax.layers.partitioning import split_ranks as split_ranks
from echo_jax.layers.rope import RopeScaling as RopeScaling
from echo_jax.layers.rope import apply_rope as apply_rope
