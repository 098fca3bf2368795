"""Sums over a slow network: several processes, limited links, other people's traffic.

Each process is a host of its own: a network namespace whose link to a switch is limited
to a rate, both ways. Needs root, ``ip`` and ``tc``; elsewhere it measures over the
loopback interface alone, and says so. Everything it builds it removes again, also when
interrupted; nothing leaves the namespaces.

    python experiments/bench_network.py                          # most of an hour
    python experiments/bench_network.py --parts allreduce --rates 100 --processes 2
    python experiments/bench_network.py --parts ttft step
    python experiments/bench_network.py --tiny                   # for CI

Parts: ``allreduce``, one sum over sizes, rates and processes; ``algorithms``, the same
in two shots and in one; ``background``, a sum beside traffic that takes a part of the
link; ``calibrate``, the share of communication in the time to first token over rates;
``ttft`` and ``step``, time to first token and training step at the one rate where that
share is about a quarter, idle and beside traffic.

The baseline is ``lax.psum`` of float16: on a CPU bfloat16 travels as float32. The
decoder computes in float32; its exact sums are cast to float16 and back, its 4-bit sums
are not. Baseline and echo run in the same processes and take turns, a different one
first in each round. "Compute alone" is a rank's share of the decoder without any sum,
on all ranks at once: what is left of the exact time is communication.

A cell that the file has already is not measured again: a run can be cut in slices, and
goes on where it was interrupted.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Iterator
from typing import Literal

import tyro
from netlab import namespaces
from netlab.lab import open_lab
from netlab.measure import Measure, Place
from netlab.namespaces import NoNetworkError

RESULTS = pathlib.Path(__file__).parent / "results" / "bench_network.jsonl"
MIB = 1 << 20
F32 = "psum float32"
PLANS = ["exact", "compute alone", "echo"]  # of a decoder's sums

Part = Literal["allreduce", "algorithms", "background", "calibrate", "ttft", "step"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured."""

    parts: tuple[Part, ...] = ("allreduce", "background", "ttft", "step")
    processes: tuple[int, ...] = (2, 4, 8)
    rates: tuple[float, ...] = (0, 1000, 400, 200, 100, 50)  # Mbit/s; 0: no limit
    delay_ms: float = 0.0  # of a packet on its way, where the kernel can
    sizes: tuple[int, ...] = tuple(1 << n for n in range(12, 27, 2))
    # bytes of a rank's float16 message
    chunks: tuple[int, ...] = (1, 4)  # pieces that echo cuts a message into
    residual_dtype: str = "bfloat16"
    longest: float = 2.2  # seconds; what takes longer as float16 is left out
    budget: float = 2.0  # seconds for the rounds of a cell, 3 to 401 of them
    backgrounds: tuple[int, ...] = (0, 25, 50, 75, 85)  # percent of the link
    background_rates: tuple[float, ...] = (100, 400)
    background_sizes: tuple[int, ...] = (MIB, 16 * MIB)
    model_processes: int = 2
    model_rate: float = 350.0  # Mbit/s
    model_width: int = 4096  # what is computed for each byte sent grows with it
    model_layers: int = 2
    model_length: int = 256  # tokens of the prompt, and of a training sequence
    min_bytes: int = 1 << 18  # of the decoder's sums; smaller ones are exact
    loopback: bool = False  # the loopback interface even where namespaces can be had
    torch: str | None = None  # a Python that has PyTorch, to measure its gloo as well
    out: pathlib.Path = RESULTS
    tiny: bool = False  # two processes, small messages


def tiny(settings: Settings) -> Settings:
    return dataclasses.replace(
        settings,
        processes=(2,),
        rates=(400,),
        sizes=(1 << 16,),
        chunks=(1,),
        budget=0.0,
        backgrounds=(0, 50),
        background_rates=(400,),
        background_sizes=(1 << 16,),
        model_rate=400.0,
        model_width=64,
        model_layers=1,
        model_length=16,
        min_bytes=0,
    )


def cases(settings: Settings, part: str = "allreduce") -> list[dict]:
    """The baseline first. Every message goes through the codec, however small."""
    echo = {"min_bytes": 0, "residual_dtype": settings.residual_dtype}
    if part == "algorithms":
        names = {"two-shot": "echo", "one-shot": "echo, one shot"}
        return [
            {"name": "psum float16", "dtype": "float16", "config": None},
            *(
                {"name": name, "dtype": "float16", "config": echo | {"algorithm": kind}}
                for kind, name in names.items()
            ),
        ]
    return [
        {"name": "psum float16", "dtype": "float16", "config": None},
        {"name": F32, "dtype": "float32", "config": None},
        *(
            {
                "name": f"echo, {n} pieces" if n > 1 else "echo",
                "dtype": "float16",
                "config": {**echo, "num_chunks": n},
            }
            for n in settings.chunks
        ),
    ]


