import numpy as np
import pytest

from echo_jax.training import DataConfig, data

SIZES = DataConfig(batch_size=4, length=16, heldout_batches=3)


@pytest.fixture
def text():
    return np.arange(200_000, dtype=np.uint32).astype(np.uint8)


def test_the_standard_library_is_there():
    text = data.read_text(None)
    assert text.size > 1_000_000
    assert b"def " in text[:100_000].tobytes()


def test_a_file_and_a_folder(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "c.bin").write_bytes(b"\0")
    assert data.read_text(tmp_path).tobytes() == b"first\nsecond"
    assert data.read_text(tmp_path / "b.txt").tobytes() == b"second"


def test_what_is_not_read_byte_by_byte_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_MAX_BYTES", 8)
    text = tmp_path / "book.txt"
    text.write_text("8 bytes.")
    assert data.read_text(text).tobytes() == b"8 bytes."
    text.write_text("9 bytes..")
    with pytest.raises(ValueError, match=r"more than the 8 bytes.*echo-jax prepare"):
        data.read_text(text)
    with pytest.raises(ValueError, match="more than"):
        data.read_text(tmp_path)
    assert data.read_text(None).size == 8  # Python's own is larger than anyone needs
    packed = text.rename(tmp_path / "book.txt.xz")
    with pytest.raises(ValueError, match=r"compressed.*echo-jax prepare"):
        data.read_text(packed)


def test_nothing_to_read(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        data.read_text(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"holds no text.*\.md"):
        data.read_text(tmp_path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match="holds no text"):
        data.read_text(tmp_path / "empty.txt")


def test_too_short_to_hold_something_out(text):
    with pytest.raises(ValueError, match=r"100 bytes.*length"):
        data.split_heldout(text[:100], 64)


@pytest.mark.parametrize("size", [1100, 5000, 200_000])
def test_every_byte_is_in_one_part(text, size):
    kept, held = data.split_heldout(text[:size], 64)
    assert kept.size + held.size == size
    assert 0.03 < held.size / size < 0.13
    counts = np.bincount(kept, minlength=256) + np.bincount(held, minlength=256)
    np.testing.assert_array_equal(counts, np.bincount(text[:size], minlength=256))


def test_batches_follow_from_seed_and_step_alone(text):
    draw = lambda seed, step: data.draw_batch(  # noqa: E731
        text, sizes=SIZES, seed=seed, step=step
    )
    assert draw(0, 3).shape == (4, 17)
    np.testing.assert_array_equal(draw(0, 3), draw(0, 3))
    assert not np.array_equal(draw(0, 3), draw(0, 4))
    assert not np.array_equal(draw(0, 3), draw(1, 3))
    # Each row is a piece of the text: here neighbours differ by one, modulo 256.
    assert (np.diff(draw(0, 3), axis=1) % 256 == 1).all()


def test_the_last_byte_can_be_drawn():
    text = np.arange(18, dtype=np.uint8)
    sizes = DataConfig(batch_size=200, length=16)
    batch = data.draw_batch(text, sizes=sizes, seed=0, step=0)
    assert batch.max() == 17


@pytest.mark.parametrize("size", [250, 4000])
def test_heldout_batches_cover_the_text_once(text, size):
    batches = [
        data.heldout_batch(text[:size], sizes=SIZES, index=index) for index in range(3)
    ]
    starts = sorted({tuple(row) for batch in batches for row in batch})
    assert len(starts) == 12
    assert batches[0].shape == (4, 17)
    assert batches[0][0, 0] == text[0]
    assert batches[-1][-1, -1] == text[size - 1]


def test_every_folder_of_the_user_is_read(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "a.txt").write_text("kept")
    assert data.read_text(tmp_path).tobytes() == b"kept"
