"""Runs the contract on Triton's interpreter: ``python triton_interpreter.py``.

In a process of its own, because the interpreter is chosen before Triton is imported.
Prints one JSON object: the failure of each case, or null.
"""

import json
import os
import sys
import threading
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


# Launches that do not depend on each other come from several threads, and the
# interpreter changes Triton's own modules while it runs.
_ONE_AT_A_TIME = threading.Lock()


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


def triton_call(
    *args,
    kernel,
    grid,
    out_shape=None,
    out_type=None,
    input_output_aliases=(),
    **options,
):
    """``jax_triton.triton_call`` on the interpreter, with its calling conventions.

    With ``out_shape`` that of version 0.3, with ``out_type`` that of version 0.4.
    """
    for option in ("name", "num_warps", "compute_capability"):
        options.pop(option)
    places = [place for place, arg in enumerate(args) if isinstance(arg, jax.Array)]
    aliases = dict(input_output_aliases)
    if out_type is None:
        assert options.pop("enable_fp_fusion") is False
        aliases = {places[index]: target for index, target in aliases.items()}
    else:
        assert options.pop("backend_options") == {"enable_fp_fusion": False}
    results = out_shape if out_type is None else out_type

    def run(*arrays):
        operands = list(args)
        for place, array in zip(places, arrays, strict=True):
            operands[place] = HostTensor(np.array(array))
        outputs = [HostTensor(_poison(result)) for result in results]
        for place, target in aliases.items():
            outputs[target] = operands[place]
        once = out_type is not None
        passed = [out for out in outputs if not (once and out in operands)]
        with _ONE_AT_A_TIME:
            kernel[grid](*operands, *passed, **options)
        return [output.array for output in outputs]

    return jax.pure_callback(run, results, *(args[place] for place in places))


def _loop_over_tensors():
    """Lets a program id bound a loop: NumPy no longer converts arrays of one value."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, *args):
        patch(tensor, *args)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def _addresses_as_constants():
    """Lets the place of a new array be an address or None, as compiled kernels do."""
    start = interpreter.GridExecutor.__init__

    def patched(self, *args):
        start(self, *args)
        self.constexprs = [
            name for name in self.constexprs if not name.startswith("new_")
        ]

    interpreter.GridExecutor.__init__ = patched


def _poison(shape):
    """Values that a kernel must overwrite."""
    return np.full(shape.shape, 0xA5, np.uint8).astype(shape.dtype)


def main(first: int, step: int) -> None:
    """Runs every ``step``-th case."""
    _loop_over_tensors()
    _addresses_as_constants()
    sys.modules["jax_triton"] = types.SimpleNamespace(
        triton_call=triton_call, __version_info__=()
    )
    from echo_jax.kernels import triton
    from echo_jax.kernels import triton_call as caller
    from tests.kernels import kernel_contract

    failures = {}
    for number, case in enumerate(kernel_contract.CASES[first::step]):
        caller._PASSES_ONCE = number % 2 == 1  # each convention every other time
        # As if a grid took the chunks of one message alone; batches of two go at once.
        triton._MOST_CHUNKS = 1 if case.batch == 3 else 65_535
        try:
            kernel_contract.check(triton, case)
        except Exception:
            failures[str(case)] = traceback.format_exc()[-2000:]
        else:
            failures[str(case)] = None
    print(json.dumps(failures))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:] or (0, 1)))
