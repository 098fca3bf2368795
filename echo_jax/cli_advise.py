"""``echo-jax advise``: whether few bits pay here, and with which settings."""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import tyro
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from echo_jax.config import EchoConfig
from echo_jax.cost_model import (
    Advice,
    CostModel,
    Message,
    SumTimes,
    advise,
    calibrate,
    decoder_messages,
    project,
)
from echo_jax.cost_model.advice import MARGIN, times_as_fast
from echo_jax.cost_model.calibration import LARGE_SIZES, SIZES
from echo_jax.devices import Cluster, Device, tensor_mesh
from echo_jax.models.checkpoint import read_config
from echo_jax.models.config import DecoderConfig
from echo_jax.models.generation import bucket
from echo_jax.models.loading import read_checkpoint
from echo_jax.plan import DepthPlan
from echo_jax.wire.format import WireFormat

_ADVISED = {"path", "min_bytes", "num_chunks"}
_ASSUMED = {"ranks_per_node", "ethernet_gbit"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advise:
    """Say whether echo pays, with which settings, and what it brings.

    Measures the mesh for a short while, unless a calibration or a machine is given.
    """

    sizes: tuple[int, ...] = ()
    """Bytes of a rank's messages; default 16 KiB to 64 MiB, or what the model sums."""
    model: pathlib.Path | None = None
    """Checkpoint whose sums these are: folder with config.json, or a GGUF file."""
    length: int = 512
    """Tokens of a sequence."""
    batch: int = 1
    """Sequences at once."""
    compute_ms: float | None = None
    """Milliseconds that the first token takes without its sums."""
    step_compute_ms: float | None = None
    """Milliseconds that a training step takes without its sums."""
    share: float | None = None
    """Instead of times: the share of the whole time that exact sums take, 0 to 1."""
    machine: Literal["here", "a100", "h200"] = "here"
    """Measure here, or assume nodes of a known machine (not measured)."""
    ranks: int | None = None
    """Ranks of the assumed machines; default one node."""
    ranks_per_node: int = 8
    """GPUs of an assumed node, linked by NVLink."""
    ethernet_gbit: float = 400.0
    """Gbit/s of each GPU's network card between assumed nodes."""
    burst_bytes: int | None = None
    """What the link here lets pass at once before its rate holds (the token bucket of a
    shaped link); not measured. Default the calibration's, else none."""
    load: pathlib.Path | None = None
    """A calibration of this mesh, saved before."""
    save: pathlib.Path | None = None
    """File that the calibration is written to."""
    margin: float = MARGIN
    """How much faster than exact the sums in few bits must together be predicted to
    be, as a share, for them to be advised."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the messages; default the checkpoint's or the calibration's, or else
    bfloat16, on the CPU float16."""
    tensor_ranks: int | None = None
    """Ranks that sum; default all devices, or 1 with --device cpu."""
    device: Device = "default"
    """cpu simulates as many devices as there are ranks; default takes JAX's own."""
    cluster: tyro.conf.OmitArgPrefixes[Cluster] = Cluster()
    config: tyro.conf.OmitArgPrefixes[EchoConfig] = EchoConfig()

    def __post_init__(self):
        self._check_messages()
        self._check_gains()
        self._check_machine()

    def _check_messages(self):
        if self.model is not None and self.sizes:
            raise ValueError("give sizes or a model, whose sizes are known, not both.")
        if min(self.sizes, default=4) < 4:
            raise ValueError(f"sizes={self.sizes} must hold bytes, 4 or more each.")
        if min(self.length, self.batch) < 1:
            raise ValueError(
                f"length={self.length} and batch={self.batch} must be at least 1."
            )
        if not 0 <= self.margin < math.inf:
            raise ValueError(f"margin={self.margin} must be at least 0, and finite.")

    def _check_gains(self):
        given = (self.compute_ms, self.step_compute_ms)
        if any(time is not None and not 0 <= time < math.inf for time in given):
            raise ValueError(
                f"compute_ms={self.compute_ms} and "
                f"step_compute_ms={self.step_compute_ms} must be at least 0, and "
                "finite."
            )
        if self.share is not None and given != (None, None):
            raise ValueError("give the share of sums or times of computing, not both.")
        if self.share is not None and not 0 <= self.share <= 1:
            raise ValueError(f"share={self.share} must lie in 0 to 1.")

    def _check_machine(self):
        if self.ranks is not None and self.machine == "here":
            raise ValueError(
                "ranks belong to an assumed machine: here give tensor_ranks, or for "
                "other numbers of ranks --machine."
            )
        if self.load is not None and self.machine != "here":
            raise ValueError("give a calibration (load) or a machine, not both.")
        if self.save is not None and (self.load or self.machine != "here"):
            raise ValueError(
                "nothing is measured that could be saved: give save without load and "
                "machine."
            )
        if self.burst_bytes is None:
            return
        if self.burst_bytes < 0:
            raise ValueError(f"burst_bytes={self.burst_bytes} must be at least 0.")
        if self.machine != "here":
            raise ValueError(
                "burst_bytes belong to the link here, assumed machines have none."
            )


def prepare_advice(command: Advise) -> Callable[[], int]:
    """Checks what can be wrong; what is returned measures and advises."""
    decoder = None
    if command.model is not None:
        decoder = _decoder(command.model)
        if command.dtype is not None:
            decoder = dataclasses.replace(decoder, dtype=command.dtype)
    dtype = command.dtype or (decoder.dtype if decoder else None)
    if command.load is not None:
        saved = CostModel.load(command.load)
        if dtype not in (None, saved.dtype):
            raise ValueError(
                f"{command.load} was calibrated for {saved.dtype}, the sums are of "
                f"{dtype}: calibrate again."
            )
        _check_calibrated(command, saved)
        saved = _with_burst(saved, command.burst_bytes)
        return lambda: _report(command, saved, saved.ranks, decoder)
    _check_heeded(command)
    if command.machine != "here":
        nodes = project(
            command.machine,
            command.ranks_per_node if command.ranks is None else command.ranks,
            ranks_per_node=command.ranks_per_node,
            ethernet_gbit=command.ethernet_gbit,
            dtype=dtype or "bfloat16",
            config=command.config,
        )
        return lambda: _report(command, nodes, nodes.ranks, decoder)
    mesh = tensor_mesh(command.tensor_ranks, command.device, command.cluster)
    if mesh.size < 2:
        raise ValueError(
            "1 rank has nothing to sum: use --tensor-ranks with more devices "
            "(--device cpu simulates them), or --machine for one that is not here."
        )
    DepthPlan.uniform(command.config).check_backends()
    if command.save is not None and command.save.is_dir():
        raise ValueError(f"save={command.save} is a folder: give a file.")
    return lambda: _measure_and_report(command, mesh, dtype, decoder)


def _check_calibrated(command: Advise, saved: CostModel):
    """Refuses options that a calibration has settled otherwise, or cannot heed."""
    asked, default = _mesh_options(command), _mesh_options(Advise())
    had = default | _config_options(saved.config) | {"tensor_ranks": saved.ranks}
    others = [
        f"{name}={value}"
        for name, value in asked.items()
        if value not in (default[name], had[name])
    ]
    if others:
        raise ValueError(
            f"{command.load} was not calibrated with {', '.join(others)}: leave this "
            "away, calibrate again without load, or assume a machine instead."
        )


def _check_heeded(command: Advise):
    """Refuses options that would change nothing."""
    default, asked = _mesh_options(Advise()), _mesh_options(command)
    given = {name: value for name, value in asked.items() if value != default[name]}
    if command.machine == "here":
        others, reason = _ASSUMED, "or give the machine that is assumed."
    else:
        others = {*default} - _ASSUMED - {*_config_options(EchoConfig())}
        reason = "since with a machine nothing is measured here."
    found = "since advise finds path, min_bytes and num_chunks itself."
    for names, why in ((_ADVISED, found), (others, reason)):
        unheeded = [f"{name}={value}" for name, value in given.items() if name in names]
        if unheeded:
            raise ValueError(f"leave {', '.join(unheeded)} away, {why}")


def _mesh_options(command: Advise) -> dict[str, Any]:
    """What is measured or assumed, by the name of the option."""
    names = ("ranks_per_node", "ethernet_gbit", "tensor_ranks", "device")
    mesh = {name: getattr(command, name) for name in names}
    cluster = dataclasses.asdict(command.cluster)
    return mesh | cluster | _config_options(command.config)


def _config_options(config: EchoConfig) -> dict[str, Any]:
    entries = dataclasses.asdict(config)
    return entries.pop("format") | entries


def _decoder(path: pathlib.Path) -> DecoderConfig:
    """A checkpoint's; a folder may be without its weights."""
    if (path / "config.json").exists():
        return read_config(path).decoder
    return read_checkpoint(path).decoder


def _measure(command: Advise, mesh: Mesh, dtype: str | None) -> CostModel:
    """Calibrates."""
    on_cpu = jax.devices()[0].platform == "cpu"
    measured = calibrate(
        mesh,
        sizes=SIZES if on_cpu else LARGE_SIZES,
        dtype=dtype or ("float16" if on_cpu else "bfloat16"),
        config=command.config,
    )
    return _with_burst(measured, command.burst_bytes)


def _measure_and_report(
    command: Advise, mesh: Mesh, dtype: str | None, decoder: DecoderConfig | None
) -> int:
    """Advises first: a file that cannot be written costs no more than itself."""
    measured = _measure(command, mesh, dtype)
    code = _report(command, measured, mesh.size, decoder)
    if command.save is not None and jax.process_index() == 0:
        measured.save(command.save)
    return code


def _with_burst(model: CostModel, burst_bytes: int | None) -> CostModel:
    """The model with the burst that was given, or its own."""
    if burst_bytes is None:
        return model
    link = dataclasses.replace(model.link, burst_bytes=burst_bytes)
    return dataclasses.replace(model, link=link)


def _report(
    command: Advise, times: SumTimes, ranks: int, decoder: DecoderConfig | None
) -> int:
    """Prints times, settings and gains, once for all processes."""
    if jax.process_index():
        return 0
    tokens = command.batch * bucket(command.length)
    if decoder is not None:
        messages = decoder_messages(decoder, tokens=tokens)
    else:
        sizes = command.sizes or tuple(1 << n for n in range(14, 27, 2))
        messages = tuple(Message(message_bytes=size) for size in sizes)
    advice = advise(times, messages, margin=command.margin)
    console = Console(soft_wrap=True, highlight=False)
    console.print(_table(command, advice, ranks))
    config = times.config if isinstance(times, CostModel) else command.config
    console.print(_settings(advice, config))
    for name, faster in _gains(command, times, advice, decoder):
        console.print(f"{name}: {faster:.2f} times as fast as with exact sums.")
    return 0


def _table(command: Advise, advice: Advice, ranks: int) -> Table:
    where = (
        "here"
        if command.machine == "here"
        else f"assumed: {command.machine}, nodes of {command.ranks_per_node}, "
        f"{command.ethernet_gbit:g} Gbit/s between"
    )
    table = Table(
        *("message", "calls", "exact, ms", "echo, ms", "advised", "gain"),
        title=f"Predicted all-reduce over {ranks} ranks ({where})",
    )
    rows = zip(advice.messages, advice.exact_seconds, advice.echo_seconds, strict=True)
    for message, exact, echo in rows:
        takes = advice.takes_echo(message)
        table.add_row(
            f"{message.message_bytes:,} B",
            f"{message.calls}",
            f"{1e3 * exact:.3g}",
            f"{1e3 * echo:.3g}",
            "echo" if takes else "exact",
            f"{times_as_fast(exact, echo):.2f}x" if takes else "-",
        )
    return table


def _settings(advice: Advice, config: EchoConfig) -> str:
    """The advised configuration, as Python that evaluates to it."""
    if advice.min_bytes is None:
        exact = f"{_expression(config)}.exact()"
        return f"Few bits do not pay for these messages: {exact}"
    advised = _expression(advice.configure(config))
    return f"{advised}: smaller messages are better summed exactly."


def _expression(value: EchoConfig | WireFormat | bool | int | str) -> str:
    """Python for a value, without the fields that are as by default."""
    if isinstance(value, str):
        return f'"{value}"'
    if not isinstance(value, EchoConfig | WireFormat):
        return repr(value)
    default = type(value)()
    fields = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    given = [
        f"{name}={_expression(field)}"
        for name, field in fields
        if field != getattr(default, name)
    ]
    return f"{type(value).__name__}({', '.join(given)})"


def _gains(
    command: Advise, times: SumTimes, advice: Advice, decoder: DecoderConfig | None
) -> Iterator[tuple[str, float]]:
    """``(what, times as fast)`` of what was asked for."""
    if command.share is not None:
        yield "All of it", advice.gain_of_share(command.share)
    if command.compute_ms is not None:
        yield "First token", advice.gain(compute_seconds=command.compute_ms / 1e3)
    if command.step_compute_ms is not None:
        step = advice
        if decoder is not None:
            tokens = command.batch * command.length
            messages = decoder_messages(decoder, tokens=tokens, what="step")
            step = advise(times, messages, margin=command.margin)
        yield "Step", step.gain(compute_seconds=command.step_compute_ms / 1e3)
