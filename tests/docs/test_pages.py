"""The documentation names everything public, and its code runs."""

import importlib
import inspect
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
MODULES = ("echo_jax", "echo_jax.wire", "echo_jax.layers", "echo_jax.models")
MODULES += ("echo_jax.evaluation", "echo_jax.training")
# Written where they are re-exported.
_ELSEWHERE = {"echo_jax.wire": {"ErrorBound", "WireFormat", "error_bound"}}


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_in_the_reference(module):
    text = (DOCS / "api.md").read_text()
    listed = set(re.findall(r"auto\w+:: ([\w.]+)", text))
    for name, value in vars(importlib.import_module(module)).items():
        if name.startswith("_") or inspect.ismodule(value):
            continue
        if name not in _ELSEWHERE.get(module, ()):
            assert f"{module}.{name}" in listed


def test_every_listed_name_exists_and_is_documented():
    text = (DOCS / "api.md").read_text()
    for path in re.findall(r"auto(?:function|class):: ([\w.]+)", text):
        module, _, name = path.rpartition(".")
        assert inspect.getdoc(getattr(importlib.import_module(module), name)), path


def run(code: str) -> str:
    environment = {**os.environ, "NPROC": "16", "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = str(ROOT)
    environment.pop("XLA_FLAGS", None)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def code_of(page: str) -> str:
    return "\n".join(
        re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    )


def test_quickstart_shows_that_errors_cancel():
    one, two, rest = (
        line.split()[-1] for line in run(code_of("quickstart.md")).splitlines()
    )
    assert float(two) < float(one)
    # Residuals are kept in bfloat16: what the first call owed lost up to 1/512.
    assert float(rest) < 1e-3


def test_how_to_wrap_ends_with_small_errors():
    output, gradient, path = run(code_of("howto/wrap.md")).splitlines()
    assert 0 < float(output.split()[-1]) < 0.1
    assert 0 < float(gradient.split()[-1]) < 0.3
    assert path.startswith("echo on the")


def test_ten_lines_are_enough():
    """What the how-to adds to the model is what it promises."""
    exact, ours = re.findall(
        r"@functools.partial\(.*?\n```", (DOCS / "howto/wrap.md").read_text(), re.DOTALL
    )
    added = set(ours.splitlines()) - set(exact.splitlines())
    assert len(added) <= 10


@pytest.mark.parametrize("page", ["howto/choose.md", "howto/train.md"])
def test_code_of_how_tos_runs(page):
    assert run(code_of(page))


def test_readme_wire_table_is_right():
    from echo_jax import WireFormat

    text = (DOCS / "wire_format.md").read_text()
    rows = re.findall(
        r"^\| (\d+) \| (\d+) \| (\d+) \| ([\d.]+) \|$", text, re.MULTILINE
    )
    assert len(rows) == 6
    for bits, block, size, per_value in rows:
        fmt = WireFormat(bits=int(bits), block_size=int(block))
        assert fmt.block_bytes == int(size)
        assert fmt.bits_per_value == float(per_value)
