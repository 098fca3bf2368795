"""One step of training, and of evaluation, over a (data, tensor) mesh."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from echo_jax import residual as residuals
from echo_jax.layers.partitioning import merge_module
from echo_jax.plan import DepthPlan
from echo_jax.residual import Residual
from echo_jax.training.state import AXES, ModelParts, TrainState


class StepMetrics(NamedTuple):
    """Scalars of one step, the same on every rank."""

    loss: jax.Array  # mean cross entropy over the batch, nats a token
    grad_norm: jax.Array  # global norm of the gradient, before the clip
    residual_send: jax.Array  # root mean square of what senders owe after the forward
    residual_reduce: jax.Array  # and of what the summing ranks owe


def make_train_step(
    parts: ModelParts,
    mesh: Mesh,
    optimizer: optax.GradientTransformation,
    plan: DepthPlan,
) -> Callable[[TrainState, jax.Array], tuple[TrainState, StepMetrics]]:
    """A jitted ``(state, tokens (batch, length + 1)) -> (state, metrics)``.

    The gradient is taken inside the ``shard_map``, where types are tracked: sums over
    data ranks of replicated parameters' gradients are exact and automatic. The state
    is donated.
    """

    def local_loss(params, tokens):
        model = merge_module(parts.graphdef, params)
        loss, residual = model.loss(tokens[:, :-1], tokens[:, 1:], plan=plan)
        return lax.pmean(loss, "data"), _mean_residual(residual)

    gradient = jax.shard_map(
        jax.value_and_grad(local_loss, has_aux=True),
        mesh=mesh,
        in_specs=(parts.specs, PartitionSpec("data")),
        out_specs=((PartitionSpec(), PartitionSpec()), parts.specs),
    )

    def step(state: TrainState, tokens: jax.Array):
        (loss, owed), grads = gradient(state.params, tokens)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = StepMetrics(loss, optax.tree.norm(grads), *owed)
        return TrainState(state.step + 1, params, opt_state), metrics

    # Where the state came from it goes back to: the second step finds its program.
    return jax.jit(step, donate_argnums=0, out_shardings=(parts.shardings, None))


def make_eval_step(parts: ModelParts, mesh: Mesh, plan: DepthPlan) -> Callable:
    """A jitted ``(params, tokens (batch, length + 1)) -> loss``."""

    def local_loss(params, tokens):
        model = merge_module(parts.graphdef, params)
        loss, _ = model.loss(tokens[:, :-1], tokens[:, 1:], plan=plan)
        return lax.pmean(loss, "data")

    return jax.jit(
        jax.shard_map(
            local_loss,
            mesh=mesh,
            in_specs=(parts.specs, PartitionSpec("data")),
            out_specs=PartitionSpec(),
        )
    )


def _mean_residual(residual: Residual | None) -> tuple[jax.Array, jax.Array]:
    """Root mean square over all ranks of both parts of what is owed."""
    if residual is None:
        return jnp.zeros(()), jnp.zeros(())
    norms = residuals.norms(residual)
    means = lax.pmean((norms["send"] ** 2, norms["reduce"] ** 2), AXES)
    return jnp.sqrt(means[0]), jnp.sqrt(means[1])
