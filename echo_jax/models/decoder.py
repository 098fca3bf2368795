"""A pre-norm decoder that passes a single residual through all its layers."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from echo_jax.collectives import echo_psum, echo_pvary, exact
from echo_jax.config import EchoConfig
from echo_jax.layers import (
    Attention,
    KVCache,
    RMSNorm,
    SwiGLU,
    VocabParallelEmbed,
    VocabParallelReadout,
    vocab_parallel_cross_entropy,
)
from echo_jax.models.config import DecoderConfig
from echo_jax.plan import DepthPlan, group_by_config
from echo_jax.residual import Residual, init_residual
from echo_jax.typing import AnyFloat


class LayerPlan(NamedTuple):
    """The configurations of one layer: attention, then feed-forward block."""

    forward: tuple[EchoConfig, EchoConfig]  # of the two forward sums
    # Of the two backward sums, those of the echo_pvary before each block.
    backward: tuple[EchoConfig, EchoConfig]


def layer_plans(plan: DepthPlan, num_layers: int) -> list[LayerPlan]:
    """The configurations of each layer, which has two calls in either direction."""
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

    ``echo_pvary`` is applied to the stream, before each norm, so that the backward sums
    are added to the stream's gradient unchanged, as the forward sums are to the stream.
    """

    def __init__(self, config: DecoderConfig, *, axis_name: str, rngs: nnx.Rngs):
        """See the class."""
        kinds = {
            "axis_name": axis_name,
            "dtype": jnp.dtype(config.dtype),
            "param_dtype": jnp.dtype(config.param_dtype),
            "rngs": rngs,
        }
        # Divided by the number of sums, so that all of them together add the variance
        # of one to the stream.
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
            rope_scaling=config.rope_scaling,
            qk_norm_epsilon=epsilon if config.qk_norm else None,
            attention=config.attention,
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
            stream, residual = block(norm(x), residual, config=forward, add_to=stream)
        return stream, residual

    def extend(
        self,
        stream: AnyFloat,
        residual: Residual | None,
        cache: KVCache,
        layer: Int[Array, ""],
        plan: LayerPlan,
    ) -> tuple[AnyFloat, Residual | None, KVCache]:
        """As ``__call__``, for the tokens after those in the cache; no gradients."""
        attention, mlp = plan.forward
        x = exact.pvary(stream, self.axis_name)
        x = self.attention_norm(x)
        stream, residual, cache = self.attention.extend(
            x, residual, cache, layer, config=attention, add_to=stream
        )
        x = self.mlp_norm(exact.pvary(stream, self.axis_name))
        stream, residual = self.mlp(x, residual, config=mlp, add_to=stream)
        return stream, residual, cache


