"""Text to token ids and back, with the tokenizer that came with a checkpoint."""

import os
import pathlib
from collections.abc import Sequence
from typing import Any

from echo_jax.models.gguf import GgufFile
from echo_jax.models.loading import find_gguf

# How GGUF's names for splitting text before the merges are spelled out. The patterns
# are parts of the formats: Qwen's keeps digits apart, Llama 3's takes them in threes.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = {
    "qwen2": _WORDS.format(digits=""),
    "llama-bpe": _WORDS.format(digits="{1,3}"),
}
_CONTROL = 3  # GGUF's type of tokens that are no text


class TextTokenizer:
    """Encodes and decodes with a tokenizer of the ``tokenizers`` package.

    Args:
      tokenizer: a ``tokenizers.Tokenizer``.
      first: ids that go in front of every text.
    """

    def __init__(self, tokenizer: Any, first: Sequence[int] = ()):
        """See the class."""
        self._tokenizer, self._first = tokenizer, list(first)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, and of what goes in front of it.

        Raises:
          ValueError: if the text cannot be written as UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text is not Unicode at character {error.start}: give it as UTF-8."
            ) from error
        return self._first + self._tokenizer.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; tokens that are no text are left out."""
        return self._tokenizer.decode(list(ids))


class TextStream:
    """Turns tokens into text as they come, and never shows half a character.

    Example:
        >>> stream = TextStream(tokenizer)
        >>> for token in tokens:
        ...     print(stream.add(token), end="")
        >>> print(stream.rest())
    """

    def __init__(self, tokenizer: TextTokenizer):
        """See the class."""
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = ""

    def add(self, token: int) -> str:
        """Text that this token completes; empty within a character."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        # The replacement character stands for bytes that wait for others.
        return "" if text.endswith("\N{REPLACEMENT CHARACTER}") else self._show(text)

    def rest(self) -> str:
        """What was held back, at the end."""
        return self._show(self._tokenizer.decode(self._ids))

    def _show(self, text: str) -> str:
        new, self._shown = text[len(self._shown) :], text
        return new


def load_tokenizer(path: str | os.PathLike) -> TextTokenizer:
    """The tokenizer of a checkpoint.

    Args:
      path: a folder with ``tokenizer.json``, or a GGUF file, or a folder with one.

    Raises:
      ValueError: if there is none, it cannot be read, or the ``tokenizers`` package is
        missing.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise ValueError(
            "Reading a tokenizer needs a package: pip install 'echo_jax[hf]'."
        ) from error
    folder = pathlib.Path(path)
    gguf = find_gguf(folder)
    if gguf is not None:
        return _from_gguf(GgufFile(gguf))
    file = folder / "tokenizer.json"
    if not file.exists():
        raise ValueError(
            f"{folder} has no tokenizer.json: copy the one that belongs to the model "
            "there, or call echo_jax.models.generate with token ids."
        )
    try:
        return TextTokenizer(tokenizers.Tokenizer.from_file(str(file)))
    except Exception as error:  # the package raises nothing narrower
        raise ValueError(
            f"{file} cannot be read ({error}): the file may be truncated; copy or "
            "download it again."
        ) from error


def _from_gguf(file: GgufFile) -> TextTokenizer:
    """A byte-level tokenizer from the lists in a GGUF header."""
    import tokenizers

    kind = file.field("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ValueError(
            f"{file.path}: a tokenizer of kind {kind!r} is not supported, 'gpt2' "
            "(byte-level pairs) is; put the model's tokenizer.json and safetensors in "
            "a folder and load that."
        )
    tokens = file.field("tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in file.field("tokenizer.ggml.merges")]
    ids = {token: number for number, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ids, merges))
    tokenizer.pre_tokenizer = _splitter(file)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    types = file.field("tokenizer.ggml.token_type", [])
    tokenizer.add_special_tokens(
        [token for token, kind in zip(tokens, types, strict=False) if kind == _CONTROL]
    )
    begins = bool(file.field("tokenizer.ggml.add_bos_token", False))
    first = [int(file.field("tokenizer.ggml.bos_token_id"))] if begins else []
    return TextTokenizer(tokenizer, first)


def _splitter(file: GgufFile):
    """What cuts a text into words before pairs are merged."""
    from tokenizers import Regex, pre_tokenizers

    name = file.field("tokenizer.ggml.pre", "default")
    if name in ("default", "gpt-2"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name == "smollm":
        first = pre_tokenizers.Digits(individual_digits=True)
        second = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif name in _PATTERNS:
        first = pre_tokenizers.Split(Regex(_PATTERNS[name]), "isolated")
        second = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    else:
        raise ValueError(
            f"{file.path}: the tokenizer splits text by {name!r}, which is not known; "
            "put the model's tokenizer.json and safetensors in a folder and load that."
        )
    return pre_tokenizers.Sequence([first, second])
