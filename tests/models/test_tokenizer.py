import json

import pytest

from echo_jax.models import load_tokenizer
from echo_jax.models.tokenizer import TextStream
from tests.models.checkpoints import FIXTURES
from tests.models.test_loading import truncate, write_gguf

TEXTS = ["import numpy as np", "", "ünïcødé 中文 🎉", "a\n\n  b\tc", "2026"]


@pytest.mark.parametrize("text", TEXTS)
def test_texts_come_back(text):
    tokenizer = load_tokenizer(FIXTURES / "qwen3")
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_shows_whole_characters_alone(text):
    tokenizer = load_tokenizer(FIXTURES / "qwen3")
    stream = TextStream(tokenizer)
    parts = [stream.add(token) for token in tokenizer.encode(text)]
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)
    assert "".join(parts) == text
    assert stream.rest() == ""


def test_a_stream_shows_at_the_end_what_it_held_back():
    tokenizer = load_tokenizer(FIXTURES / "qwen3")
    stream = TextStream(tokenizer)
    first = tokenizer.encode("🎉")[0]
    assert stream.add(first) == ""
    assert stream.rest() == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("text", TEXTS)
def test_gguf_brings_the_same_tokenizer(text, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", "llama_linear")
    ids = load_tokenizer(path).encode(text)
    assert ids == load_tokenizer(FIXTURES / "qwen3").encode(text)


@pytest.mark.parametrize("text", ["import numpy as np", "ünïcødé 中文", "a\n\n  b"])
@pytest.mark.parametrize("name", ["qwen2", "llama-bpe", "smollm"])
def test_ways_of_splitting_lose_nothing(name, text, tmp_path, monkeypatch):
    import gguf

    monkeypatch.setattr(
        gguf.GGUFWriter,
        "add_tokenizer_pre",
        lambda self, _: self.add_string("tokenizer.ggml.pre", name),
    )
    tokenizer = load_tokenizer(write_gguf(tmp_path / "model.gguf", "llama_linear"))
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.usefixtures("as_shipped")
def test_missing_and_broken_tokenizers(tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer.json: copy the one"):
        load_tokenizer(FIXTURES / "llama")
    with pytest.raises(ValueError, match="does not exist"):
        load_tokenizer(tmp_path / "missing")
    (tmp_path / "config.json").write_text(json.dumps({}))
    text = (FIXTURES / "qwen3" / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text)
    truncate(tmp_path / "tokenizer.json", 0.5)
    with pytest.raises(ValueError, match="cannot be read"):
        load_tokenizer(tmp_path)
