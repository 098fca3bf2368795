"""Text as bytes: reading it, holding a part out, drawing batches."""

import os
import pathlib
import sysconfig

import numpy as np
from jaxtyping import Int32, UInt8

from echo_jax.training.config import DataConfig

Tokens = UInt8[np.ndarray, "_"]  # a text, byte by byte
Batch = Int32[np.ndarray, "batch length_plus_1"]

_TEXT_SUFFIXES = (".md", ".py", ".rst", ".txt")
_SKIPPED_FOLDERS = ("idlelib", "lib2to3", "site-packages", "test", "tests")
_MAX_BYTES = 16 << 20
_PIECE_BYTES = 1 << 14
_HELDOUT_EVERY = 16  # one piece of so many is held out


def read_text(path: pathlib.Path | None) -> Tokens:
    """Reads a file, the text files of a folder, or Python's standard library.

    Args:
      path: what to read; None for the source of the standard library, which every
        machine with Python has.

    Returns:
      The bytes of the files in the order of their names, cut off after 16 MiB.

    Raises:
      ValueError: if there is nothing to read, or it cannot be read.
    """
    root = pathlib.Path(sysconfig.get_path("stdlib")) if path is None else path
    if not root.exists():
        raise ValueError(f"{root} does not exist: give a file or a folder of text.")
    skipped = _SKIPPED_FOLDERS if path is None else ()
    files = [root] if root.is_file() else _text_files(root, skipped)
    parts, left = [], _MAX_BYTES
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
