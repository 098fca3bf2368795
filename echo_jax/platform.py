"""What programs will run on, mostly as far as is known without touching a device.

Touching one starts JAX's backends, after which ``jax.distributed.initialize`` fails.
"""

import functools
import importlib.util

import jax

# What JAX on an NVIDIA GPU is made of: without one of these nothing is compiled for it.
_CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_GPU_NAMES = {"gpu", "cuda"}


@functools.cache
def has_cuda_plugin() -> bool:
    """Whether programs can be compiled for NVIDIA GPUs, here or ahead."""
    return any(importlib.util.find_spec(plugin) for plugin in _CUDA_PLUGINS)


def expects_gpu() -> bool:
    """Whether JAX will use NVIDIA GPUs if it finds them.

    So it is where JAX's CUDA plugin is installed, unless ``jax_platforms``
    (``JAX_PLATFORMS``) names other platforms alone.
    """
    chosen = jax.config.jax_platforms  # pyrefly: ignore[missing-attribute]
    wanted = not chosen or bool(_GPU_NAMES & set(chosen.split(",")))
    return wanted and has_cuda_plugin()


def cuda_capability() -> tuple[int, int] | None:
    """Compute capability of what the program being traced will run on; starts backends.

    That is the mesh of the surrounding ``shard_map``, or else JAX's default devices.
    None for anything but NVIDIA GPUs that are here.
    """
    if not expects_gpu() or jax.default_backend() != "gpu":
        return None
    here = jax.local_devices()[0]
    wanted = jax.sharding.get_abstract_mesh().abstract_device
    if wanted is not None and wanted.device_kind != here.device_kind:
        return None
    major, minor = here.compute_capability.split(".")
    return int(major), int(minor)
