"""What the kernels' tests can run on here."""

import jax


def has_gpu() -> bool:
    """Whether JAX may use an NVIDIA GPU: not unless JAX_PLATFORMS names cuda."""
    try:
        return bool(jax.local_devices(backend="cuda"))
    except RuntimeError:
        return False
