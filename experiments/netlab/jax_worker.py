"""One process of a mesh: ``python jax_worker.py RANK PROCESSES ADDRESS INTERFACE``."""

import functools
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

import echo_jax as echo
from echo_jax import benchmark
from echo_jax.benchmark import Case
from echo_jax.benchmark_model import compute_share, random_model
from echo_jax.collectives import exact
from echo_jax.models import DecoderConfig

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from netlab.processes import serve

# On a program that is abandoned no process waits for long.
PATIENCE = {"heartbeat_timeout_seconds": 30, "shutdown_timeout_seconds": 5}


class Worker:
    """What the controller can ask for; each answer is one that JSON can hold."""

    def __init__(self, mesh: Mesh, interface: str):
        """On a mesh of all processes."""
        self.mesh, self.interface = mesh, interface
        self.sums: dict = {}  # compiled sums by case and shape
        self.programs: dict = {}  # of the model, by plan
        self.barrier = jax.jit(
            jax.shard_map(
                lambda x: lax.psum(x, "tensor"),
                mesh=mesh,
                in_specs=PartitionSpec("tensor"),
                out_specs=PartitionSpec(),
            )
        )
        self.token = benchmark.draw_message(mesh, (1,), "float32")

    def hello(self) -> dict:
        """What this process runs on."""
        return {"devices": jax.device_count(), "jax": jax.__version__}

    def check(self, cases: list[dict], values: int) -> None:
        """Sums are right and alike on all ranks."""
        benchmark.check_cases([_case(case) for case in cases], self.mesh, values)

    def describe(self, case: dict, values: int) -> dict:
        """Configuration of a record."""
        shape = benchmark.message_shape(values)
        return benchmark.describe(_case(case), shape, self.mesh.size)

    def time_sums(self, cases: list[dict], values: int, rounds: int) -> list:
        """Seconds of each case in each round, the cases in turns."""
        shape = benchmark.message_shape(values)
        sums = [self._sum(_case(case), shape) for case in cases]
        x = {c["dtype"]: self._message(shape, c["dtype"]) for c in cases}
        calls = [functools.partial(s, x[s.case.dtype]) for s in sums]
        return self._in_turns(calls, rounds)

    def count_bytes(self, case: dict, values: int, calls: int) -> int:
        """Bytes that the interface sent in so many calls."""
        shape = benchmark.message_shape(values)
        timed = self._sum(_case(case), shape)
        x = self._message(shape, case["dtype"])
        self._meet()
        before = self._sent()
        for _ in range(calls):
            timed(x)
        self._meet()
        return self._sent() - before

    def build(self, config: dict, length: int, batch: int) -> int:
        """Draws a decoder, whole and this rank's share; number of parameters."""
        send_exact_sums_in_float16()
        config = DecoderConfig(**config)
        self.model = random_model(config, self.mesh)
        here = Mesh(np.array(jax.local_devices()), ("tensor",))
        self.share = random_model(compute_share(config, self.mesh.size), here)
        # The share has fewer words, and tokens must be known to both.
        words = compute_share(config, self.mesh.size).vocab_size
        draw = np.random.default_rng(0)
        self.tokens = draw.integers(0, words, (batch, length + 1)).astype(np.int32)
        self.programs = {}
        return self.model.num_parameters

    def time_model(self, what: str, plans: list[str], echo_config: dict, rounds: int):
        """Seconds of each plan in each round, in turns."""
        config = _config(echo_config)
        calls = [self._program(what, plan, config) for plan in plans]
        return self._in_turns(calls, rounds)

    def _in_turns(self, calls: list, rounds: int) -> list[list[float]]:
        """A different one first in each round; all ranks start each together."""
        seconds: list[list[float]] = [[] for _ in calls]
        for turn in range(rounds):
            for index in range(len(calls)):
                chosen = (turn + index) % len(calls)
                self._meet()
                seconds[chosen].append(calls[chosen]())
        return seconds

    def _sum(self, case: Case, shape) -> benchmark.TimedSum:
        if (case, shape) not in self.sums:
            self.sums[case, shape] = benchmark.TimedSum(case, self.mesh, shape)
        return self.sums[case, shape]

    def _message(self, shape, dtype: str) -> jax.Array:
        # Kept for one size, or the larger ones would crowd each other out.
        key = ("message", shape, dtype)
        if key not in self.sums:
            for old in [k for k in self.sums if k[0] == "message" and k[1] != shape]:
                del self.sums[old]
            self.sums[key] = benchmark.draw_message(self.mesh, shape, dtype)
        return self.sums[key]

    def _program(self, what: str, plan: str, config: echo.EchoConfig):
        key = (what, plan, config)
        if key not in self.programs:
            model = self.share if plan == "compute alone" else self.model
            depth_plan = {
                "exact": echo.DepthPlan.uniform(config.exact()),
                "compute alone": echo.DepthPlan.uniform(config.exact()),
                "echo": echo.DepthPlan.uniform(config),
                "echo edges": echo.DepthPlan.edges(config),
            }[plan]
            is_step = what == "step"
            make = model.training_step if is_step else model.first_token
            batch = jnp.asarray(self.tokens if is_step else self.tokens[:, :-1])
            run = make(depth_plan)

            def timed() -> float:
                start = time.perf_counter()
                jax.block_until_ready(run(model.params, batch))
                return time.perf_counter() - start

            self.programs[key] = timed
        return self.programs[key]

    def _meet(self) -> None:
        jax.block_until_ready(self.barrier(self.token))

    def _sent(self) -> int:
        counter = f"/sys/class/net/{self.interface}/statistics/tx_bytes"
        return int(pathlib.Path(counter).read_text())


def send_exact_sums_in_float16() -> None:
    """From now on the library's exact sums cast what they are given to float16.

    The CPU computes in float32 and has no other honest 16-bit format for the wire:
    bfloat16 travels as float32, and XLA does not multiply float16 there.
    """
    in_full = exact.all_reduce

    def in_float16(x, residual, axis_name, fmt):
        y, residual = in_full(x.astype(jnp.float16), residual, axis_name, fmt)
        return y.astype(x.dtype), residual

    exact.all_reduce = in_float16


def _case(entries: dict) -> Case:
    config = entries["config"]
    return Case(
        name=entries["name"],
        config=None if config is None else _config(config),
        dtype=entries["dtype"],
    )


def _config(entries: dict) -> echo.EchoConfig:
    entries = dict(entries)
    fmt = echo.WireFormat(**entries.pop("format", {}))
    return echo.EchoConfig(format=fmt, **entries)


def main() -> None:
    rank, processes, address, interface = sys.argv[1:]
    if int(processes) > 1:
        jax.distributed.initialize(address, int(processes), int(rank), **PATIENCE)
    mesh = jax.make_mesh((jax.device_count(),), ("tensor",), (AxisType.Auto,))
    serve(Worker(mesh, interface))


if __name__ == "__main__":
    main()
