"""Compiles one ``echo_psum`` for eight GPUs that are not here, and describes it.

``python compile_ahead.py TARGET RESIDUAL_DTYPE ROTATE PIECES ONTO BITS ALGORITHM``
prints one JSON object. In a process of its own, because JAX reads the environment when
it is imported.
"""

import json
import os
import pathlib
import re
import sys

os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import echo_jax as echo

RANKS = 8
SHAPE = (16384, 8192)
SPEC = PartitionSpec("tp")


def describe(target: str, config: echo.EchoConfig, onto: bool) -> dict:
    """Compiles the call, with the residual donated, and reads the result.

    With ``onto``, the sum is added to a stream.
    """
    mesh = gpu_mesh(target)

    def call(x, residual, stream):
        residual = jax.tree.map(lambda leaf: leaf[0], residual)
        add_to = stream if onto else None
        y, residual = echo.echo_psum(x[0], residual, "tp", add_to=add_to, config=config)
        # First, or XLA gives the donated memory to the output.
        return jax.tree.map(lambda leaf: leaf[None], residual), y

    def init(x):
        residual = echo.init_residual(x[0], "tp", config=config)
        return jax.tree.map(lambda leaf: leaf[None], residual)

    x = _on_mesh(mesh, jax.ShapeDtypeStruct((RANKS, *SHAPE), jnp.bfloat16))
    start = jax.shard_map(init, mesh=mesh, in_specs=SPEC, out_specs=SPEC)
    residual = _on_mesh(mesh, jax.eval_shape(start, x))
    everywhere = PartitionSpec()
    mapped = jax.shard_map(
        call,
        mesh=mesh,
        in_specs=(SPEC, SPEC, everywhere),
        out_specs=(SPEC, everywhere),
    )
    stream = jax.ShapeDtypeStruct(
        SHAPE, jnp.bfloat16, sharding=NamedSharding(mesh, everywhere)
    )
    jitted = jax.jit(mapped, donate_argnums=1)
    compiled = jitted.lower(x, residual, stream).compile()
    residual_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in _leaves(residual))
    return {
        "operations": _operations(compiled.as_text()),
        "aliased_bytes": compiled.memory_analysis().alias_size_in_bytes,
        "residual_bytes": residual_bytes // RANKS,
        "wire_bytes": echo.wire_bytes(SHAPE, RANKS, config),
        "codec": echo.explain(SHAPE, "bfloat16", RANKS, config).backend,
    }


def _operations(text: str) -> list[list[str]]:
    """Name and result of each operation of the entry that does anything."""
    entry = text[text.index("ENTRY") :]
    found = re.findall(r"= (\(.*?\)|\S+) ([a-z][a-z0-9-]*)\(", entry)
    free = {"parameter", "bitcast", "get-tuple-element", "tuple", "constant"}
    return [[name, result] for result, name in found if name not in free]


def gpu_mesh(target: str) -> Mesh:
    described = pathlib.Path(__file__).with_name(f"{target}.txtpb").read_text()
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=described, topology=f"1x1x{RANKS}"
    )
    devices = topologies.make_mesh(topology, (RANKS,), ("tp",)).devices
    return Mesh(devices, ("tp",), axis_types=(AxisType.Auto,))


def _on_mesh(mesh: Mesh, tree):
    sharding = NamedSharding(mesh, SPEC)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
    )


def _leaves(tree):
    return jax.tree.leaves(tree)


if __name__ == "__main__":
    target, residual_dtype, rotate, pieces, onto, bits, algorithm = sys.argv[1:]
    config = echo.EchoConfig(
        format=echo.WireFormat(bits=int(bits), rotate=rotate == "rotated"),
        residual_dtype=residual_dtype,
        min_bytes=0,
        num_chunks=int(pieces),
        algorithm=algorithm,
    )
    print(json.dumps(describe(target, config, onto == "onto")))
