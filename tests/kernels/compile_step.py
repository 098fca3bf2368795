"""Compiles a training step of simulated ranks for one GPU that is not here.

``python compile_step.py TARGET`` prints one JSON object: what the program calls.
"""

import collections
import json
import re
import sys

# First: it sets the environment before JAX is imported.
from compile_ahead import gpu_mesh  # isort: skip

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import echo_jax as echo
from echo_jax.models import DecoderConfig
from echo_jax.training import OptimizerConfig, make_optimizer
from echo_jax.training.ranks import AXES, SimulatedMesh
from echo_jax.training.state import state_shapes
from echo_jax.training.step import make_train_step

MODEL = DecoderConfig(
    vocab_size=256,
    num_layers=2,
    width=256,
    num_heads=8,
    num_kv_heads=8,
    head_dim=32,
    mlp_width=512,
    dtype="bfloat16",
)


def calls(target: str) -> dict[str, int]:
    """Custom calls of a step over one data rank and eight tensor ranks, by target."""
    device = gpu_mesh(target).devices.reshape(-1)[:1].reshape(1, 1)
    on_device = Mesh(device, AXES, axis_types=(AxisType.Auto,) * 2)
    mesh = SimulatedMesh(device=on_device, shape={"data": 1, "tensor": 8})
    optimizer = make_optimizer(OptimizerConfig(), 10)
    shapes, parts = state_shapes(MODEL, mesh, optimizer=optimizer, seed=0)
    plan = echo.DepthPlan.uniform(echo.EchoConfig(min_bytes=0))
    step = make_train_step(parts, mesh, optimizer=optimizer, plan=plan)
    state = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=place
        ),
        shapes,
        parts.shardings,
    )
    whole = NamedSharding(on_device, PartitionSpec())
    tokens = jax.ShapeDtypeStruct((8, 129), jnp.int32, sharding=whole)
    text = step.lower(state, tokens).compile().as_text()
    return collections.Counter(re.findall(r'custom_call_target="([^"]+)"', text))


if __name__ == "__main__":
    print(json.dumps(calls(sys.argv[1])))
