"""The kernel contract, on every backend that can run here."""

import functools
import json
import os
import pathlib
import subprocess
import sys
import types

import pytest

from echo_jax.kernels import pallas
from echo_jax.kernels.api import KERNEL_BITS
from tests.kernels import kernel_contract
from tests.kernels.devices import has_gpu

HERE = pathlib.Path(__file__).parent
# The interpreters take seconds for a case: some of the cases every time, and all of
# them when asked for.
FIRST, STEP = 1, 11
QUICK = kernel_contract.CASES[FIRST::STEP]
CASES = [
    pytest.param(case, marks=() if case in QUICK else pytest.mark.long)
    for case in kernel_contract.CASES
]
PALLAS = [case for case in CASES if case.values[0].bits in KERNEL_BITS["pallas"]]
INTERPRETED = types.SimpleNamespace(
    **{
        stage: functools.partial(getattr(pallas, stage), interpret=True)
        for stage in ("send", "reduce", "return_")
    }
)


@pytest.mark.parametrize("case", PALLAS, ids=str)
def test_pallas_interpreted(case):
    kernel_contract.check(INTERPRETED, case)


@pytest.fixture(scope="session")
def triton_failures(request) -> dict:
    """The failure of each case on Triton's interpreter, from one run of it."""
    pytest.importorskip("triton", reason="Triton is not installed")
    chosen = request.config.getoption("-m") or ""
    everything = "long" in chosen or request.config.getoption("--long")
    paths = [
        str(HERE.parent.parent),
        *os.environ.get("PYTHONPATH", "").split(os.pathsep),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    script, some = HERE / "triton_interpreter.py", ("0", "1")
    if not everything:
        some = (str(FIRST), str(STEP))
    command = [sys.executable, "-W", "ignore", str(script), *some]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_interpreted(case, triton_failures):
    failure = triton_failures[str(case)]
    assert failure is None, failure


@pytest.mark.skipif(not has_gpu(), reason="no NVIDIA GPU here")
# Where there is no jax-triton, Pallas' own way to Triton is the way that is left.
@pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)
# jax-triton 0.4, see kernels/triton_call.py.
@pytest.mark.filterwarnings("ignore:input_output_aliases is:DeprecationWarning")
@pytest.mark.parametrize("backend", ["triton", "pallas"])
@pytest.mark.parametrize("case", kernel_contract.CASES, ids=str)
def test_on_the_gpu(case, backend):
    pytest.importorskip("jax_triton", reason="jax-triton is not installed")
    if case.bits not in KERNEL_BITS[backend]:
        pytest.skip(f"{backend} has no kernels for {case.bits} bits")
    module = __import__(f"echo_jax.kernels.{backend}", fromlist=["send"])
    kernel_contract.check(module, case)
