"""Settings that must come before JAX is imported, and what tests share."""

import atexit
import os
import pathlib
import shutil
import tempfile

import hypothesis
import jaxtyping
import pytest

# Eight virtual CPU devices on few cores dead-lock in XLA's thread pool when several
# executions are in flight; more threads than devices avoid it.
os.environ.setdefault("NPROC", "16")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_DEVICES = "--xla_force_host_platform_device_count"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=8".strip()

# The same small programs are compiled again and again, by tests, by workers and by the
# programs that tests start: they share what is compiled, for the time of this run.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _COMPILED = tempfile.mkdtemp(prefix="echo-jax-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _COMPILED
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    atexit.register(shutil.rmtree, _COMPILED, ignore_errors=True)

import jax  # noqa: E402  the settings above are read on import

# Every annotated shape and dtype of the package is checked while tests run.
jaxtyping.install_import_hook("echo_jax", "beartype.beartype")

hypothesis.settings.register_profile(
    "echo", derandomize=True, deadline=None, max_examples=25, database=None
)
hypothesis.settings.load_profile("echo")


# Where what XLA's optimizations do to the codec is tested. Elsewhere programs are built
# without most of them, by the programs that tests start too: most of the time of a test
# goes into compiling.
_OPTIMIZED = {"collectives", "kernels", "wire"}
_UNOPTIMIZED = "JAX_DISABLE_MOST_OPTIMIZATIONS"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Before the fixtures, which compile as well."""
    folder = item.path.relative_to(pathlib.Path(__file__).parent).parts[0]
    quick = folder not in _OPTIMIZED
    os.environ[_UNOPTIMIZED] = str(int(quick))
    jax.config.update(_UNOPTIMIZED.lower(), quick)


def pytest_addoption(parser):
    parser.addoption(
        "--long", action="store_true", help="run the tests marked long as well"
    )


def pytest_collection_modifyitems(config, items):
    """Leaves the long tests out unless ``--long`` or ``-m`` asks for them."""
    if config.getoption("--long") or config.getoption("-m"):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


@pytest.fixture(scope="session")
def mesh8():
    """All eight devices on one axis, ``tp``."""
    from tests.ranks import mesh

    return mesh(tp=8)


@pytest.fixture(scope="session")
def mesh2x4():
    """Two data ranks times four tensor ranks."""
    from tests.ranks import mesh

    return mesh(dp=2, tp=4)


@pytest.fixture(scope="session")
def mesh2x2x2():
    """Pipeline, data and tensor axes of two each."""
    from tests.ranks import mesh

    return mesh(pp=2, dp=2, tp=2)


@pytest.fixture
def as_shipped():
    """The library as users run it, so that its own messages are what is tested."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
