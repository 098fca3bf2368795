"""One step of training, and of evaluation, over a (data, tensor) mesh."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from echo_jax import axes
from echo_jax import residual as residuals
from echo_jax.layers.partitioning import merge_module
from echo_jax.plan import DepthPlan
from echo_jax.residual import Residual
from echo_jax.training.ranks import AXES, AnyMesh, on_ranks
from echo_jax.training.state import ModelParts, TrainState


class StepMetrics(NamedTuple):
    """Scalars of one step, the same on every rank."""

    loss: jax.Array  # mean cross entropy over the batch, nats a token
    grad_norm: jax.Array  # global norm of the gradient, before the clip
    residual_send: jax.Array  # root mean square of what senders owe after the forward
    residual_reduce: jax.Array  # and of what the summing ranks owe
    stream: jax.Array  # root mean square of the stream after the last layer
    skipped: jax.Array  # 1 where the gradient was not finite: the state stayed


# Averages gradients over the data axis, on every rank. In: gradients of the rank's own
# part of the batch, and its part of ``TrainState.gradient_residual``. Out: the
# averages, and what is owed now. ``GradientSync.update`` is one.
SyncFunction = Callable[[Any, Any], tuple[Any, Any]]


def exact_mean(gradients: Any, residual: Any) -> tuple[Any, Any]:
    """The sync that rounds nothing and owes nothing."""
    return lax.pmean(gradients, "data"), residual


def make_train_step(
    parts: ModelParts,
    mesh: AnyMesh,
    *,
    optimizer: optax.GradientTransformation,
    plan: DepthPlan,
    accumulate: int = 1,
    sync: SyncFunction | None = None,
    steps_per_call: int = 1,
) -> Callable[[TrainState, jax.Array], tuple[TrainState, StepMetrics]]:
    """A jitted function ``(state, tokens) -> (state, metrics)``.

    Each data rank takes the gradient of its own part of the batch, inside the
    ``shard_map``; ``sync`` then averages the gradients over data ranks, once a step. A
    step whose gradient is not finite advances ``state.step`` and changes nothing else:
    neither parameters, nor optimizer, nor what ``sync`` owes.

    The state that goes in is donated: use the one that comes back.

    Sharding: tokens are sharded over the data axis along the batch. Parameters and
    optimizer state keep the shardings of ``parts``; metrics are the same on all ranks.

    Args:
      parts: from ``create_state``.
      mesh: from ``make_mesh``.
      optimizer: from ``make_optimizer``, or any other.
      plan: the configurations of the model's all-reduces.
      accumulate: equal parts of each rank's batch that run one after the other.
      sync: how gradients cross the data axis; None for ``parts.sync``, or exact means
        if that is None too. Its residual is ``state.gradient_residual``, sharded over
        both axes along the first dimension.
      steps_per_call: optimizer steps that the device takes in one call, which saves
        the way to the host where a step is short.

    Returns:
      The function. It takes int32 ``tokens (batch, length + 1)``, inputs and, shifted
      by one, targets, and returns scalars. With ``steps_per_call`` above 1 tokens and
      metrics have a leading axis of that many steps.

    Raises:
      ValueError: if ``steps_per_call`` or ``accumulate`` is not at least 1.

    Example:
        >>> plan = DepthPlan.edges()
        >>> step = make_train_step(parts, mesh, optimizer=optimizer, plan=plan)
        >>> state, metrics = step(state, tokens)
    """
    if min(accumulate, steps_per_call) < 1:
        raise ValueError(
            f"accumulate={accumulate} and steps_per_call={steps_per_call} must be at "
            "least 1."
        )
    step = _step_of(parts, mesh, optimizer, plan, accumulate, sync)

    def several(state: TrainState, tokens: jax.Array):
        return lax.scan(step, state, tokens, length=steps_per_call)

    # The state comes back with the shardings it had, or the second call would compile
    # another program.
    return jax.jit(
        step if steps_per_call == 1 else several,
        donate_argnums=0,
        out_shardings=(parts.shardings, None),
    )


def make_eval_step(
    parts: ModelParts, mesh: AnyMesh, *, plan: DepthPlan
) -> Callable[[Any, jax.Array], jax.Array]:
    """A jitted function ``(params, tokens) -> loss``.

    Args:
      parts: from ``create_state``.
      mesh: from ``make_mesh``.
      plan: the configurations of the model's all-reduces.

    Returns:
      The function. It takes ``state.params`` and int32 ``tokens (batch, length + 1)``,
      sharded over the data axis, and returns the mean cross entropy in nats a token.
    """

    def local_loss(params, tokens):
        model = merge_module(parts.graphdef, params)
        loss, _ = model.loss(tokens[:, :-1], tokens[:, 1:], plan=plan)
        return lax.pmean(loss, "data")

    return jax.jit(
        on_ranks(
            local_loss,
            mesh,
            in_specs=(parts.specs, PartitionSpec("data")),
            out_specs=PartitionSpec(),
        )
    )


def _step_of(parts, mesh, optimizer, plan, accumulate, sync):
    """The step as a plain function, to be jitted or scanned."""
    if sync is None:
        sync = exact_mean if parts.sync is None else parts.sync.update
    gradient = on_ranks(
        _local_gradient(parts, plan, accumulate, sync),
        mesh,
        in_specs=(parts.specs, PartitionSpec("data"), PartitionSpec(AXES)),
        out_specs=(parts.specs, PartitionSpec(AXES), PartitionSpec()),
    )

    def step(state: TrainState, tokens: jax.Array):
        grads, owed, measured = gradient(state.params, tokens, state.gradient_residual)
        norm = optax.tree.norm(grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        new = (optax.apply_updates(state.params, updates), opt_state, owed)
        old = (state.params, state.opt_state, state.gradient_residual)
        finite = jnp.isfinite(norm)
        new = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
        loss, send, reduce, stream = measured
        skipped = 1 - finite.astype(jnp.int32)
        metrics = StepMetrics(loss, norm, send, reduce, stream, skipped)
        return TrainState(state.step + 1, new[0], new[1], state.key, new[2]), metrics

    return step


def _local_gradient(parts: ModelParts, plan: DepthPlan, accumulate: int, sync):
    """What one rank does: ``(params, tokens, owed) -> (gradient, owed, measured)``."""

    def loss_of(params, tokens):
        model = merge_module(parts.graphdef, params)
        loss, stream, residual = model.loss_and_stream(
            tokens[:, :-1], tokens[:, 1:], plan=plan
        )
        return loss, _squares(stream, residual)

    def gradient(params, tokens, owed):
        # Parameters that count as different on each data rank: their gradients stay
        # apart, for one sync after the last part, in as many bits as it takes.
        own = jax.tree.map(_of_this_data_rank, params)
        value_and_grad = jax.value_and_grad(loss_of, has_aux=True)
        (loss, squares), grads = _averaged(value_and_grad, own, tokens, accumulate)
        grads, owed = sync(grads, owed)
        means = jnp.sqrt(lax.pmean(squares, AXES))
        return grads, owed, (lax.pmean(loss, "data"), *means)

    return gradient


def _averaged(value_and_grad, params, tokens, parts: int):
    """``value_and_grad`` over equal parts of the batch, everything averaged."""
    if parts == 1:
        return value_and_grad(params, tokens)
    pieces = tokens.reshape(parts, -1, *tokens.shape[1:])
    total = value_and_grad(params, pieces[0])

    def add(total, piece):
        return jax.tree.map(jnp.add, total, value_and_grad(params, piece)), None

    total, _ = lax.scan(add, total, pieces[1:])
    return jax.tree.map(lambda leaf: leaf / parts, total)


def _of_this_data_rank(param: jax.Array) -> jax.Array:
    data = frozenset({"data"})
    return axes.to_varying(param, data) if axes.is_tracked("data") else param


def _squares(stream: jax.Array, residual: Residual | None) -> jax.Array:
    """Mean squares on this rank: both parts of what is owed, then the stream."""
    norms = {"send": jnp.zeros(()), "reduce": jnp.zeros(())}
    if residual is not None:
        norms = residuals.norms(residual)
    size = jnp.sqrt(jnp.mean(jnp.square(stream.astype(jnp.float32))))
    values = [norms["send"], norms["reduce"], size]
    if axes.is_tracked(AXES):
        values = [axes.to_varying(value, frozenset(AXES)) for value in values]
    return jnp.square(jnp.stack(values))