class Decoder(nnx.Module):
    """A decoder for ``jax.shard_map`` (or ``vmap(axis_name)``) over a tensor axis.

    Build it with global shapes and take its parameters and their specs with
    :func:`echo_jax.layers.split_module`; inside the ``shard_map``, rebuild it from one
    rank's shards with :func:`echo_jax.layers.merge_module`.

    Sharding: tokens and the stream are replicated over the tensor axis; logits are
    sharded by vocabulary.

    Args:
      config: sizes and variants of the architecture.
      axis_name: the tensor-parallel axis.
      rngs: random keys.

    Example:
        >>> model = Decoder(DecoderConfig(), rngs=nnx.Rngs(0))
        >>> graphdef, params, specs = split_module(model)

    Source: Touvron et al., "LLaMA: Open and Efficient Foundation Language Models",
    2023, for the architecture.
    """

    layer_type: type[DecoderLayer] = DecoderLayer  # subclasses may stack other layers

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
            config.vocab_size, config.width, pad_to=config.vocab_multiple, **kinds
        )
        self.layers = self._stack_layers(config, axis_name, rngs)
        self.final_norm = RMSNorm(config.width, epsilon=config.norm_epsilon, **kinds)
        self.readout = (
            None
            if config.tied_embeddings
            else VocabParallelReadout(
                config.width, config.vocab_size, pad_to=config.vocab_multiple, **kinds
            )
        )
        self.config, self.axis_name = config, axis_name

    def __call__(
        self, tokens: Int[Array, "batch length"], *, plan: DepthPlan
    ) -> tuple[Float[Array, "batch length local_vocab"], Residual | None]:
        """This rank's logits, and the residual after the forward pass.

        ``plan.vocab`` configures the two sums over the vocabulary: that of the
        embedding, the first of the forward pass, and that of the readout's gradient,
        the first of the backward pass.
        """
        stream, residual = self.run_layers(tokens, plan=plan)
        return self._logits(stream, residual, plan), residual

    def run_layers(
        self, tokens: Int[Array, "batch length"], *, plan: DepthPlan
    ) -> tuple[AnyFloat, Residual | None]:
        """The stream ``(batch, length, width)`` after the last layer, and residual."""
        plan = plan.bind(self.config.num_calls)
        stream, residual = self._start(self.embed(tokens), plan)
        return self._run_layers(stream, residual, plan)

    def extend(
        self,
        tokens: Int[Array, "batch length"],
        cache: KVCache,
        *,
        plan: DepthPlan,
    ) -> tuple[Float[Array, "batch local_vocab"], KVCache]:
        """This rank's logits after the last of these tokens, and the extended cache.

        Use it with an empty cache for prefill, and with one token for each sequence for
        decoding. If every call is below ``min_bytes``, as for a few tokens under the
        default plan, the program is that of exact sums, whatever else the plan says.

        Args:
          tokens: the next tokens of each sequence.
          cache: from :meth:`empty_cache`, or from the previous call.
          plan: the configurations of the calls.
        """
        partial = self.embed(tokens)
        plan = plan.bind(self.config.num_calls).settled(partial.shape, partial.dtype)
        stream, residual = self._start(partial, plan)
        stream, residual, cache = self._extend_layers(stream, residual, cache, plan)
        x = exact.pvary(stream[:, -1], self.axis_name)
        return self.read_out(x), cache.grown(tokens.shape[1])

    def empty_cache(self, padding: Int[Array, "batch"], slots: int) -> KVCache:
        """An empty cache of this rank's heads; call inside ``shard_map``.

        Args:
          padding: number of slots before each prompt that hold no token.
          slots: number of tokens that the cache has room for, padding included.
        """
        kernel, dim = self.layers.attention.key.kernel, self.config.head_dim
        heads = kernel.shape[-1] // dim
        shape = (self.config.num_layers, padding.shape[0], slots, heads, dim)
        zeros = jnp.zeros(shape, jnp.dtype(self.config.dtype))
        zeros = exact.pvary(zeros, self.axis_name)
        return KVCache(zeros, zeros, jnp.zeros((), jnp.int32), padding)

    def loss(
        self,
        tokens: Int[Array, "batch length"],
        targets: Int[Array, "batch length"],
        *,
        plan: DepthPlan,
    ) -> tuple[Float[Array, ""], Residual | None]:
        """Mean cross entropy in nats over this rank's batch, and the residual."""
        loss, _, residual = self.loss_and_stream(tokens, targets, plan=plan)
        return loss, residual

    def loss_and_stream(
        self,
        tokens: Int[Array, "batch length"],
        targets: Int[Array, "batch length"],
        *,
        plan: DepthPlan,
    ) -> tuple[Float[Array, ""], AnyFloat, Residual | None]:
        """Loss, stream after the last layer, and residual; see :meth:`loss`."""
        stream, residual = self.run_layers(tokens, plan=plan)
        logits = self._logits(stream, residual, plan)
        losses = vocab_parallel_cross_entropy(logits, targets, self.axis_name)
        return jnp.mean(losses), stream, residual

    @classmethod
    def _stack_layers(cls, config: DecoderConfig, axis_name: str, rngs: nnx.Rngs):
        """All layers as one module whose parameters have a leading axis of layers."""

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
        def make(rngs):
            return cls.layer_type(config, axis_name=axis_name, rngs=rngs)

        return make(rngs)

    def _start(self, partial: AnyFloat, plan: DepthPlan):
        """The stream from each rank's part of the embeddings, and the residual."""
        owing = plan.residual_config(partial.shape, partial.dtype)
        residual = init_residual(partial, self.axis_name, config=owing)
        return echo_psum(partial, residual, self.axis_name, config=plan.vocab)

    def _logits(self, stream: AnyFloat, residual: Residual | None, plan: DepthPlan):
        """Logits from the stream; the backward pass takes its first sum here."""
        config = plan.bind(self.config.num_calls).backward.vocab
        x, _ = echo_pvary(stream, residual, self.axis_name, config=config)
        return self.read_out(x)

    def read_out(self, x: AnyFloat, out_dtype=None) -> AnyFloat:
        """This rank's logits from the stream after the last layer.

        Args:
          x: the stream, typed as varying (``exact.pvary``).
          out_dtype: dtype of the logits; None for the model's. In bfloat16, tokens with
            similar logits often get the same one; float32 tells them apart.
        """
        x = self.final_norm(x)
        read = self.embed.attend if self.readout is None else self.readout
        return read(x, out_dtype)

    def _extend_layers(self, stream, residual, cache: KVCache, plan: DepthPlan):
        """As ``_run_layers``, with the cache as part of the scan's carry."""
        graphdef, params = nnx.split(self.layers)
        plans = layer_plans(plan, self.config.num_layers)
        for start, stop in group_by_config(plans):

            def layer(carry, xs, plan=plans[start]):
                (stream, residual, cache), (index, params) = carry, xs
                module = nnx.merge(graphdef, params)
                return module.extend(stream, residual, cache, index, plan), None

            part = jax.tree.map(lambda p, a=start, b=stop: p[a:b], params)
            (stream, residual, cache), _ = jax.lax.scan(
                layer, (stream, residual, cache), (jnp.arange(start, stop), part)
            )
        return stream, residual, cache

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
                self._remat(layer),
                (stream, residual),
                part,
                unroll=min(self.config.unroll, stop - start),
            )
        return stream, residual

    def _remat(self, layer: Callable) -> Callable:
        if self.config.remat == "none":
            return layer
        policy = None
        if self.config.remat == "save_sums":
            policy = jax.checkpoint_policies.save_only_these_names("echo_psum")
        return jax.checkpoint(layer, policy=policy)
