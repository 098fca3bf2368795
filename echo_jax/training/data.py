"""Text as bytes: reading it, holding a part out, drawing batches."""

import hashlib
import os
import pathlib
import sysconfig
from typing import Any

import numpy as np
from jaxtyping import Int32, UInt8

from echo_jax.training.config import DataConfig

Tokens = UInt8[np.ndarray, "_"]  # a text, byte by byte
Batch = Int32[np.ndarray, "batch length_plus_1"]

_TEXT_SUFFIXES = (".md", ".py", ".rst", ".txt")
_COMPRESSED = (".bz2", ".gz", ".xz", ".zip", ".zst")
_SKIPPED_FOLDERS = ("idlelib", "lib2to3", "site-packages", "test", "tests")
_MAX_BYTES = 16 << 20
_PIECE_BYTES = 1 << 14
_HELDOUT_EVERY = 16  # one piece of so many is held out


def read_text(path: pathlib.Path | None) -> Tokens:
    """Reads a file, the text files of a folder, or Python's standard library.

    Args:
      path: what to read; None for the source of the standard library, which every
        machine with Python has, and which is cut off after 16 MiB.

    Returns:
      The bytes of the files in the order of their names.

    Raises:
      ValueError: if there is nothing to read, it cannot be read, or it is compressed
        or larger than 16 MiB, which ``echo-jax prepare`` takes.
    """
    root = pathlib.Path(sysconfig.get_path("stdlib")) if path is None else path
    if not root.exists():
        raise ValueError(f"{root} does not exist: give a file or a folder of text.")
    skipped = _SKIPPED_FOLDERS if path is None else ()
    files = [root] if root.is_file() else _text_files(root, skipped)
    instead = f"Prepare it: echo-jax prepare {root} --out FOLDER."
    if root.suffix in _COMPRESSED:
        raise ValueError(
            f"{root} is compressed, and is not read byte by byte. {instead}"
        )
    # One byte more shows that a user's text is longer.
    parts, left = [], _MAX_BYTES + (path is not None)
    for file in files:
        try:
            with file.open("rb") as opened:
                parts.append(opened.read(left))
        except OSError as error:
            raise ValueError(f"{file} cannot be read: {error.strerror}.") from error
        left -= len(parts[-1]) + 1  # and a line end
        if left <= 0:
            break
    text = np.frombuffer(b"\n".join(parts), np.uint8)
    if not text.size:
        raise ValueError(
            f"{root} holds no text: give a file, or a folder with files ending in "
            f"{', '.join(_TEXT_SUFFIXES)}."
        )
    if text.size > _MAX_BYTES:
        raise ValueError(
            f"{root} holds more than the {_MAX_BYTES:,} bytes that are read byte by "
            f"byte. {instead}"
        )
    return text


def split_heldout(text: Tokens, length: int) -> tuple[Tokens, Tokens]:
    """Cuts text into pieces and holds out every 16th.

    Returns:
      ``(training, heldout)``.

    Raises:
      ValueError: if either part would be shorter than one sequence.
    """
    # A short text is cut finer, so that there is a part to hold out.
    piece_bytes = min(_PIECE_BYTES, max(1, text.size // _HELDOUT_EVERY))
    pieces = np.array_split(text, range(piece_bytes, text.size, piece_bytes))
    held = pieces[_HELDOUT_EVERY // 2 :: _HELDOUT_EVERY]
    where = _HELDOUT_EVERY // 2
    kept = [p for i, p in enumerate(pieces) if i % _HELDOUT_EVERY != where]
    parts = (np.concatenate(kept), np.concatenate(held or [text[:0]]))
    if min(part.size for part in parts) < length + 1:
        raise ValueError(
            f"the text has {text.size:,} bytes, too few to hold a sequence of {length} "
            f"out: give at least {_HELDOUT_EVERY * (length + 1):,} or a smaller length."
        )
    return parts


def draw_batch(text: Tokens, *, sizes: DataConfig, seed: int, step: int) -> Batch:
    """Sequences from random places, a function of seed and step alone.

    Returns:
      ``(batch_size, length + 1)`` token ids: inputs and, shifted by one, targets.
    """
    random = np.random.default_rng((seed, step))
    starts = random.integers(0, text.size - sizes.length, size=sizes.batch_size)
    return text[starts[:, None] + np.arange(sizes.length + 1)].astype(np.int32)


def heldout_batch(text: Tokens, *, sizes: DataConfig, index: int) -> Batch:
    """One of ``sizes.heldout_batches``, spread evenly over the text, for every run."""
    total = sizes.heldout_batches * sizes.batch_size
    starts = np.linspace(0, text.size - sizes.length - 1, total).astype(int)
    starts = starts[index :: sizes.heldout_batches]
    return text[starts[:, None] + np.arange(sizes.length + 1)].astype(np.int32)


class ByteText:
    """Text read byte by byte, in memory; batches from random places.

    Args:
      path: what to read, as :func:`read_text` takes it.
      length: of a sequence.

    Raises:
      ValueError: if there is too little text.
    """

    unit = "byte"
    vocab_size = 256

    def __init__(self, path: pathlib.Path | None, length: int):
        """See the class."""
        self.training, self.heldout = split_heldout(read_text(path), length)

    @property
    def training_size(self) -> int:
        """Bytes that are trained on."""
        return self.training.size

    @property
    def checksum(self) -> str:
        """Of everything that a batch depends on."""
        text = self.training.tobytes() + self.heldout.tobytes()
        return hashlib.sha256(text).hexdigest()

    def batches(self, sizes: DataConfig, *, seed: int, rows: slice) -> "ByteBatches":
        """Batches for ever, each a function of the seed and its number alone.

        Args:
          sizes: of a batch.
          seed: of the order.
          rows: the part of each batch that this process reads.
        """
        return ByteBatches(self.training, sizes, seed, rows)

    def heldout_batch(self, sizes: DataConfig, *, index: int, rows: slice) -> Batch:
        """One of ``sizes.heldout_batches``, spread evenly over what is held out."""
        return heldout_batch(self.heldout, sizes=sizes, index=index)[rows]


class ByteBatches:
    """The batches of a :class:`ByteText`, with a place that can be kept."""

    def __init__(self, text: Tokens, sizes: DataConfig, seed: int, rows: slice):
        """See the class."""
        self.text, self.sizes, self.seed, self.rows = text, sizes, seed, rows
        self.step = 0

    def __iter__(self) -> "ByteBatches":
        return self

    def __next__(self) -> Batch:
        batch = draw_batch(self.text, sizes=self.sizes, seed=self.seed, step=self.step)
        self.step += 1
        return batch[self.rows]

    def get_state(self) -> dict[str, Any]:
        """The place, as JSON can hold it."""
        return {"next_index": self.step}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from a place."""
        self.step = state["next_index"]


def _text_files(root: pathlib.Path, skipped: tuple[str, ...]) -> list[pathlib.Path]:
    """The text files below a folder, in the same order on every machine."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped]
        found += [
            pathlib.Path(folder, name)
            for name in names
            if name.endswith(_TEXT_SUFFIXES)
        ]
    return sorted(found)
