"""Running a module on ranks: devices by ``shard_map``, or simulated by ``vmap``."""

import jax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from echo_jax.layers import merge_module, split_module, split_ranks

AXIS = "tensor"


def on_devices(function, build, mesh: Mesh, in_specs, out_specs, check_vma=True):
    """A jitted ``(params, *args)`` around ``function(module, *args)`` in shard_map."""
    graphdef, _, specs = split_module(jax.eval_shape(build))

    def local(params, *args):
        return function(merge_module(graphdef, params), *args)

    return jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(specs, *in_specs),
            out_specs=out_specs,
            check_vma=check_vma,
        )
    )


def simulated(function, build, ranks: int):
    """A ``(params, *args)`` around ``function(module, *args)``, ranks simulated."""
    graphdef, _, specs = split_module(jax.eval_shape(build))

    def run(params, *args):
        cut, in_axes = split_ranks(params, specs, AXIS, ranks)
        local = lambda params, *args: function(merge_module(graphdef, params), *args)  # noqa: E731
        axes = (in_axes, *(None for _ in args))
        batched = jax.vmap(local, in_axes=axes, axis_name=AXIS, axis_size=ranks)
        return batched(cut, *args)

    return run


def init(build):
    """Global parameters of a module."""
    return split_module(build())[1]


def rngs(seed: int = 0) -> nnx.Rngs:
    return nnx.Rngs(seed)


REPLICATED = PartitionSpec()
