"""``echo-jax prepare``: text to tokens, once, before training."""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

import numpy as np

from echo_jax.files import Claim
from echo_jax.training.corpus import (
    FORMAT,
    MANIFEST,
    TOKENIZER,
    Manifest,
    Shard,
    file_checksum,
)
from echo_jax.training.text_pieces import PIECE_LENGTH, Piece, read_pieces, text_files

Progress = Callable[[str, int, int], None]  # stage, bytes done, bytes in all

END_OF_TEXT = "<|endoftext|>"
_PIECES_AT_ONCE = 64  # encoded in parallel
_MOST_TOKENS = 1 << 24  # the trainer reserves memory for all, and aborts without it


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """How a text is cut into tokens and shards."""

    vocab_size: int = 16_384  # of the tokenizer that is trained
    tokenizer: pathlib.Path | None = None  # a tokenizer.json to use instead
    separator: str | None = None  # text between two documents of a file
    heldout_every: int = 64  # one piece of so many is held out
    tokenizer_bytes: int = 64 << 20  # of text, spread evenly, that train a tokenizer
    shard_tokens: int = 1 << 26  # tokens in a file, at most

    def __post_init__(self):
        if not 257 <= self.vocab_size <= _MOST_TOKENS:
            raise ValueError(
                f"vocab_size={self.vocab_size} must be at least 257, every byte and "
                f"{END_OF_TEXT}, and at most {_MOST_TOKENS:,}."
            )
        for name, least in (
            ("heldout_every", 2),
            ("tokenizer_bytes", 1),
            ("shard_tokens", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be at least {least}."
                )
        if self.separator == "":
            raise ValueError("separator='' separates nothing: leave it out.")


def write_corpus(
    path: pathlib.Path,
    out: pathlib.Path,
    *,
    config: PrepareConfig = PrepareConfig(),
    progress: Progress = lambda *_: None,
) -> Manifest:
    """Trains or loads a tokenizer and writes the text as token shards.

    The folder appears when everything in it is complete and on disk; until then its
    parts are in a folder beside it, which an error or Ctrl-C removes. The text is read
    three times (twice with a tokenizer), piece by piece: it may be larger than memory.

    Args:
      path: a file (``.xz``, any other as text), or a folder of text and ``.xz`` files.
      out: the folder to make.
      config: tokenizer, shards, what is held out.
      progress: called with a stage, the bytes it has done, and all bytes.

    Returns:
      The manifest of the folder.

    Raises:
      ValueError: if there is nothing to read, it is no UTF-8, or ``out`` exists.
    """
    if out.exists():
        raise ValueError(f"{out} exists: choose another folder, or remove it.")
    total, pieces = _measure(path, config, progress)
    if pieces < 2:
        raise ValueError(
            f"{path} holds {total:,} bytes of text, too few to hold a part out: give "
            f"more than {PIECE_LENGTH:,}."
        )
    partial = out.with_name(f".{out.name}.partial")
    with _removed_on_error(partial):
        tokenizer = _tokenizer(path, config, total, progress)
        text = tokenizer.to_str(pretty=True)
        (partial / TOKENIZER).write_text(text, encoding="utf-8")
        manifest = _encode(path, partial, tokenizer, config, _Count(total, progress))
        manifest.save(partial)
        _sync(partial)
        partial.rename(out)
    return manifest


class _Count:
    """Bytes done of a stage, for the progress bar."""

    def __init__(self, total: int, progress: Progress):
        self.total, self.progress, self.done = total, progress, 0

    def add(self, stage: str, size: int) -> None:
        self.done += size
        self.progress(stage, self.done, self.total)


def _measure(path: pathlib.Path, config: PrepareConfig, progress: Progress):
    """Reads everything once: bytes and pieces; what cannot be read is found now."""
    size = sum(file.stat().st_size for file in text_files(path))
    total = pieces = 0
    for piece in read_pieces(path, config.separator):
        total, pieces = total + piece.size, pieces + (piece.size > 0)
        progress("reading", total, max(size, total))
    return total, pieces


def _tokenizer(path, config: PrepareConfig, total: int, progress: Progress):
    """The tokenizer of a file, or one trained on what is not held out."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if config.tokenizer is not None:
        try:
            loaded = Tokenizer.from_file(str(config.tokenizer))
        except Exception as error:  # the library raises no other kind
            raise ValueError(
                f"{config.tokenizer} is no tokenizer.json: {error}."
            ) from error
        if loaded.token_to_id(END_OF_TEXT) is None:
            loaded.add_special_tokens([END_OF_TEXT])
        # Settings for batches of a model's inputs, which would cut the pieces of text.
        loaded.no_truncation()
        loaded.no_padding()
        return loaded
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    every = -(-total // config.tokenizer_bytes)
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    count = _Count(min(total, config.tokenizer_bytes), progress)

    def sample() -> Iterator[str]:
        kept = (p for p, held in _held(path, config) if not held)
        for piece in itertools.islice(kept, 0, None, every):
            count.add("tokenizer", piece.size)
            yield piece.text

    tokenizer.train_from_iterator(sample(), trainer)
    return tokenizer


def _held(path: pathlib.Path, config: PrepareConfig) -> Iterator[tuple[Piece, bool]]:
    """Every piece that holds text, and whether it is held out."""
    pieces = (p for p in read_pieces(path, config.separator) if p.size)
    for index, piece in enumerate(pieces):
        # A text of few pieces has a held-out part too.
        yield piece, index % config.heldout_every == 1


def _encode(path, folder, tokenizer, config: PrepareConfig, count: _Count) -> Manifest:
    """Writes the shards of both parts."""
    tokenizer.encode_special_tokens = True  # in the text they are text
    vocab = 1 + max(tokenizer.get_vocab().values())
    dtype = np.dtype("<u2" if vocab <= 1 << 16 else "<u4")
    end = tokenizer.token_to_id(END_OF_TEXT)
    names = ("training", "heldout")
    writers = {n: _ShardWriter(folder, n, dtype, config.shard_tokens) for n in names}
    sizes = dict.fromkeys(names, 0)
    with contextlib.ExitStack() as stack:
        for writer in writers.values():
            stack.enter_context(writer)
        for group in _groups(_held(path, config), _PIECES_AT_ONCE):
            texts = [piece.text for piece, _ in group]
            encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            for (piece, held), encoding in zip(group, encoded, strict=True):
                part = names[held]
                writers[part].write(encoding.ids + [end] * piece.is_last)
                sizes[part] += piece.size
                count.add("encoding", piece.size)
    return Manifest(
        format=FORMAT,
        vocab_size=vocab,
        dtype=dtype.name,
        tokenizer_sha256=file_checksum(folder / TOKENIZER),
        text_bytes=sizes,
        training=writers["training"].shards(),
        heldout=writers["heldout"].shards(),
    )


class _ShardWriter:
    """Token ids into numbered files of a limited length."""

    def __init__(self, folder: pathlib.Path, name: str, dtype: np.dtype, limit: int):
        self.folder, self.name, self.dtype, self.limit = folder, name, dtype, limit
        self.counts: list[int] = []
        self.file: BinaryIO | None = None

    def __enter__(self) -> "_ShardWriter":
        return self

    def __exit__(self, *error) -> None:
        if self.file is not None:
            self.file.close()

    def write(self, ids: list[int]) -> None:
        array = np.asarray(ids, self.dtype)
        while array.size:
            file = self._file_with_room()
            part = array[: self.limit - self.counts[-1]]
            file.write(part.tobytes())
            self.counts[-1] += part.size
            array = array[part.size :]

    def shards(self) -> tuple[Shard, ...]:
        files = [self._path(index) for index in range(len(self.counts))]
        return tuple(
            Shard(file=file.name, tokens=tokens, sha256=file_checksum(file))
            for file, tokens in zip(files, self.counts, strict=True)
        )

    def _file_with_room(self) -> BinaryIO:
        if self.file is not None and self.counts[-1] < self.limit:
            return self.file
        if self.file is not None:
            self.file.close()
        self.file = self._path(len(self.counts)).open("wb")
        self.counts.append(0)
        return self.file

    def _path(self, index: int) -> pathlib.Path:
        return self.folder / f"{self.name}-{index:05}.bin"


def _groups(items: Iterable, size: int) -> Iterator[list]:
    items = iter(items)
    while group := list(itertools.islice(items, size)):
        yield group


@contextlib.contextmanager
def _removed_on_error(folder: pathlib.Path):
    """A fresh folder that does not outlive an error, or what a killed run left."""
    folder.mkdir(parents=True, exist_ok=True)
    with Claim(folder):  # else two processes would mix their files
        for file in folder.iterdir():
            file.unlink()
        try:
            yield
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError) and error.filename is None:  # a full disk
                raise OSError(error.errno, error.strerror, str(folder)) from error
            raise


def _sync(folder: pathlib.Path) -> None:
    """Waits until the files are on disk, the manifest last."""
    files = sorted(folder.iterdir(), key=lambda file: file.name == MANIFEST)
    for file in [*files, folder]:
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
