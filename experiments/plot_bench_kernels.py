"""Draws what ``bench_kernels.py`` measured, from its file alone.

    python experiments/plot_bench_kernels.py --out kernels.svg

Rate against the size of the message, one line a stage, beside the copy measured in the
same run: how close each stage comes to the memory's roof.
"""

import dataclasses
import pathlib
import sys

import matplotlib.pyplot as plt
import tyro

from echo_jax.records import read_records

RESULTS = pathlib.Path(__file__).parent / "results" / "bench_kernels.jsonl"
REFERENCE = {"ranks": 8, "block_size": 64, "bits": 4, "residual_dtype": "int8"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is drawn."""

    results: pathlib.Path = RESULTS
    backend: str = "triton"
    out: pathlib.Path = pathlib.Path("bench_kernels.svg")


def rates(records: list[dict], metric: str, **wanted) -> list[tuple[int, float]]:
    """Sorted ``(message_bytes, TB/s)`` of the newest record of each size."""
    found = {}
    for record in records:
        config = record["config"]
        matches = all(config.get(key) == value for key, value in wanted.items())
        if record["metric"] == metric and matches:
            rate = config["moved_bytes"] / record["value"] / 1e9
            found[config["message_bytes"]] = rate
    return sorted(found.items())


def draw(records: list[dict], backend: str) -> plt.Figure:
    """Two panels, without and with the rotation."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for panel, rotate in zip(panels, (False, True), strict=True):
        for stage in ("send", "reduce", "return", "return_add", "total"):
            wanted = {**REFERENCE, "backend": backend, "stage": stage, "rotate": rotate}
            line = rates(records, "codec_ms", **wanted)
            if line:
                panel.plot(*zip(*line, strict=True), marker="o", label=stage)
        roof = rates(records, "copy_ms")
        panel.plot(*zip(*roof, strict=True), "k--", label="copy")
        panel.set_xscale("log", base=2)
        panel.set_xlabel("message, bytes of bfloat16")
        panel.set_title("rotated" if rotate else "not rotated")
    panels[0].set_ylabel("counted bytes, TB/s")
    panels[0].legend()
    figure.tight_layout()
    return figure


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    draw(read_records(settings.results), settings.backend).savefig(settings.out)


if __name__ == "__main__":
    sys.exit(main())
