"""A pre-norm decoder whose one residual is threaded through all its layers."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from echo_jax.collectives import echo_psum, echo_pvary
from echo_jax.config import EchoConfig
from echo_jax.layers import (
    Attention,
    RMSNorm,
    SwiGLU,
    VocabParallelEmbed,
    VocabParallelReadout,
    vocab_parallel_cross_entropy,
)
from echo_jax.models.config import VOCAB_MULTIPLE, DecoderConfig
from echo_jax.plan import DepthPlan, group_by_config
from echo_jax.residual import Residual, init_residual
from echo_jax.typing import AnyFloat


class LayerPlan(NamedTuple):
    """The configurations of one layer: attention, then feed-forward block."""

    forward: tuple[EchoConfig, EchoConfig]  # of the two sums
    backward: tuple[EchoConfig, EchoConfig]  # of the sums of the mirrors before them


def layer_plans(plan: DepthPlan, num_layers: int) -> list[LayerPlan]:
    """The plan of each layer, two calls a layer."""
    plan = plan.bind(2 * num_layers)
    backward = plan.backward
    return [
        LayerPlan(
            forward=(plan[2 * layer], plan[2 * layer + 1]),
            backward=(backward[2 * layer], backward[2 * layer + 1]),
        )
        for layer in range(num_layers)
    ]


class DecoderLayer(nnx.Module):
    """Norm, attention, add; norm, feed-forward block, add.

    ``echo_pvary`` stands on the stream, before each norm, so that the backward sums add
    straight into the gradient stream, as the forward sums do into the stream.
    """

    def __init__(self, config: DecoderConfig, *, axis_name: str, rngs: nnx.Rngs):
        """See the class."""
        kinds = {
            "axis_name": axis_name,
            "dtype": jnp.dtype(config.dtype),
            "param_dtype": jnp.dtype(config.param_dtype),
            "rngs": rngs,
        }
        # Each of the 2 L sums adds 1/(2 L) of its variance to the stream.
        out_init = nnx.initializers.variance_scaling(
            1.0 / config.num_calls, "fan_in", "truncated_normal"
        )
        epsilon = config.norm_epsilon
        self.attention_norm = RMSNorm(config.width, epsilon=epsilon, **kinds)
        self.attention = Attention(
            config.width,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rope_theta=config.rope_theta,
            out_init=out_init,
            **kinds,
        )
        self.mlp_norm = RMSNorm(config.width, epsilon=epsilon, **kinds)
        self.mlp = SwiGLU(config.width, config.mlp_width, out_init=out_init, **kinds)
        self.axis_name = axis_name

    def __call__(
        self, stream: AnyFloat, residual: Residual | None, plan: LayerPlan
    ) -> tuple[AnyFloat, Residual | None]:
        """Adds both blocks to the stream ``(batch, length, width)``."""
        blocks = (
            (self.attention_norm, self.attention),
            (self.mlp_norm, self.mlp),
        )
        for (norm, block), forward, backward in zip(
            blocks, plan.forward, plan.backward, strict=True
        ):
            x, residual = echo_pvary(stream, residual, self.axis_name, config=backward)
            y, residual = block(norm(x), residual, config=forward)
            stream = stream + y
        return stream, residual


class Decoder(nnx.Module):
    """A decoder for ``jax.shard_map`` (or ``vmap(axis_name)``) over a tensor axis.

    Build it with global shapes, cut its parameters by the specs they carry, and call
    it inside: :func:`echo_jax.layers.split_module`, :func:`~echo_jax.layers.
    merge_module`.

    Sharding: tokens are the same on every rank of the tensor axis; the stream too;
    logits are cut by vocabulary.

    Args:
      config: sizes and kinds.
      axis_name: the tensor-parallel axis.
      rngs: random keys.

    Example:
        >>> model = Decoder(DecoderConfig(), rngs=nnx.Rngs(0))
        >>> graphdef, params, specs = split_module(model)

    Source: Touvron et al., "LLaMA: Open and Efficient Foundation Language Models",
    2023, for the architecture.
    """

    layer_type: type[DecoderLayer] = DecoderLayer  # what is stacked

    def __init__(
        self, config: DecoderConfig, *, axis_name: str = "tensor", rngs: nnx.Rngs
    ):
        """See the class."""
        kinds = {
            "axis_name": axis_name,
            "dtype": jnp.dtype(config.dtype),
            "param_dtype": jnp.dtype(config.param_dtype),
            "rngs": rngs,
        }
        self.embed = VocabParallelEmbed(
            config.vocab_size, config.width, pad_to=VOCAB_MULTIPLE, **kinds
        )
        self.layers = self._stack_layers(config, axis_name, rngs)
        self.final_norm = RMSNorm(config.width, epsilon=config.norm_epsilon, **kinds)
        self.readout = (
            None
            if config.tied_embeddings
            else VocabParallelReadout(
                config.width, config.vocab_size, pad_to=VOCAB_MULTIPLE, **kinds
            )
        )
        self.config, self.axis_name = config, axis_name

    def __call__(
        self, tokens: Int[Array, "batch length"], *, plan: DepthPlan
    ) -> tuple[Float[Array, "batch length local_vocab"], Residual | None]:
        """This rank's logits, and what the forward pass still owes.

        The vocabulary's sums, the embedding's forward and the readout's backward, go
        by ``plan.vocab``; they are the first of either direction.
        """
        plan = plan.bind(self.config.num_calls)
        partial = self.embed(tokens)
        owing = plan.residual_config(partial.shape, partial.dtype)
        residual = init_residual(partial, self.axis_name, config=owing)
        stream, residual = echo_psum(
            partial, residual, self.axis_name, config=plan.vocab
        )
        stream, residual = self._run_layers(stream, residual, plan)
        x, owed = echo_pvary(
            stream, residual, self.axis_name, config=plan.backward.vocab
        )
        x = self.final_norm(x)
        logits = self.embed.attend(x) if self.readout is None else self.readout(x)
        return logits, owed

    def loss(
        self,
        tokens: Int[Array, "batch length"],
        targets: Int[Array, "batch length"],
        *,
        plan: DepthPlan,
    ) -> tuple[Float[Array, ""], Residual | None]:
        """Mean cross entropy in nats over this rank's batch, and what is still owed."""
        logits, residual = self(tokens, plan=plan)
        losses = vocab_parallel_cross_entropy(logits, targets, self.axis_name)
        return jnp.mean(losses), residual

    @classmethod
    def _stack_layers(cls, config: DecoderConfig, axis_name: str, rngs: nnx.Rngs):
        """All layers as one module whose parameters have a leading axis of layers."""

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
        def make(rngs):
            return cls.layer_type(config, axis_name=axis_name, rngs=rngs)

        return make(rngs)

    def _run_layers(self, stream, residual, plan: DepthPlan):
        """One scan over each run of layers that share their configurations."""
        graphdef, params = nnx.split(self.layers)
        plans = layer_plans(plan, self.config.num_layers)
        for start, stop in group_by_config(plans):

            def layer(carry, params, plan=plans[start]):
                stream, residual = carry
                return nnx.merge(graphdef, params)(stream, residual, plan), None

            part = jax.tree.map(lambda p, a=start, b=stop: p[a:b], params)
            (stream, residual), _ = jax.lax.scan(
                self._remat(layer), (stream, residual), part
            )
        return stream, residual

    def _remat(self, layer: Callable) -> Callable:
        if self.config.remat == "none":
            return layer
        policy = None
        if self.config.remat == "save_sums":
            policy = jax.checkpoint_policies.save_only_these_names("echo_psum")
        return jax.checkpoint(layer, policy=policy)
