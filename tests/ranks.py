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


def on_ranks(body, *, mode: str = "vmap", axis_name: str = "tp", replicated=()):
    """``body`` on every rank, arguments and results stacked along a leading axis.

    The number of ranks is the length of that axis. The arguments whose positions are in
    ``replicated`` are handed to all ranks as they are. A replicated result comes back
    as the copy of each rank, so that the copies can be compared.
    """

    def in_axes(args):
        return tuple(None if i in replicated else 0 for i in range(len(args)))

    def simulated(*args):
        return jax.vmap(body, in_axes=in_axes(args), axis_name=axis_name)(*args)

    def on_devices(*args):
        def local(*args):
            own = [
                arg if axis is None else jax.tree.map(lambda leaf: leaf[0], arg)
                for arg, axis in zip(args, in_axes(args), strict=True)
            ]
            return jax.tree.map(lambda leaf: leaf[None], body(*own))

        split = [a for i, a in enumerate(args) if i not in replicated]
        ranks = jax.tree.leaves(split)[0].shape[0]
        spec = PartitionSpec(axis_name)
        specs = tuple(PartitionSpec() if a is None else spec for a in in_axes(args))
        return jax.shard_map(
            local,
            mesh=mesh(**{axis_name: ranks}),
            in_specs=specs,
            out_specs=spec,
            check_vma=mode == "vma",
        )(*args)

    return jax.jit(simulated if mode == "vmap" else on_devices)


def draw(seed: int, *shape: int, dtype="float32", scale: float = 1.0) -> np.ndarray:
    """Gaussian values, the same for the same seed."""
    values = np.random.default_rng(seed).standard_normal(shape) * scale
    return values.astype(jax.numpy.dtype(dtype))


def bits_of(x) -> np.ndarray:
    """The bytes of an array, so that -0, NaN and every last bit count."""
    return np.ascontiguousarray(np.asarray(x)).view(np.uint8)
