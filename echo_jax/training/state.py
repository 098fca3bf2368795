"""What a training step takes and gives back."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from echo_jax.layers.partitioning import (
    Params,
    Specs,
    shardings,
    split_module,
)
from echo_jax.models import Decoder, DecoderConfig
from echo_jax.training.config import MeshConfig, OptimizerConfig

AXES = ("data", "tensor")


class TrainState(NamedTuple):
    """Everything that changes from step to step."""

    step: Any  # steps taken, a scalar
    params: Any  # nested dict of arrays, cut over the tensor axis
    opt_state: Any  # the optimizer's, cut like the parameters


class ModelParts(NamedTuple):
    """The static side of a model."""

    graphdef: nnx.GraphDef  # its structure
    specs: Specs  # how its parameters are cut
    shardings: TrainState  # where each leaf of its training state lies


def make_mesh(config: MeshConfig) -> Mesh:
    """A mesh of (data, tensor) ranks over the first devices.

    Raises:
      ValueError: if there are not enough devices.
    """
    needed = config.size
    if jax.device_count() < needed:
        raise ValueError(
            f"a mesh of {config.data_ranks} data x {config.tensor_ranks} tensor ranks "
            f"needs {needed} devices, {jax.device_count()} are here: choose a smaller "
            "mesh, or --device cpu, which simulates them."
        )
    return jax.make_mesh(
        (config.data_ranks, config.tensor_ranks),
        AXES,
        axis_types=(AxisType.Auto,) * 2,
        devices=jax.devices()[:needed],
    )


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """AdamW behind a clip of the global norm, with warm-up and cosine decay."""
    warmup = max(1, int(config.warmup * steps))
    schedule = optax.warmup_cosine_decay_schedule(
        config.learning_rate / warmup,  # no step at rate zero
        config.learning_rate,
        warmup,
        warmup + max(1, steps - warmup),
        config.learning_rate * config.final,
    )
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            schedule,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=_decays,
        ),
    )


def create_state(
    config: DecoderConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    seed: int,
) -> tuple[TrainState, ModelParts]:
    """Draws the parameters straight onto the mesh, the same for every mesh."""

    def build():
        return Decoder(config, rngs=nnx.Rngs(seed))

    graphdef, _, specs = split_module(jax.eval_shape(build))

    def init() -> TrainState:
        _, params, _ = split_module(build())
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    placed = state_shardings(jax.eval_shape(init), specs, mesh)
    return jax.jit(init, out_shardings=placed)(), ModelParts(graphdef, specs, placed)


def state_shardings(state: TrainState, specs: Specs, mesh: Mesh) -> TrainState:
    """Where each leaf of a state lies: optimizer moments beside their parameters."""
    whole = NamedSharding(mesh, PartitionSpec())
    cut = shardings(specs, mesh)
    opt_state = optax.tree_utils.tree_map_params(
        lambda params: state.opt_state,
        lambda _, sharding: sharding,
        state.opt_state,
        cut,
        transform_non_params=lambda _: whole,
    )
    return TrainState(whole, cut, opt_state)


def _decays(params: Params) -> Params:
    """Weight decay acts on matrices; the scales of norms are left alone."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key not in ("scale", "bias"), params
    )
