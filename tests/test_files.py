import io
import os
import pathlib

import pytest

from echo_jax import cli_output
from echo_jax.files import Claim, write_text
from echo_jax.records import Record, RecordWriter


def test_a_file_that_cannot_be_written_keeps_what_it_held(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    write_text(path, "first")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left.*plan\.json"):
        write_text(path, "second")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_ctrl_c_leaves_no_part_of_a_file(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    write_text(path, "first")

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_text(path, "second")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o444])
def test_who_may_read_a_file_stays_as_it_was(tmp_path, mode, monkeypatch):
    """The part that is written first is never open to more than the file was."""
    path = tmp_path / "plan.json"
    path.write_text("first")
    path.chmod(mode)
    modes, sync = [], os.fsync

    def watch(handle):
        modes.append(os.fstat(handle).st_mode & 0o777)
        sync(handle)

    monkeypatch.setattr("os.fsync", watch)
    write_text(path, "second")
    assert path.read_text() == "second"
    assert [path.stat().st_mode & 0o777, *modes] == [mode, mode]


def test_a_new_file_gets_the_usual_mode(tmp_path):
    (tmp_path / "usual").touch()
    write_text(tmp_path / "new", "text")
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1


def test_a_link_stays_one_and_a_device_is_written_to(tmp_path):
    (tmp_path / "link").symlink_to("there")
    write_text(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there").read_text() == "text"
    write_text(pathlib.Path("/dev/null"), "text")
    assert pathlib.Path("/dev/null").is_char_device()


def test_a_folder_is_claimed_once_until_it_is_released(tmp_path):
    claim = Claim(tmp_path)
    with pytest.raises(ValueError, match="being written by another process"):
        Claim(tmp_path)
    claim.release()
    with Claim(tmp_path):
        pass
    with Claim(tmp_path):
        assert not list(tmp_path.iterdir())


def test_a_full_disk_stops_the_figures_and_says_so(tmp_path, capsys):
    record = Record(experiment="e", metric="m", value=1.0, unit="1", config={})
    output = cli_output.Output(pathlib.Path("/dev/full"))
    output.write(record)
    output.write(record)
    assert output.close() == 1
    assert "could not be written to /dev/full (No space" in capsys.readouterr().err
    output = cli_output.Output(tmp_path / "new" / "out.jsonl")
    output.write(record)
    assert output.close() == 0
    assert (tmp_path / "new" / "out.jsonl").stat().st_size
    with pytest.raises(ValueError, match="is a folder"):
        cli_output.Output(tmp_path)


def test_an_error_without_words_of_the_system_stops_the_figures(
    tmp_path, capsys, monkeypatch
):
    def refuse(*_):
        raise io.UnsupportedOperation("File or stream is not seekable.")

    monkeypatch.setattr(RecordWriter, "write", refuse)
    output = cli_output.Output(tmp_path / "out.jsonl")
    output.write(Record(experiment="e", metric="m", value=1.0, unit="1", config={}))
    assert output.close() == 1
    assert "(File or stream is not seekable.)" in capsys.readouterr().err
