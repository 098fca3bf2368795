"""The committed checkpoints and what transformers computes with them."""

import functools
import pathlib
import shutil

import jax
import numpy as np
from jax.sharding import AxisType

import echo_jax as echo
from echo_jax import models

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
NAMES = ("qwen3", "llama", "llama_linear")
PROMPTS = 5

EXACT = echo.DepthPlan.uniform(echo.EchoConfig().exact())
FOUR_BITS = echo.DepthPlan.uniform(echo.EchoConfig(min_bytes=0))


def tensor_mesh(ranks: int):
    devices = jax.devices()[:ranks]
    return jax.make_mesh(
        (ranks,), ("tensor",), axis_types=(AxisType.Auto,), devices=devices
    )


@functools.cache
def loaded(name: str, ranks: int) -> models.LoadedModel:
    """Shared between tests, and with it what is compiled."""
    return models.load(FIXTURES / name, tensor_mesh(ranks))


@functools.cache
def reference(name: str) -> dict[str, np.ndarray]:
    with np.load(FIXTURES / name / "reference.npz") as file:
        return dict(file)


def prompts(name: str) -> list[list[int]]:
    return [reference(name)[f"prompt_{i}"].tolist() for i in range(PROMPTS)]


def greedy(name: str) -> list[list[int]]:
    return [reference(name)[f"greedy_{i}"].tolist() for i in range(PROMPTS)]


def copy_of(name: str, folder: pathlib.Path) -> pathlib.Path:
    """A copy that a test may spoil."""
    return pathlib.Path(shutil.copytree(FIXTURES / name, folder / name))
