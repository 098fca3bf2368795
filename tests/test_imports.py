"""The layers of the package: each imports only from those before it."""

import ast
import pathlib

import echo_jax

ROOT = pathlib.Path(echo_jax.__file__).parent

ORDER = (
    "typing",
    "axes",
    "platform",
    "batching",
    "files",
    "wire",
    "config",
    "kernels",
    "residual",
    "collectives",
    "bit_budget",
    "plan",
    "layers",
    "models",
    "records",
    "devices",
    "evaluation",
    "training",
    "benchmark",
    "benchmark_model",
    "cost_model",
    "cli_output",
    "cli_advise",
    "cli_model",
    "cli_bench",
    "cli_evaluate",
    "cli",
)


def _imports():
    """``(file, modules)`` of every file, imports inside functions included."""
    for path in sorted(ROOT.rglob("*.py")):
        modules = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}: relative import"
                modules |= {f"{node.module}.{alias.name}" for alias in node.names}
        yield path.relative_to(ROOT), modules


def _layer(path: pathlib.Path) -> str:
    return path.parts[0].removesuffix(".py")


def _layers_of(modules) -> set[str]:
    return {
        module.split(".")[1] for module in modules if module.startswith("echo_jax.")
    }


def test_every_file_belongs_to_a_layer():
    tops = {_layer(path) for path, _ in _imports()}
    assert tops - {"__init__", "__main__"} <= set(ORDER)


def test_each_layer_imports_only_from_those_before_it():
    for path, modules in _imports():
        layer = _layer(path)
        if layer in ("__init__", "__main__"):
            continue
        allowed = set(ORDER[: ORDER.index(layer) + 1])
        assert _layers_of(modules) <= allowed, path


def test_the_wire_knows_no_ranks():
    for path, modules in _imports():
        if _layer(path) != "wire":
            continue
        assert _layers_of(modules) <= {"typing", "wire"}, path
        source = (ROOT / path).read_text()
        assert "axis_name" not in source, path
        for collective in ("psum", "all_to_all", "all_gather", "axis_index"):
            assert f"lax.{collective}" not in source, path


def test_collectives_know_no_bit_layout():
    """They hand a format on, and cut and join whole blocks; nothing below that."""
    for path, modules in _imports():
        if _layer(path) != "collectives":
            continue
        for hidden in ("packing", "quantizer"):
            assert not any(hidden in module for module in modules), path


def test_residual_and_kernels_know_no_collective():
    for path, modules in _imports():
        if _layer(path) in ("residual", "kernels"):
            assert "collectives" not in _layers_of(modules), path


def test_the_package_init_only_re_exports():
    for path, _ in _imports():
        if path.name != "__init__.py":
            continue
        for node in ast.parse((ROOT / path).read_text()).body:
            is_docstring = isinstance(node, ast.Expr) and isinstance(
                node.value, ast.Constant
            )
            is_constant = isinstance(node, ast.Assign) and isinstance(
                node.value, ast.Constant | ast.List | ast.Tuple
            )
            is_import = isinstance(node, ast.Import | ast.ImportFrom)
            assert is_docstring or is_constant or is_import, path


def test_only_public_names_of_jax_are_imported():
    for path, modules in _imports():
        assert not any("jax._src" in module for module in modules), path
