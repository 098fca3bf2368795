"""The Triton kernels touch nothing outside their buffers, whatever the sizes.

NVIDIA's memory checker watches one case of the kernel contract after the other, each in
a process of its own and with every buffer allocated by itself: in JAX's memory pool,
what lies behind a buffer belongs to the process too, and the checker would be silent.

    JAX_PLATFORMS=cuda python -m pytest tests/kernels/test_memory_checks.py -m long
"""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.kernels import kernel_contract
from tests.kernels.devices import has_gpu

ROOT = pathlib.Path(__file__).parents[2]
CHECKER = "compute-sanitizer"
ODD = [
    (number, case)
    for number, case in enumerate(kernel_contract.CASES)
    if case.shape != kernel_contract.Case().shape
]
SCRIPT = """
import sys
from echo_jax.kernels import triton
from tests.kernels import kernel_contract

kernel_contract.check(triton, kernel_contract.CASES[int(sys.argv[1])])
print("checked")
"""


@pytest.mark.long
@pytest.mark.skipif(not has_gpu(), reason="no NVIDIA GPU here")
@pytest.mark.skipif(not shutil.which(CHECKER), reason=f"{CHECKER} is not installed")
@pytest.mark.parametrize(
    "number", [pytest.param(number, id=str(case)) for number, case in ODD]
)
def test_odd_sizes_stay_in_their_buffers(number):
    pytest.importorskip("jax_triton", reason="jax-triton is not installed")
    checker = [CHECKER, "--tool", "memcheck", "--error-exitcode", "99"]
    done = subprocess.run(
        [*checker, sys.executable, "-W", "ignore", "-c", SCRIPT, str(number)],
        env={**os.environ, "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-3000:]
    assert "checked" in done.stdout, output[-3000:]
    assert "ERROR SUMMARY: 0 errors" in output, output[-3000:]