def sums(settings: Settings, processes: int) -> Iterator[tuple[str, int, Place]]:
    """``(part, bytes of a message, conditions)`` of each cell, fast links first."""
    at = functools.partial(Place, delay_ms=settings.delay_ms)
    for part in ("allreduce", "algorithms"):
        for rate in settings.rates if part in settings.parts else ():
            for size in settings.sizes:
                if seconds(size, rate, processes) <= settings.longest:
                    yield part, size, at(rate=rate)
    levels = settings.backgrounds if "background" in settings.parts else ()
    for rate in settings.background_rates:
        for percent in filter(None, levels):
            for size in settings.background_sizes:
                if seconds(size, rate, processes, percent) <= 2 * settings.longest:
                    yield "allreduce", size, at(rate=rate, percent=percent)


def seconds(size: int, rate: float, processes: int, percent: int = 0) -> float:
    """That the bytes of a float16 sum take on the links."""
    if not rate:
        return 0.0
    sent = 2 * (processes - 1) / processes * size
    return 8 * sent / (1e6 * rate * (1 - percent / 100))


def models(settings: Settings) -> Iterator[tuple[str, list[str], Place]]:
    """``(what, plans, conditions)`` of each cell of the decoder."""
    at = functools.partial(Place, delay_ms=settings.delay_ms)
    if "calibrate" in settings.parts:
        for rate in filter(None, settings.rates):
            yield "share", PLANS[:2], at(rate=rate)
    for what in ("ttft", "step"):
        if what in settings.parts:
            for percent in settings.backgrounds:
                yield what, PLANS, at(rate=settings.model_rate, percent=percent)


def model_choice(settings: Settings) -> dict:
    """Decoder, prompt and configuration of its sums, as the workers take them."""
    width, head = settings.model_width, min(128, settings.model_width // 8)
    decoder = {
        "vocab_size": 4096,
        "num_layers": settings.model_layers,
        "width": width,
        "num_heads": width // head,
        "num_kv_heads": width // head,
        "head_dim": head,
        "mlp_width": width * 11 // 4 // 64 * 64,
        "dtype": "float32",
    }
    echo = {
        "min_bytes": settings.min_bytes,
        "residual_dtype": settings.residual_dtype,
        "num_chunks": max(settings.chunks),
    }
    return {"decoder": decoder, "length": settings.model_length, "echo": echo}


def run(settings: Settings, *, with_network: bool) -> None:
    """All cells, one number of processes after the other."""
    start = functools.partial(open_lab, with_network=with_network)
    for processes in settings.processes:
        wanted = [
            (part, size, place)
            for part, size, place in sums(settings, processes)
            if with_network or not place.percent
        ]
        if not wanted:
            continue
        with start(processes, torch=None) as lab:
            measure = Measure(lab, settings.out, settings.budget)
            lab.ask("check", cases=cases(settings), values=1 << 16)
            for part, size, place in wanted:
                chosen = cases(settings, part)
                # Beside traffic the float32 sum says nothing new.
                chosen = [c for c in chosen if not place.percent or c["name"] != F32]
                measure.sums(chosen, size, place, part=part)
        if settings.torch:
            with start(processes, torch=settings.torch) as lab:
                measure = Measure(lab, settings.out, settings.budget)
                for part, size, place in wanted:
                    if part == "allreduce":
                        measure.torch_sums(size, place)
    wanted = [c for c in models(settings) if with_network or not c[2].percent]
    if wanted:
        with start(settings.model_processes, torch=None) as lab:
            measure = Measure(lab, settings.out, settings.budget)
            for what, plans, place in wanted:
                measure.model(what, plans, model_choice(settings), place)


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    if settings.tiny:
        settings = tiny(settings)
    reason = "not asked for" if settings.loopback else namespaces.why_not()
    if reason:
        print(
            f"No network of namespaces: {reason}. Measuring over the loopback "
            "interface, without limits or other traffic.",
            flush=True,
        )
        settings = dataclasses.replace(settings, rates=(0,), model_rate=0.0)
    try:
        run(settings, with_network=reason is None)
    except NoNetworkError as error:
        raise SystemExit(f"the network failed: {error}") from error
    print(f"Figures in {settings.out}.", flush=True)


if __name__ == "__main__":
    main()
