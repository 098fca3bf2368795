"""Calls a Triton kernel by jax-triton, 0.3 or 0.4: all that differs between the two.

A kernel's parameters are its operands, then its results, then ``new_...`` for each
operand that it may write in place, then its constants. jax-triton 0.3 knows an array
that is written in place as an operand and a result that share their memory: the kernel
gets the address twice, the second time as ``new_...``. From 0.4 on it is a ``jax.Ref``,
whose address comes once, and ``new_...`` is None.
"""

import inspect
from collections.abc import Sequence

import jax
import jax_triton

_TAKES_REFS = "out_type" in inspect.signature(jax_triton.triton_call).parameters
# They call JAX functions that 0.12 has changed; https://pypi.org has no later ones.
_WITHOUT_JAX_0_12 = ((0, 4, 0), (0, 4, 1))

if jax.__version_info__ >= (0, 12) and (
    jax_triton.__version_info__ in _WITHOUT_JAX_0_12
):
    raise ImportError(
        f"jax-triton {jax_triton.__version__} does not work with JAX "
        f"{jax.__version__}: install jax-triton 0.3.1, or JAX 0.11."
    )


def call(
    kernel,
    operands: Sequence,
    results: Sequence[jax.ShapeDtypeStruct],
    *,
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
    places = [name for name in kernel.arg_names if name.startswith("new_")]
    absent = dict.fromkeys(places if _TAKES_REFS else places[len(in_place) :])
    run = _call_with_refs if _TAKES_REFS else _call_with_aliases
    options = {**launch, **constants, **absent, "kernel": kernel}
    return run(list(operands), list(results), in_place, options)


def _call_with_refs(operands, results, in_place, options):
    """For jax-triton 0.4; multiply-adds are not contracted."""
    for index in in_place:
        operands[index] = jax.new_ref(operands[index])
    fresh = jax_triton.triton_call(
        *operands,
        out_type=results,
        backend_options={"enable_fp_fusion": False},
        **options,
    )
    return fresh, [jax.freeze(operands[index]) for index in in_place]


def _call_with_aliases(operands, results, in_place, options):
    """For jax-triton 0.3, which counts operands by their arrays alone."""
    arrays = [n for n, operand in enumerate(operands) if not isinstance(operand, int)]
    aliases = {
        arrays.index(index): len(results) + n for n, index in enumerate(in_place)
    }
    changed = [jax.typeof(operands[index]) for index in in_place]
    out = jax_triton.triton_call(
        *operands,
        out_shape=[*results, *changed],
        enable_fp_fusion=False,
        input_output_aliases=aliases,
        **options,
    )
    return out[: len(results)], out[len(results) :]
