"""What a training step takes and gives back."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from echo_jax.layers.partitioning import (
    Params,
    Specs,
    shardings,
    split_module,
)
from echo_jax.models import Decoder, DecoderConfig
from echo_jax.training.gradient_plan import GradientSyncConfig
from echo_jax.training.gradient_sync import GradientSync
from echo_jax.training.ranks import AXES, AnyMesh, on_ranks, placement


class TrainState(NamedTuple):
    """Everything that changes from step to step."""

    step: Any  # steps taken, an int32 scalar
    params: Any  # nested dict of arrays, sharded over the tensor axis
    opt_state: Any  # the optimizer's, sharded like the parameters
    key: Any = None  # uint32 data of a random key, for steps that draw; ours do not
    gradient_residual: Any = None  # GradientSyncState; None for exact means


class ModelParts(NamedTuple):
    """The static side of a model."""

    graphdef: nnx.GraphDef  # its structure
    specs: Specs  # how its parameters are sharded
    shardings: TrainState  # where each leaf of its training state lies
    sync: GradientSync | None = None  # of gradients over the data axis; None: exact


def create_state(
    config: DecoderConfig,
    mesh: AnyMesh,
    *,
    optimizer: optax.GradientTransformation,
    seed: int,
    gradients: GradientSyncConfig | None = None,
) -> tuple[TrainState, ModelParts]:
    """Draws parameters and optimizer state straight onto the mesh.

    The parameters depend on the seed alone, not on the mesh.

    Args:
      config: the decoder.
      mesh: from ``make_mesh``.
      optimizer: from ``make_optimizer``, or any other.
      seed: of the parameters.
      gradients: how gradients cross the data axis; None for exact means.

    Returns:
      ``(state, parts)``: arrays, sharded as ``parts.shardings`` says, and everything
      static that ``make_train_step`` needs beside them.

    Example:
        >>> mesh = make_mesh(MeshConfig(data_ranks=1, tensor_ranks=1))
        >>> state, parts = create_state(
        ...     DecoderConfig(), mesh, optimizer=optax.sgd(0.1), seed=0
        ... )
    """
    _, parts = state_shapes(
        config, mesh, optimizer=optimizer, seed=seed, gradients=gradients
    )
    init = _initializer(config, mesh, optimizer=optimizer, seed=seed, sync=parts.sync)
    return jax.jit(init, out_shardings=parts.shardings)(), parts


def state_shapes(
    config: DecoderConfig,
    mesh: AnyMesh,
    *,
    optimizer: optax.GradientTransformation,
    seed: int,
    gradients: GradientSyncConfig | None = None,
) -> tuple[TrainState, ModelParts]:
    """As :func:`create_state`, with shapes in the place of arrays: costs no memory."""
    module = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(seed)))
    graphdef, _, specs = split_module(module)
    sync = None
    if gradients is not None:
        sync = GradientSync(config=gradients, specs=specs)
    init = _initializer(config, mesh, optimizer=optimizer, seed=seed, sync=sync)
    shapes = jax.eval_shape(init)
    placed = state_shardings(shapes, mesh, specs=specs)
    return shapes, ModelParts(graphdef, specs, placed, sync)


def state_shardings(state: TrainState, mesh: AnyMesh, *, specs: Specs) -> TrainState:
    """Where each leaf of a state lies: optimizer moments beside their parameters."""
    replicated = NamedSharding(placement(mesh), PartitionSpec())
    of_ranks = NamedSharding(placement(mesh), PartitionSpec(AXES))
    sharded = shardings(specs, placement(mesh))
    opt_state = optax.tree_utils.tree_map_params(
        lambda params: state.opt_state,
        lambda _, sharding: sharding,
        state.opt_state,
        sharded,
        transform_non_params=lambda _: replicated,
    )
    owed = jax.tree.map(lambda _: of_ranks, state.gradient_residual)
    return TrainState(replicated, sharded, opt_state, replicated, owed)


def fresh_residual(parts: ModelParts, mesh: AnyMesh, *, params: Params) -> Any:
    """What a gradient sync owes before its first step; None where nothing is."""
    if parts.sync is None:
        return None
    init = on_ranks(
        parts.sync.init, mesh, in_specs=(parts.specs,), out_specs=PartitionSpec(AXES)
    )
    where = parts.shardings.gradient_residual
    return jax.jit(init, out_shardings=where)(params)


def _initializer(config: DecoderConfig, mesh: AnyMesh, *, optimizer, seed: int, sync):
    def init() -> TrainState:
        _, params, specs = split_module(Decoder(config, rngs=nnx.Rngs(seed)))
        step, key = jnp.zeros((), jnp.int32), jax.random.key_data(jax.random.key(seed))
        owed = None
        if sync is not None:
            start = on_ranks(
                sync.init, mesh, in_specs=(specs,), out_specs=PartitionSpec(AXES)
            )
            owed = start(params)
        return TrainState(step, params, optimizer.init(params), key, owed)

    return init
