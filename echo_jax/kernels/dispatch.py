"""One codec made of GPU kernels and, on all other platforms, the XLA definition.

Which of the two runs is decided when a program is lowered for a platform. A process
without a GPU can therefore compile for one, and one program may hold both. ``vmap``,
by which ranks are simulated on one device, becomes a single launch over a batch of
messages.

A kernel module implements the stages with one more leading axis, the batch, on every
array: ``send(x, residual, *, fmt, chunks, piece)``, ``reduce(payloads, residual, *,
fmt, piece)`` and ``return_(payloads, stream, out, *, shape, dtype, fmt, piece)``.
"""

import functools
from collections.abc import Callable
from types import ModuleType

import jax

from echo_jax import axes
from echo_jax.batching import fold_vmap
from echo_jax.kernels import xla


def send(kernels: ModuleType, fall_back: bool, x, residual, **static):
    """See :class:`echo_jax.kernels.api.Codec`."""
    kernel = functools.partial(kernels.send, **static)
    definition = functools.partial(xla.send, **static) if fall_back else None
    return _call(kernel, definition, x, residual)


def reduce(kernels: ModuleType, fall_back: bool, payloads, residual, **static):
    """See :class:`echo_jax.kernels.api.Codec`."""
    kernel = functools.partial(kernels.reduce, **static)
    definition = functools.partial(xla.reduce, **static) if fall_back else None
    return _call(kernel, definition, payloads, residual)


def return_(
    kernels: ModuleType, fall_back: bool, payloads, *, stream=None, out=None, **static
):
    """See :class:`echo_jax.kernels.api.Codec`."""

    def definition(payloads, stream, out):
        return xla.return_(payloads, stream=stream, out=out, **static)

    kernel = functools.partial(kernels.return_, **static)
    return _call(kernel, definition if fall_back else None, payloads, stream, out)


def _call(kernel: Callable, definition: Callable | None, *args):
    """Runs a stage on one message: the kernel on CUDA, the definition elsewhere.

    Without a definition, lowering for anything else is an error.
    """
    elsewhere = {} if definition is None else {"default": jax.vmap(definition)}

    def typed(*args):
        # The results of custom calls are not typed as varying along any axis.
        vary = frozenset().union(*map(axes.varying_axes, jax.tree.leaves(args)))
        retype = functools.partial(axes.to_varying, axes=vary)
        return jax.tree.map(retype, kernel(*args))

    @fold_vmap
    def batched(*args):
        return jax.lax.platform_dependent(*args, cuda=typed, **elsewhere)

    one = jax.tree.map(lambda leaf: leaf[None], args)
    return jax.tree.map(lambda leaf: leaf[0], batched(*one))
