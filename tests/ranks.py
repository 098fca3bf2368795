"""Runs a function of one rank on many: on simulated ranks, or on devices."""

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

# How the ranks of a test come about; the first simulates them on one device.
MODES = ("vmap", "vma", "no_vma")


def mesh(**sizes: int) -> Mesh:
    """A mesh of the first devices, axes named by keyword, the first the slowest."""
    shape = tuple(sizes.values())
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, tuple(sizes))


def on_ranks(body, *, mode: str = "vmap", axis_name: str = "tp", jit: bool = True):
    """``body`` on every rank, arguments and results stacked along a leading axis.

    The number of ranks is the length of that axis. A replicated result comes back as
    the copy of each rank, so that the copies can be compared.
    """
    if mode == "vmap":
        run = jax.vmap(body, axis_name=axis_name)
        return jax.jit(run) if jit else run

    def local(*args):
        out = body(*jax.tree.map(lambda leaf: leaf[0], args))
        return jax.tree.map(lambda leaf: leaf[None], out)

    def run(*args):
        ranks = jax.tree.leaves(args)[0].shape[0]
        spec = PartitionSpec(axis_name)
        return jax.shard_map(
            local,
            mesh=mesh(**{axis_name: ranks}),
            in_specs=spec,
            out_specs=spec,
            check_vma=mode == "vma",
        )(*args)

    return jax.jit(run) if jit else run


def draw(seed: int, *shape: int, dtype="float32", scale: float = 1.0) -> np.ndarray:
    """Gaussian values, the same for the same seed."""
    values = np.random.default_rng(seed).standard_normal(shape) * scale
    return values.astype(jax.numpy.dtype(dtype))


def bits_of(x) -> np.ndarray:
    """The bytes of an array, so that -0, NaN and every last bit count."""
    return np.ascontiguousarray(np.asarray(x)).view(np.uint8)
