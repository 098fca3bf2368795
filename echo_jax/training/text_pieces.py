"""Text of any size, piece by piece, from files that may be packed."""

import dataclasses
import lzma
import pathlib
from collections.abc import Iterator
from io import TextIOBase

PIECE_LENGTH = 1 << 16  # characters in a piece, at most

_SUFFIXES = (".md", ".py", ".rst", ".txt", ".xz")
_BLOCK_LENGTH = 1 << 22  # characters that are read at once


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a document."""

    text: str
    size: int  # in UTF-8 bytes
    is_last: bool  # of its document


def read_pieces(path: pathlib.Path, separator: str | None) -> Iterator[Piece]:
    """The text in pieces of at most 65,536 characters, cut after a line if possible.

    Args:
      path: a file or a folder; ``.xz`` is unpacked, everything else is text.
      separator: what stands between two documents of a file; None: each is one.

    Raises:
      ValueError: if a file cannot be read or is no UTF-8 text.
    """
    for file in text_files(path):
        text, done = "", 0
        try:
            with _open(file) as opened:
                while block := opened.read(_BLOCK_LENGTH):
                    *documents, text = _split(text + block, separator)
                    for document in documents:
                        yield from _cut(document, is_last=True)
                    # A separator of which only a part has been read stays whole.
                    left = len(separator or "")
                    *pieces, last = _cut(text, is_last=False, left=left)
                    yield from pieces
                    text = last.text
                    done += len(block)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{file} is not UTF-8 text: {error.reason}, after {done:,} characters "
                "or more."
            ) from error
        except (OSError, lzma.LZMAError, EOFError) as error:
            raise ValueError(f"{file} cannot be read: {error}.") from error
        yield from _cut(text, is_last=True)


def _split(text: str, separator: str | None) -> list[str]:
    return [text] if separator is None else text.split(separator)


def _cut(document: str, *, is_last: bool, left: int = 0) -> Iterator[Piece]:
    """Pieces of a document; the last one, longer than ``left``, may go on."""
    start = 0
    while len(document) - start > PIECE_LENGTH + left:
        stop = document.rfind("\n", start, start + PIECE_LENGTH) + 1
        stop = stop or start + PIECE_LENGTH
        yield _piece(document[start:stop], is_last=False)
        start = stop
    yield _piece(document[start:], is_last=is_last)


def _piece(text: str, *, is_last: bool) -> Piece:
    return Piece(text, len(text.encode()), is_last)


def text_files(path: pathlib.Path) -> list[pathlib.Path]:
    """The file, or those of a folder, in the same order on every machine.

    Raises:
      ValueError: if there is none.
    """
    if path.is_file():
        return [path]
    if not path.exists():
        raise ValueError(f"{path} does not exist: give a file or a folder of text.")
    found = sorted(p for p in path.rglob("*") if p.suffix in _SUFFIXES and p.is_file())
    if not found:
        raise ValueError(
            f"{path} holds no text: give a file, or a folder with files ending in "
            f"{', '.join(_SUFFIXES)}."
        )
    return found


def _open(file: pathlib.Path) -> TextIOBase:
    if file.suffix == ".xz":
        return lzma.open(file, "rt", encoding="utf-8", newline="")
    return file.open("r", encoding="utf-8", newline="")
