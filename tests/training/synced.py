"""Gradients of a few leaves on (data, tensor) ranks, and what is owed for them."""

import functools

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import echo_jax as echo
from echo_jax.training import GradientSync, GradientSyncConfig
from tests import oracle
from tests.ranks import draw, mesh

# One leaf of whole blocks, one that fills its last block in part, and a small one that
# is the same on all tensor ranks.
SHAPES = {"bias": (8 * 150,), "kernel": (40, 64), "scale": (40,)}
SPECS = {"bias": P("tensor"), "kernel": P(None, "tensor"), "scale": P()}
FMT = echo.WireFormat()
TWIN = oracle.Format(FMT.bits, FMT.block_size, FMT.rotate)


def config(**fields) -> GradientSyncConfig:
    sums = {"min_bytes": 0, "residual_dtype": "float32", **fields.pop("sums", {})}
    fields = {"min_leaf_bytes": 1024, **fields}
    return GradientSyncConfig(sums=echo.EchoConfig(**sums), **fields)


def sync_of(**fields) -> GradientSync:
    return GradientSync(config=config(**fields), specs=SPECS)


def params():
    return {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}


def gradients(seed: int, data: int) -> dict[str, np.ndarray]:
    """Global gradients with a leading axis of data ranks."""
    return {
        name: draw(seed + 100 * i, data, *shape)
        for i, (name, shape) in enumerate(SHAPES.items())
    }


def stepper(sync: GradientSync, data: int, tensor: int, *, check_vma: bool = True):
    """A jitted ``(state, gradients) -> (means, state)`` over devices."""
    devices = mesh(data=data, tensor=tensor)

    def local(state, grads):
        grads = jax.tree.map(lambda leaf: leaf[0], grads)
        return sync.update(grads, state)

    by_rank = {name: P("data", *spec) for name, spec in SPECS.items()}
    return jax.jit(
        jax.shard_map(
            local,
            mesh=devices,
            in_specs=(sync.state_spec, by_rank),
            out_specs=(SPECS, sync.state_spec),
            check_vma=check_vma,
        )
    )


def run(sync: GradientSync, state, step, seeds, data: int):
    """Means of several steps, float64 sums of means, and the last state."""
    means = []
    for seed in seeds:
        mean, state = step(state, gradients(seed, data))
        means.append(jax.tree.map(np.asarray, mean))
    return means, state


def owed(state, data: int, tensor: int) -> dict[str, np.ndarray]:
    """What all ranks owe the sums of the large leaves, in float64, from one bucket."""
    send, reduce = (np.asarray(part[0], np.float64) for part in state[1:])
    chunks, blocks, size = send.shape[1:]
    send = send.reshape(data, tensor, chunks, blocks, size).sum(axis=0)
    reduce = np.moveaxis(reduce.reshape(data, tensor, blocks, size), 0, 1)
    rows = oracle.unrotate(send + reduce, TWIN).reshape(tensor, -1, size)
    parts: dict[str, list] = {"bias": [], "kernel": []}
    for rank in rows:
        start = 0
        for name, found in parts.items():
            shape = list(SHAPES[name])
            shape[-1] //= tensor
            values = int(np.prod(shape))
            stop = start + -(-values // size)
            found.append(rank[start:stop].reshape(-1)[:values].reshape(shape))
            start = stop
    return {name: np.concatenate(found, axis=-1) for name, found in parts.items()}


def total(trees) -> dict[str, np.ndarray]:
    """Sum of trees in float64."""
    return functools.reduce(
        lambda a, b: jax.tree.map(np.add, a, b),
        [jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), t) for t in trees],
    )


def exact_total(seeds, data: int) -> dict[str, np.ndarray]:
    """Sum over steps of the exact means over data ranks, in float64."""
    return total(
        jax.tree.map(lambda g: g.astype(np.float64).mean(axis=0), gradients(s, data))
        for s in seeds
    )
