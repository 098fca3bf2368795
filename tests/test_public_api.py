import doctest
import inspect
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import echo_jax as echo
from tests.ranks import draw, on_ranks

PUBLIC = {
    name: value
    for name, value in vars(echo).items()
    if not name.startswith("_") and not inspect.ismodule(value)
}
# Aliases of jaxtyping arrays cannot carry documentation of their own.
DOCUMENTED = {name: value for name, value in PUBLIC.items() if name != "Payload"}
CLASSES = {name: value for name, value in DOCUMENTED.items() if inspect.isclass(value)}


def test_the_documented_names_are_there():
    assert set(PUBLIC) >= {
        "DepthPlan",
        "EchoConfig",
        "Payload",
        "Residual",
        "WireFormat",
        "dequantize",
        "echo_all_gather",
        "echo_psum",
        "echo_psum_scatter",
        "echo_pvary",
        "error_bound",
        "explain",
        "flush",
        "init_residual",
        "quantize",
        "wire_bytes",
    }


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_public_name_is_documented(name):
    text = inspect.getdoc(PUBLIC[name])
    assert text
    # Not the signature that dataclasses write by themselves.
    assert not text.startswith(f"{name}(")
    assert len(text.splitlines()[0]) > 10


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_method_is_documented(name):
    for attribute, value in vars(CLASSES[name]).items():
        callable_or_property = inspect.isroutine(value) or isinstance(
            value, property | classmethod | staticmethod
        )
        if not attribute.startswith("_") and callable_or_property:
            assert inspect.getdoc(getattr(CLASSES[name], attribute)), attribute


@pytest.mark.parametrize(
    "name", [n for n, v in DOCUMENTED.items() if inspect.isfunction(v)]
)
def test_functions_document_arguments_results_errors_and_an_example(name):
    text = inspect.getdoc(PUBLIC[name])
    for section in ("Args:", "Returns:", "Raises:", "Example:"):
        assert section in text
    for parameter in inspect.signature(PUBLIC[name]).parameters:
        assert f"  {parameter}: " in text


def _run_examples(name, **names):
    """Runs the examples in a docstring; returns how many lines there were."""
    parser = doctest.DocTestParser()
    names = {"echo": echo, "jax": jax, "jnp": jnp, **PUBLIC, **names}
    test = parser.get_doctest(inspect.getdoc(PUBLIC[name]), names, name, None, 0)
    output: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=output.append)
    assert not output, "".join(output)
    return len(test.examples)


PURE = (
    "DepthPlan",
    "EchoConfig",
    "WireFormat",
    "dequantize",
    "error_bound",
    "explain",
    "quantize",
    "wire_bytes",
)
WITH_RANKS = (
    "echo_all_gather",
    "echo_psum",
    "echo_psum_scatter",
    "flush",
    "init_residual",
)


@pytest.mark.parametrize("name", PURE)
def test_examples_of_pure_functions_print_what_they_say(name):
    assert _run_examples(name, x=jnp.asarray(draw(0, 3, 100))) > 0


@pytest.mark.parametrize("name", WITH_RANKS)
def test_examples_of_collectives_run_on_ranks(name):
    config = echo.EchoConfig(min_bytes=0)
    ran = []

    def body(x):
        residual = echo.init_residual(x, "tp", config=config)
        ran.append(_run_examples(name, x=x, residual=residual, config=config))
        return x

    on_ranks(body)(draw(0, 4, 8, 64))
    assert ran[0] > 0


_IMPORT = """
import sys, time
start = time.process_time()
import echo_jax
seconds = time.process_time() - start
heavy = ["flax", "optax", "orbax", "matplotlib", "triton", "jax_triton", "rich", "tyro"]
print(seconds, [name for name in heavy if name in sys.modules])
"""

_NO_DEVICE = """
import echo_jax, jax
config = echo_jax.EchoConfig(format=echo_jax.WireFormat(bits=8))
echo_jax.explain((8, 64), "bfloat16", 8, config)
echo_jax.DepthPlan.edges(config, num_calls=8).backward[0]
echo_jax.error_bound(config.format, ranks=8)
try:
    jax.devices()
except RuntimeError:
    print("untouched")
"""


def _python(code: str, **environment: str) -> str:
    """Runs code in an interpreter of its own that finds this package first."""
    root = str(pathlib.Path(echo.__file__).parents[1])
    paths = [root, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_import_is_quick_and_light():
    """Processor time, best of three, so that other work does not count."""
    outputs = [_python(_IMPORT).split(" ", 1) for _ in range(3)]
    assert min(float(seconds) for seconds, _ in outputs) < 1.5
    assert {heavy for _, heavy in outputs} == {"[]"}


def test_import_and_questions_touch_no_device():
    """On a platform that does not exist any use of a device fails."""
    assert _python(_NO_DEVICE, JAX_PLATFORMS="none_such") == "untouched"


def test_import_changes_no_flag_or_environment_variable():
    code = """
import os, jax, warnings
before = (dict(os.environ), dict(jax.config.values), list(warnings.filters))
import echo_jax
print(before == (dict(os.environ), dict(jax.config.values), list(warnings.filters)))
"""
    assert _python(code) == "True"
