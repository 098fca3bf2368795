"""Measurements as JSON lines, each with where it came from."""

import dataclasses
import datetime
import functools
import importlib.metadata
import json
import math
import pathlib
import platform
import subprocess
from typing import Any

import jax

_PACKAGES = ("echo_jax", "jax", "jaxlib", "flax", "optax", "numpy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One measured figure."""

    experiment: str  # what was run
    metric: str  # what was measured
    value: float  # the figure, a median where there are several; null if not finite
    unit: str  # of the value
    config: dict[str, Any]  # everything that was chosen
    seed: int | None = None  # of the run
    spread: float | None = None  # how far repetitions lie apart, in the same unit
    baseline: str | None = None  # what the figure is compared with


class RecordWriter:
    """Appends records to a file, each on disk before the call returns.

    Args:
      path: the JSON-lines file; its folder is made when the first record comes.
    """

    def __init__(self, path: pathlib.Path):
        """See the class."""
        self.path = path

    def write(self, record: Record) -> None:
        """Appends one record with its provenance."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        entries = {**dataclasses.asdict(record), **provenance()}
        if not math.isfinite(record.value):
            entries["value"] = None  # JSON has no NaN
        line = json.dumps(entries, default=str, allow_nan=False)
        with self.path.open("a") as file:
            file.write(line + "\n")


def read_records(path: pathlib.Path) -> list[dict[str, Any]]:
    """The records of a file, in order."""
    return [json.loads(line) for line in path.read_text().splitlines() if line]


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
