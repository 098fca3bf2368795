"""A model on a mesh, back into a folder as Hugging Face writes it."""

import json
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from echo_jax.layers.partitioning import Params
from echo_jax.models.checkpoint import config_dict
from echo_jax.models.layout import Path, param_layouts
from echo_jax.models.loading import LoadedModel
from echo_jax.models.sources import INDEX, SINGLE

_KEPT_FILES = (
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


def save(
    path: str | os.PathLike, model: LoadedModel, *, max_shard_bytes: int = 5 << 30
) -> None:
    """Writes a folder that transformers and :func:`load` read back, value for value.

    Padding is left out. The tokenizer's files are copied where the model's own folder
    has them. One shard at a time is held in memory.

    Args:
      path: a folder, made if need be; one that holds a model already is refused.
      model: from :func:`load`.
      max_shard_bytes: largest file, unless one tensor is larger.

    Raises:
      ValueError: if the folder holds a model, or another process holds a part of the
        parameters.
    """
    folder = pathlib.Path(path)
    if (folder / "config.json").exists():
        raise ValueError(f"{folder} holds a model already: choose another folder.")
    if not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(model.params)):
        raise ValueError(
            "save needs every part of the parameters in this process; load the model "
            "on a mesh of one process to convert it."
        )
    folder.mkdir(parents=True, exist_ok=True)
    _write_shards(folder, _tensors(model), max_shard_bytes)
    text = json.dumps(config_dict(model.checkpoint), indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    for name in _KEPT_FILES:
        if model.path is not None and (model.path / name).exists():
            shutil.copyfile(model.path / name, folder / name)


def _tensors(model: LoadedModel) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of a checkpoint, without padding."""
    layouts = param_layouts(model.placement)
    for path, layout in layouts.items():
        param = _leaf(model.params, path)
        if not layout.is_stacked:
            yield layout.name, layout.write(np.asarray(param))
            continue
        for layer in range(param.shape[0]):
            yield layout.tensor(layer), layout.write(np.asarray(param[layer]))


def _leaf(params: Params, path: Path) -> jax.Array:
    node: Any = params
    for key in path:
        node = node[key]
    return node


def _write_shards(
    folder: pathlib.Path, tensors: Iterator[tuple[str, np.ndarray]], limit: int
) -> None:
    """Files of at most ``limit`` bytes; an index if there is more than one."""
    from safetensors.numpy import save_file

    shards: list[list[str]] = []
    total = 0
    # How many files there will be, which is part of their names, is known at the end.
    for number, shard in enumerate(_shards(tensors, limit), start=1):
        part = folder / f"part-{number}.safetensors"
        save_file(shard, part, metadata={"format": "pt"})
        shards.append(list(shard))
        total += sum(tensor.nbytes for tensor in shard.values())
        shard.clear()  # else it would be held while the next one is gathered
    count = len(shards)
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        final = f"model-{number:05}-of-{count:05}.safetensors" if count > 1 else SINGLE
        (folder / f"part-{number}.safetensors").rename(folder / final)
        weight_map |= dict.fromkeys(names, final)
    if count > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True)
        (folder / INDEX).write_text(text + "\n", encoding="utf-8")


def _shards(
    tensors: Iterator[tuple[str, np.ndarray]], limit: int
) -> Iterator[dict[str, np.ndarray]]:
    """Neighbouring tensors that fit into one file; a larger tensor alone in its own."""
    shard: dict[str, np.ndarray] = {}
    held = 0
    for name, tensor in tensors:
        if shard and held + tensor.nbytes > limit:
            yield shard
            shard, held = {}, 0
        shard[name] = tensor
        held += tensor.nbytes
    if shard:
        yield shard
