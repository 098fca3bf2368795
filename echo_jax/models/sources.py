"""Tensors of a checkpoint, read by name and piece by piece."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from echo_jax.models.checkpoint import read_json
from echo_jax.typing import Shape

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@runtime_checkable
class Source(Protocol):
    """Named matrices in the orientation of Hugging Face: ``[out, in]``."""

    def shape(self, name: str) -> Shape:
        """Shape of a tensor."""
        ...

    def read(self, name: str, index: Sequence[slice]) -> np.ndarray:
        """A piece of a tensor, as stored or dequantized."""
        ...

    def __contains__(self, name: object) -> bool: ...


def dtype_of(source: Source, name: str) -> np.dtype:
    """The dtype of what is read of a tensor."""
    return source.read(name, [slice(0, 1)] * len(source.shape(name))).dtype


class SafetensorsFolder:
    """One or many safetensors files, opened as they are needed."""

    def __init__(self, folder: pathlib.Path):
        """Opens every file, so that a missing or truncated one is found at once."""
        try:
            import safetensors
        except ImportError as error:
            raise ValueError(
                "Reading safetensors needs a package: pip install 'echo_jax[hf]'."
            ) from error
        self._folder = folder
        self._file_of: dict[str, Any] = {}
        weight_map = _weight_map(folder)
        for path in _files(folder, weight_map):
            try:
                file = safetensors.safe_open(str(path), framework="numpy")
            except Exception as error:  # SafetensorError derives from nothing narrower
                raise ValueError(
                    f"{path} cannot be read ({error}): the file may be truncated; copy "
                    "or download it again."
                ) from error
            self._file_of.update(dict.fromkeys(file.keys(), file))
        lost = sorted(set(weight_map) - set(self._file_of))
        if lost:
            raise ValueError(
                f"{folder / INDEX} names {lost[0]} and {len(lost) - 1} more tensors "
                "that no file holds: the checkpoint is incomplete."
            )

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> Shape:
        """Shape of a tensor."""
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, index: Sequence[slice]) -> np.ndarray:
        """A piece of a tensor; nothing else is read from the disk."""
        return self._slice(name)[tuple(index)]

    def _slice(self, name: str):
        return self._file_of[name].get_slice(name)


def _weight_map(folder: pathlib.Path) -> Mapping[str, str]:
    path = folder / INDEX
    entries = read_json(path).get("weight_map", {}) if path.exists() else {}
    is_map = isinstance(entries, dict)
    if not is_map or not all(isinstance(name, str) for name in entries.values()):
        raise ValueError(
            f"{path}: weight_map must name a file for each tensor: copy or download "
            "it again."
        )
    return entries


def _files(folder: pathlib.Path, weight_map: Mapping[str, str]) -> list[pathlib.Path]:
    names = sorted(set(weight_map.values())) if weight_map else [SINGLE]
    paths = [folder / name for name in names]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise ValueError(
            f"{folder} lacks {', '.join(missing)}: it needs {SINGLE}, or {INDEX} with "
            "every file that it names."
        )
    return paths
