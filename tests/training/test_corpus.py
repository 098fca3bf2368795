import collections
import dataclasses
import json
import lzma
import pathlib
import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer

from echo_jax.files import Claim
from echo_jax.models import DecoderConfig
from echo_jax.training import (
    Corpus,
    DataConfig,
    PrepareConfig,
    TrainConfig,
    prepare,
    write_corpus,
)
from echo_jax.training.prepare_text import END_OF_TEXT
from echo_jax.training.text_pieces import PIECE_LENGTH, read_pieces

SMALL = PrepareConfig(vocab_size=300, heldout_every=4)
SIZES = DataConfig(batch_size=4, length=32, heldout_batches=3)
ALL = slice(0, 4)


def text_of(size: int, seed: int = 0) -> str:
    """Words from a small list, in lines."""
    words = "an old house stood near the green hill über naïve 水 \t"
    words = words.split(" ")
    draw = np.random.default_rng(seed)
    chosen = draw.integers(0, len(words), size // 4)
    lines = (
        " ".join(words[i] for i in chosen[at : at + 9])
        for at in range(0, chosen.size, 9)
    )
    return "\n".join(lines)[:size]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    (root / "book.txt").write_text(text_of(5 * PIECE_LENGTH))
    write_corpus(root / "book.txt", root / "corpus", config=SMALL)
    return root / "corpus"


@pytest.fixture(scope="module")
def corpus(folder):
    return Corpus(folder)


def tokens_of(folder, part):
    manifest = json.loads((folder / "manifest.json").read_text())
    files = [folder / shard["file"] for shard in manifest[part]]
    return np.concatenate([np.fromfile(file, manifest["dtype"]) for file in files])


def test_tokens_decode_to_the_text(folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = (folder.parent / "book.txt").read_text()
    pieces = [p.text for p in read_pieces(folder.parent / "book.txt", None)]
    assert "".join(pieces) == text
    kept = tokenizer.decode(tokens_of(folder, "training"), skip_special_tokens=True)
    held = tokenizer.decode(tokens_of(folder, "heldout"), skip_special_tokens=True)
    assert held == "".join(pieces[1::4])
    assert kept == "".join(p for i, p in enumerate(pieces) if i % 4 != 1)


def test_the_end_of_a_document_is_marked_once(folder):
    end = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(END_OF_TEXT)
    both = [tokens_of(folder, part) for part in ("training", "heldout")]
    assert sum((tokens == end).sum() for tokens in both) == 1


def test_the_manifest_counts_what_is_there(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    text = (folder.parent / "book.txt").read_bytes()
    assert sum(manifest["text_bytes"].values()) == len(text)
    assert manifest["vocab_size"] == 300
    for part in ("training", "heldout"):
        total = sum(shard["tokens"] for shard in manifest[part])
        assert total == tokens_of(folder, part).size > 0
    assert not list(folder.parent.glob(".*partial"))


def test_a_tokenizer_that_cuts_and_pads_inputs_does_neither_to_a_text(tmp_path, folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=1 << 16)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = dataclasses.replace(SMALL, tokenizer=tmp_path / "tokenizer.json")
    write_corpus(folder.parent / "book.txt", tmp_path / "out", config=config)
    for part in ("training", "heldout"):
        np.testing.assert_array_equal(
            tokens_of(tmp_path / "out", part), tokens_of(folder, part)
        )


def test_shards_are_cut_at_their_limit(tmp_path, folder):
    config = dataclasses.replace(SMALL, shard_tokens=10_000)
    tokenizer = folder / "tokenizer.json"
    config = dataclasses.replace(config, tokenizer=tokenizer)
    write_corpus(folder.parent / "book.txt", tmp_path / "cut", config=config)
    sizes = [s.tokens for s in Corpus(tmp_path / "cut").manifest.training]
    assert len(sizes) > 3
    assert set(sizes[:-1]) == {10_000}
    np.testing.assert_array_equal(
        tokens_of(tmp_path / "cut", "training"), tokens_of(folder, "training")
    )
    # Sequences do not cross from one shard to the next, and none is lost but a rest.
    cut = Corpus(tmp_path / "cut")
    batches = cut.batches(SIZES, seed=0, rows=ALL)
    first = [next(batches) for _ in range(3)]
    shards = [
        np.fromfile(tmp_path / "cut" / s.file, "<u2") for s in cut.manifest.training
    ]
    for row in np.concatenate(first):
        assert any(_holds(shard, row) for shard in shards)


def _holds(shard, row) -> bool:
    windows = np.lib.stride_tricks.sliding_window_view(shard, row.size)
    return bool((windows[:: SIZES.length] == row).all(axis=1).any())


def test_an_epoch_holds_every_sequence_once(corpus):
    shard = tokens_of(corpus.folder, "training")
    count = (shard.size - 1) // SIZES.length
    whole = count // 4  # batches of an epoch; what is left over starts the next
    batches = corpus.batches(SIZES, seed=0, rows=ALL)
    seen = np.concatenate([next(batches) for _ in range(whole)])
    starts = [shard[i * 32 : i * 32 + 33] for i in range(count)]
    wanted = collections.Counter(row.tobytes() for row in np.array(starts, np.int32))
    found = collections.Counter(row.tobytes() for row in seen)
    assert found <= wanted
    assert found.total() == whole * 4
    second = np.concatenate([next(batches) for _ in range(whole)])
    assert not np.array_equal(seen, second)


def test_batches_follow_from_the_seed_and_can_go_on(corpus):
    one, other = (corpus.batches(SIZES, seed=seed, rows=ALL) for seed in (0, 1))
    again = corpus.batches(SIZES, seed=0, rows=ALL)
    first = [next(one) for _ in range(5)]
    assert not np.array_equal(first[0], next(other))
    np.testing.assert_array_equal(first, [next(again) for _ in range(5)])
    place = json.loads(json.dumps(one.get_state()))
    rest = [next(one) for _ in range(5)]
    resumed = corpus.batches(SIZES, seed=0, rows=ALL)
    resumed.set_state(place)
    np.testing.assert_array_equal(rest, [next(resumed) for _ in range(5)])


def test_processes_read_the_parts_of_one_batch(corpus):
    whole = corpus.batches(SIZES, seed=0, rows=ALL)
    parts = [corpus.batches(SIZES, seed=0, rows=slice(at, at + 2)) for at in (0, 2)]
    for _ in range(3):
        rows = np.concatenate([next(part) for part in parts])
        np.testing.assert_array_equal(next(whole), rows)
    held = [
        corpus.heldout_batch(SIZES, index=1, rows=slice(at, at + 2)) for at in (0, 2)
    ]
    np.testing.assert_array_equal(
        corpus.heldout_batch(SIZES, index=1, rows=ALL), np.concatenate(held)
    )


def test_folders_and_packed_files_are_read_in_order(tmp_path):
    texts = [text_of(PIECE_LENGTH, seed) for seed in range(3)]
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "a.txt").write_text(texts[0])
    with lzma.open(tmp_path / "in" / "b.txt.xz", "wt", encoding="utf-8") as file:
        file.write(texts[1])
    (tmp_path / "in" / "deep" / "c.md").write_text(texts[2])
    (tmp_path / "in" / "ignored.bin").write_bytes(b"\xff")
    assert "".join(p.text for p in read_pieces(tmp_path / "in", None)) == "".join(texts)
    write_corpus(tmp_path / "in", tmp_path / "out", config=SMALL)
    end = [p.is_last for p in read_pieces(tmp_path / "in", None)]
    assert sum(end) == 3


@pytest.mark.parametrize("separator", ["\x03", "\n==\n"])
def test_documents_of_a_file_are_told_apart(tmp_path, monkeypatch, separator):
    monkeypatch.setattr("echo_jax.training.text_pieces.PIECE_LENGTH", 64)
    monkeypatch.setattr("echo_jax.training.text_pieces._BLOCK_LENGTH", 37)
    documents = [text_of(size, size) for size in (500, 1, 64, 65, 300)]
    path = tmp_path / "all.txt"
    path.write_bytes(separator.join(documents).encode())
    found, current = [], ""
    for piece in read_pieces(path, separator):
        assert len(piece.text) <= 64
        current += piece.text
        if piece.is_last:
            found.append(current)
            current = ""
    assert found == documents


def test_the_same_text_makes_the_same_files(tmp_path, folder):
    write_corpus(folder.parent / "book.txt", tmp_path / "again", config=SMALL)
    assert Corpus(tmp_path / "again").checksum == Corpus(folder).checksum


def test_an_interrupt_leaves_nothing(tmp_path, folder):
    def interrupt(stage, done, total):
        if stage == "encoding":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_corpus(
            folder.parent / "book.txt",
            tmp_path / "out",
            config=SMALL,
            progress=interrupt,
        )
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_is_no_corpus_and_is_replaced(tmp_path, folder):
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "training-00000.bin").write_bytes(b"half")
    write_corpus(folder.parent / "book.txt", tmp_path / "out", config=SMALL)
    assert Corpus(tmp_path / "out").checksum == Corpus(folder).checksum
    (tmp_path / ".more.partial").mkdir()
    with (
        Claim(tmp_path / ".more.partial"),
        pytest.raises(ValueError, match="another process"),
    ):
        write_corpus(folder.parent / "book.txt", tmp_path / "more", config=SMALL)
    with pytest.raises(ValueError, match="exists"):
        write_corpus(folder.parent / "book.txt", tmp_path / "out", config=SMALL)


def test_special_tokens_in_the_text_are_text(tmp_path):
    text = text_of(2 * PIECE_LENGTH).replace("house", END_OF_TEXT)
    (tmp_path / "a.txt").write_text(text)
    write_corpus(tmp_path / "a.txt", tmp_path / "out", config=SMALL)
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    end = tokenizer.token_to_id(END_OF_TEXT)
    both = [tokens_of(tmp_path / "out", part) for part in ("training", "heldout")]
    assert sum((tokens == end).sum() for tokens in both) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "0 bytes of text, too few"),
        (b"short", "5 bytes of text, too few"),
        (b"x" * 70_000 + b"\xff\xfe" + b"y" * 9, "is not UTF-8 text"),
    ],
)
def test_bad_text_is_one_clear_error(tmp_path, content, words):
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(ValueError, match=words):
        write_corpus(tmp_path / "bad.txt", tmp_path / "out", config=SMALL)
    assert not (tmp_path / "out").exists()


