"""Calls Triton kernels through jax-triton; hides how versions 0.3 and 0.4 differ.

A kernel's parameters are its operands, then its results, then a ``new_...`` parameter
for each operand that it may write in place, then its constants. An array that is
written in place is an operand and a result that share their memory. jax-triton 0.3
passes its address twice, the second time as ``new_...``; version 0.4 passes it once,
and ``new_...`` is None.

For such an array, version 0.4 recommends a ``jax.Ref`` and emits a DeprecationWarning.
But the value of a Ref that a kernel has written is not typed as varying along any axis,
which ``jax.shard_map`` refuses in code that depends on the platform.
"""

import inspect
from collections.abc import Iterable, Sequence

import jax
import jax_triton

# Both releases of version 0.4 so far rely on something that JAX 0.12 changed.
_NOT_WITH_JAX_0_12 = ((0, 4, 0), (0, 4, 1))
# Version 0.4 is recognized by the name of an argument.
_PASSES_ONCE = "out_type" in inspect.signature(jax_triton.triton_call).parameters

if jax.__version_info__ >= (0, 12) and (
    jax_triton.__version_info__ in _NOT_WITH_JAX_0_12
):
    raise ImportError(
        f"jax-triton {jax_triton.__version__} does not work with JAX "
        f"{jax.__version__}: install jax-triton 0.3.1, or JAX 0.11"
    )


def call(
    kernel,
    operands: Sequence,
    *,
    results: Sequence[jax.ShapeDtypeStruct],
    in_place: Sequence[int] = (),
    constants: dict,
    **launch,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Runs a kernel once.

    Args:
      kernel: from ``triton.jit``.
      operands: arrays and integers, in the order of the kernel's parameters.
      results: shapes of the results that get memory of their own.
      in_place: positions, among the operands, of the arrays that are written in place.
      constants: by name, for the kernel's ``constexpr`` parameters.
      **launch: ``name``, ``grid``, ``num_warps`` and ``compute_capability``, see
        ``jax_triton.triton_call``.

    Returns:
      The results, and the arrays of ``in_place`` as the kernel leaves them.
    """
    options = _options_0_4 if _PASSES_ONCE else _options_0_3
    shapes = [*results, *(jax.typeof(operands[index]) for index in in_place)]
    places = [name for name in kernel.arg_names if name.startswith("new_")]
    out = jax_triton.triton_call(
        *operands,
        kernel=kernel,
        **options(operands, shapes, in_place, places),
        **launch,
        **constants,
    )
    return out[: len(results)], out[len(results) :]


def _options_0_3(operands, shapes, in_place, places) -> dict:
    # Version 0.3 numbers operands without counting integers.
    arrays = [n for n, operand in enumerate(operands) if not isinstance(operand, int)]
    return {
        "out_shape": shapes,
        "input_output_aliases": _aliases(map(arrays.index, in_place), shapes),
        "enable_fp_fusion": False,
        **dict.fromkeys(places[len(in_place) :]),
    }


def _options_0_4(operands, shapes, in_place, places) -> dict:
    return {
        "out_type": shapes,
        "input_output_aliases": _aliases(in_place, shapes),
        "backend_options": {"enable_fp_fusion": False},
        **dict.fromkeys(places),
    }


def _aliases(positions: Iterable[int], shapes: Sequence) -> dict[int, int]:
    """Maps operands to results; arrays written in place are the last results."""
    positions = list(positions)
    first = len(shapes) - len(positions)
    return {position: first + n for n, position in enumerate(positions)}
