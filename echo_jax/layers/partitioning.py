"""Parameters that record how they are sharded over the mesh.

A parameter carries a ``PartitionSpec`` in its Flax metadata. Modules are built with
global shapes. Inside ``jax.shard_map`` the same module holds one rank's shards, and
takes all sizes from the shapes of its parameters.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Initializer = nnx.Initializer
Params = dict[str, Any]  # nested dict of arrays
Specs = dict[str, Any]  # nested dict of PartitionSpec, one for each parameter


def make_param(
    init: Initializer,
    shape: tuple[int, ...],
    spec: tuple[str | None, ...],
    *,
    dtype,
    rngs: nnx.Rngs,
) -> nnx.Param:
    """A parameter of this global shape, sharded according to ``spec``."""
    value = init(rngs.params(), shape, dtype)
    # Not sharded yet: the same module is built for meshes and for simulated ranks.
    return nnx.Param(value, out_sharding=spec, eager_sharding=False)


def split_module(module: nnx.Module) -> tuple[nnx.GraphDef, Params, Specs]:
    """Splits a module into its structure, its parameters and their specs.

    Parameters and specs are nested dicts. It also works on a module of
    ``jax.ShapeDtypeStruct`` (``jax.eval_shape`` of a constructor), which needs no
    memory for parameters.
    """
    graphdef, state = nnx.split(module)
    specs = nnx.get_partition_spec(state)
    return graphdef, nnx.to_pure_dict(state), nnx.to_pure_dict(specs)


def merge_module(graphdef: nnx.GraphDef, params: Params) -> Any:
    """The module with these parameters: the global ones, or one rank's shards."""
    return nnx.merge(graphdef, nnx.State(params))


def shardings(specs: Specs, mesh: Mesh) -> Any:
    """The named shardings of these specs on a mesh."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def split_ranks(params: Any, specs: Any, axis_name: str, ranks: int):
    """Stacks the ranks' shards along a new leading axis, to simulate ranks.

    Args:
      params: global parameters.
      specs: their specs.
      axis_name: the mesh axis to simulate.
      ranks: its size.

    Returns:
      ``(params, in_axes)`` for ``jax.vmap(..., axis_name=axis_name)``; a parameter that
      is not sharded over the axis has ``in_axes`` None and stays as it is.

    Raises:
      ValueError: if the ranks do not divide a dimension that is sharded over the axis,
        or it is sharded over other axes too.
    """

    def cut(param, spec: PartitionSpec):
        dimension = _dimension(spec, axis_name)
        if dimension is None:
            return param
        shape = param.shape
        what = f"dimension {dimension} of shape {shape}, size"
        check_divides(what, shape[dimension], ranks, axis_name)
        parts = (ranks, shape[dimension] // ranks)
        param = param.reshape(*shape[:dimension], *parts, *shape[dimension + 1 :])
        return jnp.moveaxis(param, dimension, 0)

    cut_params = jax.tree.map(cut, params, specs)
    in_axes = jax.tree.map(
        lambda param, spec: None if _dimension(spec, axis_name) is None else 0,
        params,
        specs,
    )
    return cut_params, in_axes


def simulate_ranks(
    function: Callable, *, ranks: int, axis_name: str, in_specs, out_specs
) -> Callable:
    """``jax.shard_map`` with the ranks simulated on one device, by ``vmap``.

    Args:
      function: takes and returns one rank's shards.
      ranks: size of the axis.
      axis_name: the axis to simulate.
      in_specs: spec of each argument, as for ``shard_map``; a spec may stand for a
        whole tree.
      out_specs: specs of the results. A result that is not sharded must be replicated;
        that of the first rank is returned.

    Returns:
      A function of global arrays.
    """
    every_rank = functools.partial(jax.vmap, axis_name=axis_name, axis_size=ranks)

    def simulated(*args):
        specs = jax.tree.broadcast(in_specs, args)
        parts, in_axes = split_ranks(args, specs, axis_name, ranks)
        out = every_rank(function, in_axes=in_axes)(*parts)
        return join_ranks(out, jax.tree.broadcast(out_specs, out), axis_name)

    return simulated


def join_ranks(params: Any, specs: Any, axis_name: str) -> Any:
    """Inverse of :func:`split_ranks`, for values that all have a leading axis of ranks.

    A value that is not sharded over the axis is replicated; the first rank's is taken.
    """

    def join(param, spec: PartitionSpec):
        dimension = _dimension(spec, axis_name)
        if dimension is None:
            return param[0]
        param = jnp.moveaxis(param, 0, dimension)
        shape = param.shape
        joined = shape[dimension] * shape[dimension + 1]
        return param.reshape(*shape[:dimension], joined, *shape[dimension + 2 :])

    return jax.tree.map(join, params, specs)


def check_divides(what: str, size: int, ranks: int, axis_name: str) -> None:
    """Refuses a dimension that the axis does not divide.

    Raises:
      ValueError: naming the dimension, both sizes and the nearest one that works.
    """
    if size % ranks:
        nearest = -(-size // ranks) * ranks
        raise ValueError(
            f"{what}={size} cannot be sharded over {ranks} ranks of axis "
            f"{axis_name!r}: use a multiple of {ranks}, such as {nearest}, or fewer "
            "ranks."
        )


def _dimension(spec: PartitionSpec, axis_name: str) -> int | None:
    """The dimension that is sharded over the axis, None for none.

    Raises:
      ValueError: for one that is sharded over other axes too.
    """
    for dimension, entry in enumerate(spec):
        names = entry if isinstance(entry, tuple) else (entry,)
        if axis_name in names:
            if len(names) > 1:
                raise ValueError(
                    f"{spec} shards dimension {dimension} over {names}: of simulated "
                    f"ranks there are those of {axis_name!r} alone; use a spec with "
                    "one axis for each dimension."
                )
            return dimension
    return None
