"""The same training steps on two backends: do the kernels change the loss?

Simulates tensor-parallel ranks on one device by ``vmap``, the code path of shard_map,
and trains a decoder for some steps with each backend from the same parameters on the
same text. The exact sums are run too: their distance is the scale to judge by.

    python experiments/kernel_training.py            # on a GPU: Triton against XLA
    python experiments/kernel_training.py --tiny     # on a CPU: XLA against itself
"""

import dataclasses
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import optax
import tyro
from flax import nnx

import echo_jax as echo
from echo_jax.config import Backend
from echo_jax.layers import join_ranks, merge_module, split_module, split_ranks
from echo_jax.models import Decoder, DecoderConfig
from echo_jax.records import Record, RecordWriter
from echo_jax.training import DataConfig
from echo_jax.training import data as text_data

RESULTS = pathlib.Path(__file__).parent / "results" / "kernel_training.jsonl"
AXIS = "tensor"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is trained."""

    backends: tuple[Backend, ...] = ("triton", "xla")  # the second is the baseline
    ranks: int = 8  # simulated
    steps: int = 50
    layers: int = 8
    width: int = 512
    batch_size: int = 8  # sequences in a step
    length: int = 512  # tokens in a sequence
    residual_dtype: str = "bfloat16"
    seed: int = 0
    out: pathlib.Path = RESULTS
    tiny: bool = False  # one small layer, two steps

    def model(self) -> DecoderConfig:
        return DecoderConfig(
            num_layers=self.layers,
            width=self.width,
            num_heads=8,
            num_kv_heads=8,
            head_dim=self.width // 8,
            mlp_width=self.width * 5 // 2 // 8 * 8,
            dtype="bfloat16",
        )


def train(settings: Settings, plan: echo.DepthPlan, text) -> tuple[list[float], float]:
    """The loss of every step, and the median time of one in seconds."""

    def build():
        return Decoder(settings.model(), rngs=nnx.Rngs(settings.seed))

    graphdef, _, specs = split_module(jax.eval_shape(build))
    params = jax.jit(lambda: split_module(build())[1])()
    optimizer = optax.adamw(1e-3)

    def local(params, tokens):
        def loss(params):
            module = merge_module(graphdef, params)
            return module.loss(tokens[:, :-1], tokens[:, 1:], plan=plan)[0]

        return jax.value_and_grad(loss)(params)

    @jax.jit
    def step(params, opt_state, tokens):
        cut, in_axes = split_ranks(params, specs, AXIS, settings.ranks)
        ranked = jax.vmap(local, in_axes=(in_axes, None), axis_name=AXIS)
        losses, gradients = ranked(cut, tokens)
        gradient = join_ranks(gradients, specs, AXIS)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, losses[0]

    opt_state, losses, seconds = optimizer.init(params), [], []
    sizes = DataConfig(batch_size=settings.batch_size, length=settings.length)
    for index in range(settings.steps):
        batch = text_data.draw_batch(text, sizes=sizes, seed=settings.seed, step=index)
        start = time.perf_counter()
        params, opt_state, loss = step(params, opt_state, jnp.asarray(batch))
        losses.append(float(loss))
        seconds.append(time.perf_counter() - start)
    return losses, statistics.median(seconds[1:])


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    if settings.tiny:
        settings = dataclasses.replace(
            settings,
            backends=("auto", "xla"),
            ranks=2,
            steps=2,
            layers=1,
            width=64,
            batch_size=1,
            length=32,
        )
    text, _ = text_data.split_heldout(text_data.read_text(None), settings.length)
    writer, curves = RecordWriter(settings.out), {}
    chosen = dataclasses.asdict(settings)
    del chosen["out"], chosen["seed"], chosen["backends"], chosen["tiny"]
    config = echo.EchoConfig(min_bytes=0, residual_dtype=settings.residual_dtype)
    plans = {
        backend: echo.DepthPlan.uniform(dataclasses.replace(config, backend=backend))
        for backend in settings.backends
    }
    plans["exact"] = echo.DepthPlan.uniform(config.exact())
    for name, plan in plans.items():
        losses, seconds = train(settings, plan, text)
        curves[name] = losses
        print(
            f"{name:8} loss {losses[-1]:.5f}, {1e3 * seconds:.1f} ms a step", flush=True
        )
        for metric, value, unit in (
            ("final_loss", losses[-1], "nats"),
            ("step_ms", 1e3 * seconds, "ms"),
        ):
            writer.write(
                Record(
                    experiment="kernel_training",
                    metric=metric,
                    value=value,
                    unit=unit,
                    seed=settings.seed,
                    config={"backend": name, **chosen},
                )
            )
    baseline = curves[settings.backends[1]]
    for name in (settings.backends[0], "exact"):
        pairs = zip(curves[name], baseline, strict=True)
        largest = max(abs(one - other) / other for one, other in pairs)
        print(f"{name} is at most {100 * largest:.3f} % from {settings.backends[1]}")
        writer.write(
            Record(
                experiment="kernel_training",
                metric="largest_loss_difference_percent",
                value=100 * largest,
                unit="%",
                baseline=settings.backends[1],
                seed=settings.seed,
                config={"backend": name, **chosen},
            )
        )


if __name__ == "__main__":
    main()
