"""The same function of one rank on a mesh of devices, or on simulated ranks."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, PartitionSpec

from echo_jax.training.config import MeshConfig

AXES = ("data", "tensor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedMesh:
    """Ranks that share one device: ``vmap`` in the place of ``shard_map``."""

    device: Mesh  # one device, both axes of length 1: where arrays lie
    shape: dict[str, int]  # ranks along each axis


AnyMesh = Mesh | SimulatedMesh


def make_mesh(config: MeshConfig) -> AnyMesh:
    """A mesh of (data, tensor) ranks over the first devices.

    Raises:
      ValueError: if there are not enough devices.
    """
    needed = config.size
    if jax.device_count() < needed:
        raise ValueError(
            f"a mesh of {config} needs {needed} devices, {jax.device_count()} are "
            "here: choose a smaller mesh, or --device cpu, which simulates them."
        )
    sizes = (config.data_ranks, config.tensor_ranks)
    mesh = jax.make_mesh(
        (1, 1) if config.simulated else sizes,
        AXES,
        axis_types=(AxisType.Auto,) * 2,
        devices=jax.devices()[:needed],
    )
    if not config.simulated:
        return mesh
    return SimulatedMesh(device=mesh, shape=dict(zip(AXES, sizes, strict=True)))


def placement(mesh: AnyMesh) -> Mesh:
    """The mesh of devices on which arrays lie."""
    return mesh.device if isinstance(mesh, SimulatedMesh) else mesh


def on_ranks(body: Callable, mesh: AnyMesh, *, in_specs, out_specs) -> Callable:
    """``body`` on every rank of the mesh, as ``jax.shard_map`` runs it.

    Args:
      body: a function of one rank's parts, with the mesh's axes bound.
      mesh: devices, or simulated ranks.
      in_specs: for each argument a tree prefix of ``PartitionSpec``.
      out_specs: for the result. What is not sharded over an axis must be the same on
        all its ranks; where types are not tracked, the first rank's is taken.

    Returns:
      The function of global arrays.
    """
    if isinstance(mesh, Mesh):
        return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    sizes = mesh.shape

    def run(*args):
        specs = jax.tree.broadcast(tuple(in_specs), args)
        mapped = body
        for name in reversed(AXES):
            axes = jax.tree.map(
                lambda s, n=name: 0 if n in set(_names(s)) else None, specs
            )
            mapped = jax.vmap(
                mapped, in_axes=axes, axis_name=name, axis_size=sizes[name]
            )
        results = mapped(*jax.tree.map(lambda x, s: _cut(x, s, sizes), args, specs))
        specs = jax.tree.broadcast(out_specs, results)
        return jax.tree.map(lambda x, s: _join(x, s, sizes), results, specs)

    return run


def _entries(spec: PartitionSpec) -> Iterator[tuple[str, ...]]:
    """For each dimension the axes that cut it, slowest first."""
    for entry in spec:
        yield () if entry is None else (entry,) if isinstance(entry, str) else entry


def _names(spec: PartitionSpec) -> Iterator[str]:
    return itertools.chain.from_iterable(_entries(spec))


def _places(spec: PartitionSpec, rank: int) -> dict[str, int]:
    """Where each axis stands once every dimension is cut into (axes, rest)."""
    places, at = {}, 0
    for names in itertools.islice(
        itertools.chain(_entries(spec), itertools.repeat(())), rank
    ):
        for name in names:
            places[name] = at
            at += 1
        at += 1
    return places


def _cut(x: jax.Array, spec: PartitionSpec, sizes: dict[str, int]) -> jax.Array:
    """Parts of the ranks along new leading axes, in the order of ``AXES``."""
    shape: list[int] = []
    cuts = itertools.chain(_entries(spec), itertools.repeat(()))
    for length, names in zip(x.shape, cuts, strict=False):
        parts = [sizes[name] for name in names]
        shape += [*parts, length // math.prod(parts)]
    places = _places(spec, x.ndim)
    order = [places[name] for name in AXES if name in places]
    return jnp.moveaxis(x.reshape(shape), order, range(len(order)))


def _join(x: jax.Array, spec: PartitionSpec, sizes: dict[str, int]) -> Any:
    """Inverse of ``_cut`` for a result with one leading axis for each of ``AXES``."""
    whole = set(AXES) - set(_names(spec))
    x = x[tuple(0 if name in whole else slice(None) for name in AXES)]
    cut = len(AXES) - len(whole)
    lengths = list(x.shape[cut:])
    places = _places(spec, len(lengths))
    order = [places[name] for name in AXES if name in places]
    x = jnp.moveaxis(x, range(cut), order)
    for index, names in enumerate(_entries(spec)):
        lengths[index] *= math.prod(sizes[name] for name in names)
    return x.reshape(lengths)