def test_bad_files_are_one_clear_error(tmp_path, folder):
    with pytest.raises(ValueError, match="does not exist"):
        write_corpus(tmp_path / "missing", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no text"):
        write_corpus(tmp_path / "empty", tmp_path / "out")
    (tmp_path / "bad.xz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"bad.xz cannot be read"):
        write_corpus(tmp_path / "bad.xz", tmp_path / "out")
    wrong = PrepareConfig(tokenizer=folder / "manifest.json")
    with pytest.raises(ValueError, match=r"is no tokenizer.json"):
        write_corpus(folder.parent / "book.txt", tmp_path / "out", config=wrong)


def damaged(folder, tmp_path, name, change) -> pathlib.Path:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    change(copy / name)
    return copy


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def swap(old: str, new: str):
    return lambda path: path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("training-00000.bin", flip, "another checksum"),
        ("heldout-00000.bin", flip, "another checksum"),
        ("tokenizer.json", flip, "another checksum"),
        ("training-00000.bin", pathlib.Path.unlink, "cannot be read"),
        ("training-00000.bin", lambda p: p.write_bytes(b"ab"), "has 2 bytes"),
        ("manifest.json", lambda p: p.write_text("{}"), "is no manifest"),
        ("manifest.json", pathlib.Path.unlink, "is no manifest"),
        ("manifest.json", swap("uint16", "text"), "is no manifest.*dtype='text'"),
        ("manifest.json", swap('"tokens": ', '"tokens": -'), "is no manifest"),
    ],
)
def test_damage_is_found_before_training(folder, tmp_path, name, change, words):
    with pytest.raises(ValueError, match=words):
        Corpus(damaged(folder, tmp_path, name, change))


def config_of(folder, **kwargs) -> TrainConfig:
    sizes = dataclasses.replace(SIZES, path=folder, **kwargs)
    return TrainConfig(model=DecoderConfig(vocab_size=300), data=sizes)


def test_a_run_that_does_not_fit_the_text_is_refused(folder):
    assert prepare(config_of(folder)).source.unit == "token"
    other = dataclasses.replace(config_of(folder), model=DecoderConfig(vocab_size=512))
    with pytest.raises(ValueError, match=r"vocab_size=512 .*--vocab-size 300"):
        prepare(other)
    with pytest.raises(ValueError, match=r"held-out part .* no sequence of 60000"):
        prepare(config_of(folder, length=60_000))


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 256},
        {"heldout_every": 1},
        {"tokenizer_bytes": 0},
        {"shard_tokens": 0},
        {"separator": ""},
    ],
)
def test_settings_that_make_no_sense(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        PrepareConfig(**changes)
