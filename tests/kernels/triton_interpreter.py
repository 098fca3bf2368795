"""Runs the contract on Triton's interpreter: ``python triton_interpreter.py``.

In a process of its own, because the interpreter is chosen before Triton is imported.
Prints one JSON object: the failure of each case, or null.
"""

import json
import os
import sys
import traceback
import types

os.environ["TRITON_INTERPRET"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_TRITON_NAMES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "uint8": "uint8",
    "int8": "int8",
}


class HostTensor:
    """The few methods of a PyTorch tensor that the interpreter calls."""

    def __init__(self, array, dtype=None):
        self.array = array
        self.dtype = dtype or tl.dtype(_TRITON_NAMES[array.dtype.name])

    def data_ptr(self):
        return self.array.ctypes.data

    def element_size(self):
        return self.array.itemsize

    def untyped_storage(self):
        return self

    def cpu(self):
        return HostTensor(self.array.copy(), self.dtype)

    def new_empty(self, *_, **__):
        return HostTensor(np.empty(0, self.array.dtype), self.dtype)

    def set_(self, storage, *_):
        self.array = storage.array

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def copy_(self, other):
        self.array[...] = other.array

    @property
    def shape(self):
        return self.array.shape


def triton_call(*args, kernel, out_shape, grid, input_output_aliases=(), **options):
    """``jax_triton.triton_call`` on the interpreter, with its calling convention."""
    for option in ("name", "num_warps", "enable_fp_fusion", "compute_capability"):
        options.pop(option)
    arrays = [arg for arg in args if isinstance(arg, jax.Array)]
    scalars = [arg for arg in args if not isinstance(arg, jax.Array)]

    def run(*arrays):
        tensors = [HostTensor(np.array(array)) for array in arrays]
        outputs = [HostTensor(_poison(shape)) for shape in out_shape]
        for source, target in dict(input_output_aliases).items():
            outputs[target] = tensors[source]
        kernel[grid](*tensors, *scalars, *outputs, **options)
        return [output.array for output in outputs]

    return jax.pure_callback(run, out_shape, *arrays)


def _loop_over_tensors():
    """Lets a program id bound a loop: NumPy no longer converts arrays of one value."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, *args):
        patch(tensor, *args)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def _poison(shape):
    """Values that a kernel must overwrite."""
    return np.full(shape.shape, 0xA5, np.uint8).astype(shape.dtype)


def main(first: int, step: int) -> None:
    """Runs every ``step``-th case."""
    _loop_over_tensors()
    sys.modules["jax_triton"] = types.SimpleNamespace(triton_call=triton_call)
    from echo_jax.kernels import triton
    from tests.kernels import kernel_contract

    failures = {}
    for case in kernel_contract.CASES[first::step]:
        try:
            kernel_contract.check(triton, case)
        except Exception:
            failures[str(case)] = traceback.format_exc()[-2000:]
        else:
            failures[str(case)] = None
    print(json.dumps(failures))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:] or (0, 1)))
