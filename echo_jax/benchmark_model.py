"""A decoder of random weights, as programs whose runs can be timed."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from echo_jax.layers.partitioning import (
    Params,
    Specs,
    merge_module,
    shardings,
    split_module,
)
from echo_jax.models import Decoder, DecoderConfig
from echo_jax.plan import DepthPlan

_LEARNING_RATE = 1e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomModel:
    """A decoder whose parameters lie on a mesh with one axis."""

    graphdef: Any  # its structure
    params: Params  # sharded over the axis
    specs: Specs
    mesh: Mesh

    @property
    def num_parameters(self) -> int:
        """Of the whole decoder."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    def first_token(self, plan: DepthPlan) -> Callable:
        """A jitted ``(params, tokens) -> id`` of the most likely next token."""
        (axis_name,) = self.mesh.axis_names

        def local(params, tokens):
            logits, _ = merge_module(self.graphdef, params)(tokens, plan=plan)
            last = logits[:, -1].astype(jnp.float32)
            highest = jnp.max(last, axis=-1)
            best = lax.pmax(highest, axis_name)
            offset = lax.axis_index(axis_name) * last.shape[-1]
            mine = jnp.where(highest == best, jnp.argmax(last, axis=-1) + offset, -1)
            return lax.pmax(mine, axis_name)

        return self._on_ranks(local, PartitionSpec())

    def training_step(self, plan: DepthPlan) -> Callable:
        """A jitted ``(params, tokens) -> (loss, params)``, plain gradient descent."""

        def local(params, tokens):
            def loss(params):
                module = merge_module(self.graphdef, params)
                return module.loss(tokens[:, :-1], tokens[:, 1:], plan=plan)[0]

            value, gradient = jax.value_and_grad(loss)(params)
            updates = jax.tree.map(lambda g: -_LEARNING_RATE * g, gradient)
            return value, optax.apply_updates(params, updates)

        return self._on_ranks(local, (PartitionSpec(), self.specs))

    def _on_ranks(self, local: Callable, out_specs) -> Callable:
        in_specs = (self.specs, PartitionSpec())
        return jax.jit(
            jax.shard_map(local, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)
        )


def random_model(config: DecoderConfig, mesh: Mesh, *, seed: int = 0) -> RandomModel:
    """Draws a decoder straight onto a mesh with one axis.

    Args:
      config: the decoder.
      mesh: its axis is the tensor-parallel one.
      seed: of the parameters.

    Raises:
      ValueError: if the axis does not divide what it must shard.
    """
    (axis_name,) = mesh.axis_names
    config.check_ranks(mesh.size, axis_name)

    def build():
        return Decoder(config, axis_name=axis_name, rngs=nnx.Rngs(seed))

    graphdef, _, specs = split_module(jax.eval_shape(build))
    init = jax.jit(
        lambda: split_module(build())[1], out_shardings=shardings(specs, mesh)
    )
    return RandomModel(graphdef=graphdef, params=init(), specs=specs, mesh=mesh)


def compute_share(config: DecoderConfig, ranks: int) -> DecoderConfig:
    """What one of so many ranks computes, as a decoder for one: no sums to wait for.

    Args:
      config: the whole decoder.
      ranks: that it is sharded over.
    """
    config.check_ranks(ranks)
    multiple = config.vocab_multiple
    vocab = -(-config.vocab_size // multiple) * multiple
    return dataclasses.replace(
        config,
        vocab_size=vocab // ranks,
        num_heads=config.num_heads // ranks,
        num_kv_heads=config.num_kv_heads // ranks,
        mlp_width=config.mlp_width // ranks,
        vocab_multiple=1,
    )
