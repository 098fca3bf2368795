"""A decoder's pass with the configuration of each all-reduce as an argument.

One program then serves every plan over the same few configurations: what compares many
plans compiles once, and their results differ by the sums alone.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Int, Num

from echo_jax.collectives import echo_psum, exact
from echo_jax.config import EchoConfig
from echo_jax.models.decoder import Decoder
from echo_jax.plan import DepthPlan
from echo_jax.residual import init_residual
from echo_jax.typing import AnyFloat

Configs = tuple[EchoConfig, ...]


def plan_configs(plan: DepthPlan, num_calls: int) -> list[EchoConfig]:
    """One configuration a sum of the forward pass, the embedding's first.

    With ``min_bytes=0``: what a plan does must not depend on the size of a batch.
    """
    plan = unconditional(plan, num_calls)
    return [plan.vocab, *plan]


def unconditional(plan: DepthPlan, num_calls: int) -> DepthPlan:
    """The plan without a size below which its calls are exact."""
    always = functools.partial(dataclasses.replace, min_bytes=0)
    calls = tuple(always(call) for call in plan.bind(num_calls))
    return dataclasses.replace(
        plan, head=calls, body=always(plan.body), tail=(), num_calls=num_calls
    )


def distinct_configs(plans: Iterable[DepthPlan], num_calls: int) -> Configs:
    """Every configuration that occurs in these plans, each once."""
    found = (call for plan in plans for call in plan_configs(plan, num_calls))
    return tuple(dict.fromkeys(found))


def choices(
    plan: DepthPlan, configs: Configs, num_calls: int
) -> Int[np.ndarray, "sums"]:
    """A plan as positions in a list of configurations.

    Raises:
      ValueError: if one of its configurations is not in the list.
    """
    calls = plan_configs(plan, num_calls)
    strange = [call for call in calls if call not in configs]
    if strange:
        raise ValueError(
            f"the program was made without {strange[0]}: name every plan that will be "
            "run when it is made."
        )
    return np.array([configs.index(call) for call in calls], np.int32)


def run_by_choice(
    decoder: Decoder,
    tokens: Int[Array, "batch length"],
    chosen: Int[Array, "sums"],
    *,
    configs: Configs,
) -> AnyFloat:
    """The stream ``(batch, length, width)`` behind the last layer, for ``read_out``.

    Call inside ``shard_map`` or ``vmap(axis_name=...)``. No gradients.

    Args:
      decoder: one rank's.
      tokens: token ids.
      chosen: for each sum its place in ``configs``: the embedding's, then two a layer.
      configs: what to choose from; those with feedback share one residual.

    Raises:
      ValueError: if two with feedback differ in block size, rotation or residual.
    """
    config = _owing(configs)

    def choose(choice, partial, residual, stream=None):
        """``echo_psum`` by the chosen configuration."""

        def branch(config):
            def run(partial, residual, stream):
                y, owed = echo_psum(
                    partial,
                    residual if config.feedback else None,
                    decoder.axis_name,
                    add_to=stream,
                    config=config,
                )
                return y, owed if config.feedback else residual

            return run

        branches = [branch(config) for config in configs]
        return jax.lax.switch(choice, branches, partial, residual, stream)

    return run_by_sums(decoder, tokens, chosen, sum_ranks=choose, config=config)


def run_by_sums(
    decoder: Decoder,
    tokens: Int[Array, "batch length"],
    chosen: Num[Array, "sums ..."],
    *,
    sum_ranks: Callable,
    config: EchoConfig,
) -> AnyFloat:
    """As :func:`run_by_choice`, by any function that sums over the ranks.

    Args:
      decoder: one rank's.
      tokens: token ids.
      chosen: what each sum is told: the embedding's, then two a layer.
      sum_ranks: ``(choice, partial, residual, stream) -> (stream + sum, residual)``;
        without a stream the sum alone.
      config: what to make the residual with.
    """
    axis = decoder.axis_name
    graphdef, params = nnx.split(decoder.layers)
    partial = decoder.embed(tokens)
    residual = init_residual(partial, axis, config=config)

    def layer(carry, xs):
        (stream, residual), (params, chosen) = carry, xs
        module = nnx.merge(graphdef, params)
        blocks = (
            (module.attention_norm, module.attention),
            (module.mlp_norm, module.mlp),
        )
        for (norm, block), choice in zip(blocks, chosen, strict=True):
            partial = block.partial(norm(exact.pvary(stream, axis)))
            stream, residual = sum_ranks(choice, partial, residual, stream)
        return (stream, residual), None

    carry = sum_ranks(chosen[0], partial, residual)
    told = chosen[1:].reshape(-1, 2, *chosen.shape[1:])
    (stream, _), _ = jax.lax.scan(layer, carry, (params, told))
    return stream


def _owing(configs: Sequence[EchoConfig]) -> EchoConfig:
    """What to make the residual with: of those that may owe, which must agree."""
    owing = [call for call in configs if call.feedback and not call.is_exact]
    if not owing:
        return dataclasses.replace(configs[0], feedback=False)
    kinds = {
        (call.format.block_size, call.format.rotate, call.residual_dtype)
        for call in owing
    }
    if len(kinds) > 1:
        raise ValueError(
            "plans with feedback that are compared by one program share a residual, so "
            f"block_size, rotate and residual_dtype must agree; got {sorted(kinds)}."
        )
    return owing[0]
