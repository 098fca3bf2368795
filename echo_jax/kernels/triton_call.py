"""Calls a Triton kernel by jax-triton, 0.3 or 0.4: all that differs between the two.

A kernel's parameters are its operands, then its results, then ``new_...`` for each
operand that it may write in place, then its constants. An array that is written in
place is an operand and a result that share their memory. jax-triton 0.3 passes its
address twice, the second time as ``new_...``; from 0.4 on it comes once, and
``new_...`` is None.

Version 0.4 would rather have a ``jax.Ref`` for such an array, and says so in a
DeprecationWarning. But the value of a Ref comes out of its kernels without the axes it
varies along, which ``jax.shard_map`` refuses where platforms are told apart.
"""

import inspect
from collections.abc import Iterable, Sequence

import jax
import jax_triton

# The two of version 0.4 so far rely on what JAX 0.12 has changed.
_NOT_WITH_JAX_0_12 = ((0, 4, 0), (0, 4, 1))
# Where version 0.4 differs, its arguments have other names.
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
      results: what the kernel writes to memory of its own.
      in_place: positions among the operands of the arrays that it writes to.
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
    # Operands are counted by their arrays alone.
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
    """Operands to results; those in place are the last of these."""
    positions = list(positions)
    first = len(shapes) - len(positions)
    return {position: first + n for n, position in enumerate(positions)}
