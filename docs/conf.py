"""Sphinx configuration; also makes what is generated: results, plots, pictures."""

import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import pictures  # noqa: E402
import results  # noqa: E402

import echo_jax  # noqa: E402

project = "echo_jax"
author = "The echo_jax Authors"
copyright = f"2026, {author}"
release = version = echo_jax.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
]
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"echo_jax {release}"

# Shapes as types read badly in signatures; the text of each argument says them.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "exclude-members": "__new__, __init__"}
napoleon_google_docstring = True
napoleon_numpy_docstring = False

GENERATED = HERE / "generated"
results.write_page(HERE.parent / "experiments" / "results", GENERATED / "results.md")
pictures.write_all(HERE.parent / "experiments" / "results", GENERATED)
