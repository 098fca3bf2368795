"""Measurements as JSON lines, each with where it came from."""

import dataclasses
import datetime
import functools
import importlib.metadata
import io
import json
import math
import pathlib
import platform
import subprocess
import warnings
from typing import Any, BinaryIO

import jax

_PROVENANCE = ("device", "versions", "commit", "date")
_PACKAGES = ("echo_jax", "jax", "jaxlib", "flax", "optax", "numpy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One measured figure."""

    experiment: str  # what was run
    metric: str  # what was measured
    # The figure; the median where there are several. null in the file if not finite.
    value: float
    unit: str  # of the value
    # Everything that was chosen; "inf" and "nan" in the file where not finite.
    config: dict[str, Any]
    seed: int | None = None  # of the run
    # How far repetitions lie apart, in the same unit; null if not finite.
    spread: float | None = None
    baseline: str | None = None  # what the figure is compared with


class RecordWriter:
    """Appends records to a file, which is closed again after each of them.

    A record is therefore with the operating system when :meth:`write` returns, and
    survives a process that is killed.

    Args:
      path: the JSON-lines file, or a pipe; its folder is made when the first record
        comes.
      origin: provenance of the records, if it is not this process that measures: as
        :func:`origin_of` reads it from another file.
    """

    def __init__(self, path: pathlib.Path, *, origin: dict[str, Any] | None = None):
        """See the class."""
        self.path, self.origin = path, origin

    def write(self, record: Record) -> None:
        """Appends one record with its provenance.

        Raises:
          OSError: if the file cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        origin = provenance() if self.origin is None else self.origin
        entries = {**dataclasses.asdict(record), **origin}
        for name in ("value", "spread"):
            number = getattr(record, name)
            if number is not None and not math.isfinite(number):
                entries[name] = None  # JSON has neither NaN nor infinity
        entries["config"] = _spelled(entries["config"])
        line = json.dumps(entries, default=str, allow_nan=False) + "\n"
        is_file = self.path.is_file()  # what else there is may not be read, as a pipe
        with self.path.open("ab+" if is_file else "ab") as file:
            if is_file and _ends_in_a_cut_line(file):
                line = "\n" + line
            file.write(line.encode())


def read_records(path: pathlib.Path) -> list[dict[str, Any]]:
    """The records of a file, in order.

    A line that is not JSON is left out with a warning: a full disk or a killed process
    cuts a line in the middle, and must not cost the others.

    Raises:
      OSError: if the file cannot be read.
    """
    records = []
    # Bytes that are no text, as a crash can leave them, are in lines that are no JSON.
    text = path.read_bytes().decode(errors="replace")
    for number, line in enumerate(text.splitlines(), start=1):
        if not line:
            continue
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            records.append(record)
        else:
            warnings.warn(
                f"{path}, line {number} is not a whole record and was left out.",
                stacklevel=2,
            )
    return records


def origin_of(path: pathlib.Path) -> dict[str, Any]:
    """Provenance of a file's last record: of a run, where and as what it ended.

    Raises:
      OSError: if the file cannot be read.
      ValueError: if it has no record.
    """
    records = read_records(path)
    if not records:
        raise ValueError(
            f"{path} has no record: give the file of a run that wrote some."
        )
    return {name: records[-1].get(name) for name in _PROVENANCE}


def _spelled(config: Any) -> Any:
    """What was chosen, with words for the numbers that JSON has not."""
    if isinstance(config, dict):
        return {key: _spelled(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [_spelled(value) for value in config]
    if isinstance(config, float) and not math.isfinite(config):
        return str(config)
    return config


def _ends_in_a_cut_line(file: BinaryIO) -> bool:
    """Whether the last line of an open file lacks its end."""
    if not file.seek(0, io.SEEK_END):
        return False
    file.seek(-1, io.SEEK_END)
    return file.read(1) != b"\n"


def provenance() -> dict[str, Any]:
    """Device, versions, commit and date, as every record carries them."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {**_fixed_provenance(), "date": now}


@functools.cache
def _fixed_provenance() -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    device = jax.devices()[0]
    return {
        "device": f"{jax.device_count()} x {device.device_kind}",
        "versions": versions,
        "commit": _commit(),
    }


def _commit() -> str | None:
    """The commit of the checkout that this file is in; None when it is installed."""
    root = pathlib.Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip() or None
