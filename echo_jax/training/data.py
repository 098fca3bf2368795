"""Text as bytes: reading it, holding a part out, drawing batches."""

import pathlib
import sysconfig

import numpy as np
from jaxtyping import Int32, UInt8

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
      The bytes, at most 16 MiB of them.

    Raises:
      ValueError: if there is nothing to read, or it cannot be read.
    """
    root = pathlib.Path(sysconfig.get_path("stdlib")) if path is None else path
    if not root.exists():
        raise ValueError(f"{root} does not exist: give a file or a folder of text.")
    files = [root] if root.is_file() else _text_files(root)
    parts, size = [], 0
    for file in files:
        try:
            parts.append(file.read_bytes())
        except OSError as error:
            raise ValueError(f"{file} cannot be read: {error.strerror}.") from error
        size += len(parts[-1])
        if size >= _MAX_BYTES:
            break
    text = np.frombuffer(b"\n".join(parts)[:_MAX_BYTES], np.uint8)
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


def draw_batch(
    text: Tokens, *, batch_size: int, length: int, seed: int, step: int
) -> Batch:
    """Sequences from random places, a function of seed and step alone.

    Returns:
      ``(batch_size, length + 1)`` token ids: inputs and, shifted by one, targets.
    """
    random = np.random.default_rng((seed, step))
    starts = random.integers(0, text.size - length, size=batch_size)
    return text[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def heldout_batch(text: Tokens, *, batch_size: int, length: int, index: int) -> Batch:
    """Evenly spread sequences of the held-out text, the same for every run."""
    offset = np.arange(index * batch_size, (index + 1) * batch_size)
    starts = (offset * (length + 1) * 7919) % (text.size - length)
    return text[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def _text_files(root: pathlib.Path) -> list[pathlib.Path]:
    """The text files below a folder, in the same order on every machine."""
    return sorted(
        file
        for file in root.rglob("*")
        if file.suffix in _TEXT_SUFFIXES
        and file.is_file()
        and not set(file.relative_to(root).parts[:-1]) & set(_SKIPPED_FOLDERS)
    )
