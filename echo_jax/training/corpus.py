"""A text cut into tokens once: shards on disk, mapped into memory, with a manifest."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from echo_jax.training.config import DataConfig
from echo_jax.training.data import Batch

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
FORMAT = 1  # of the manifest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of token ids, nothing else in it."""

    file: str  # its name in the folder
    tokens: int  # how many it holds
    sha256: str  # of its bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a folder of ``echo-jax prepare`` holds."""

    format: int  # of this file
    vocab_size: int  # token ids of the tokenizer
    dtype: str  # of the shards: uint16 or uint32, least byte first
    tokenizer_sha256: str  # of tokenizer.json
    text_bytes: dict[str, int]  # UTF-8 bytes of each part
    training: tuple[Shard, ...]
    heldout: tuple[Shard, ...]

    def save(self, folder: pathlib.Path) -> None:
        """Writes the manifest into the folder."""
        text = json.dumps(dataclasses.asdict(self), indent=1) + "\n"
        (folder / MANIFEST).write_text(text)

    @property
    def checksum(self) -> str:
        """Of everything that a batch depends on."""
        text = "\n".join(shard.sha256 for shard in self.training + self.heldout)
        return hashlib.sha256(text.encode()).hexdigest()

    def _check(self) -> None:
        """Refuses what a damaged or hand-made file may hold."""
        if self.dtype not in ("uint16", "uint32") or not _is_count(self.vocab_size):
            raise ValueError(
                f"dtype={self.dtype!r} must be uint16 or uint32 and "
                f"vocab_size={self.vocab_size!r} a number"
            )
        for shard in self.training + self.heldout:
            if not isinstance(shard.file, str) or not _is_count(shard.tokens):
                raise ValueError(f"{shard} names no file and a number of tokens")

    @classmethod
    def load(cls, folder: pathlib.Path) -> "Manifest":
        """Reads the manifest of a folder.

        Raises:
          ValueError: if there is none, or it is of another format.
        """
        path = folder / MANIFEST
        try:
            entries = json.loads(path.read_text())
            if entries["format"] != FORMAT:
                raise ValueError(f"format {entries['format']} is not {FORMAT}")
            for part in ("training", "heldout"):
                entries[part] = tuple(Shard(**shard) for shard in entries[part])
            manifest = cls(**entries)
            manifest._check()
            return manifest
        except (OSError, TypeError, KeyError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{path} is no manifest that echo-jax prepare wrote: {error}. Prepare "
                "the text again."
            ) from error


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


class Corpus:
    """Prepared text as sequences; the shards stay on disk and are read where needed.

    Args:
      folder: what ``echo-jax prepare`` wrote.

    Raises:
      ValueError: if a file is missing, was changed, or holds another tokenizer.
    """

    unit = "token"

    def __init__(self, folder: pathlib.Path):
        """See the class."""
        self.folder = folder
        self.manifest = manifest = Manifest.load(folder)
        self.vocab_size = manifest.vocab_size
        self._check(TOKENIZER, manifest.tokenizer_sha256)
        self._training = [self._open(shard) for shard in manifest.training]
        self._heldout = [self._open(shard) for shard in manifest.heldout]

    @property
    def training_size(self) -> int:
        """Tokens that are trained on."""
        return sum(shard.size for shard in self._training)

    @property
    def checksum(self) -> str:
        """Of everything that a batch depends on."""
        return self.manifest.checksum

    def check(self, sizes: DataConfig) -> None:
        """Refuses sizes of batches that the text is too short for.

        Raises:
          ValueError: naming the part that is too short.
        """
        parts = {"training": self._training, "held-out": self._heldout}
        for name, shards in parts.items():
            if not _starts(shards, sizes.length)[-1]:
                raise ValueError(
                    f"the {name} part of {self.folder} holds no sequence of "
                    f"{sizes.length} tokens: choose a smaller length, or prepare more "
                    "text."
                )

    def batches(self, sizes: DataConfig, *, seed: int, rows: slice) -> Iterator[Batch]:
        """Batches for ever: every sequence once in each epoch, in an order of its own.

        A function of the seed alone, whatever the mesh or the number of processes. The
        iterator is grain's: ``get_state`` and ``set_state`` give and take its place.

        Args:
          sizes: of a batch.
          seed: of the order.
          rows: the part of each batch that this process reads.
        """
        import grain

        shards = self._training
        starts = _starts(shards, sizes.length)
        sequences = grain.MapDataset.range(int(starts[-1])).seed(seed).shuffle()
        batches = sequences.repeat().batch(sizes.batch_size)

        def read(indices: np.ndarray) -> Batch:
            return _read(shards, starts, indices[rows], sizes.length)

        ahead = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
        return iter(batches.map(read).to_iter_dataset(ahead))

    def heldout_batch(self, sizes: DataConfig, *, index: int, rows: slice) -> Batch:
        """One of ``sizes.heldout_batches``, spread evenly over what is held out."""
        starts = _starts(self._heldout, sizes.length)
        total = sizes.heldout_batches * sizes.batch_size
        chosen = np.linspace(0, starts[-1] - 1, total).astype(int)
        chosen = chosen[index :: sizes.heldout_batches]
        return _read(self._heldout, starts, chosen[rows], sizes.length)

    def _open(self, shard: Shard) -> np.ndarray:
        path = self.folder / shard.file
        dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        if path.exists() and path.stat().st_size != shard.tokens * dtype.itemsize:
            raise ValueError(
                f"{path} has {path.stat().st_size:,} bytes, its manifest says "
                f"{shard.tokens * dtype.itemsize:,}: prepare the text again."
            )
        self._check(shard.file, shard.sha256)
        return np.memmap(path, dtype, "r") if shard.tokens else np.zeros(0, dtype)

    def _check(self, file: str, wanted: str) -> None:
        path = self.folder / file
        try:
            found = file_checksum(path)
        except OSError as error:
            raise ValueError(
                f"{path} cannot be read: {error.strerror}. Prepare the text again."
            ) from error
        if found != wanted:
            raise ValueError(
                f"{path} is not what its manifest says (another checksum): it was "
                "changed or damaged. Prepare the text again."
            )


def file_checksum(path: pathlib.Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_corpus(path: pathlib.Path | None) -> bool:
    """Whether a path is a folder with a manifest."""
    return path is not None and (path / MANIFEST).is_file()


def _starts(shards: list[np.ndarray], length: int) -> np.ndarray:
    """How many sequences lie before each shard; last, how many there are."""
    # A sequence ends in the token that follows it, the first of the next one.
    counts = [max(0, shard.size - 1) // length for shard in shards]
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def _read(
    shards: list[np.ndarray], starts: np.ndarray, indices: Any, length: int
) -> Batch:
    """The sequences with these numbers, counted through all shards."""
    batch = np.empty((len(indices), length + 1), np.int32)
    places = np.searchsorted(starts, indices, side="right") - 1
    for row, (index, place) in enumerate(zip(indices, places, strict=True)):
        first = int(index - starts[place]) * length
        batch[row] = shards[place][first : first + length + 1]
    return batch
