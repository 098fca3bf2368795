"""How wrong are gradients whose all-reduces travel in few bits?

Trains a decoder with exact sums, then compares its gradient with the gradient of the
same parameters and batches when the sums of simulated tensor-parallel ranks are
quantized: both ways, backward only, with and without feedback, and with the backward
sum after the norm instead of on the stream.

    python experiments/gradient_error.py            # minutes on two CPU cores
    python experiments/gradient_error.py --tiny     # seconds, for CI
"""

import dataclasses
import pathlib
import statistics

import jax
import jax.numpy as jnp
import tyro
from flax import nnx

import echo_jax as echo
from echo_jax.layers import join_ranks, merge_module, split_module, split_ranks
from echo_jax.models import Decoder, DecoderConfig, DecoderLayer
from echo_jax.records import Record, RecordWriter
from echo_jax.training import (
    DataConfig,
    MeshConfig,
    OptimizerConfig,
    create_state,
    make_mesh,
    make_optimizer,
    make_train_step,
)
from echo_jax.training import data as text_data

RESULTS = pathlib.Path(__file__).parent / "results" / "gradient_error.jsonl"
AXIS = "tensor"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is trained and measured."""

    layers: int = 12  # depth
    width: int = 128  # of the stream
    steps: int = 300  # of exact training before gradients are compared
    ranks: int = 8  # simulated
    bits: int = 4  # of a code
    block_size: int = 64  # values that share a scale
    batch_size: int = 16  # sequences in a step
    length: int = 128  # tokens in a sequence
    batches: int = 4  # over which gradient errors are averaged
    seed: int = 0
    out: pathlib.Path = RESULTS
    tiny: bool = False  # two layers, a few steps

    def model(self) -> DecoderConfig:
        return DecoderConfig(
            num_layers=self.layers,
            width=self.width,
            num_heads=8,
            num_kv_heads=8,
            head_dim=16,
            mlp_width=352,
        )


class AfterNormLayer(DecoderLayer):
    """The usual place of the mirror: behind the norm, before the first product."""

    def __call__(self, stream, residual, plan):
        blocks = ((self.attention_norm, self.attention), (self.mlp_norm, self.mlp))
        for (norm, block), forward, backward in zip(
            blocks, plan.forward, plan.backward, strict=True
        ):
            # The norm sees whole gradients here, so its scale needs no sum.
            square = jnp.mean(jnp.square(stream), axis=-1, keepdims=True)
            x = stream * jax.lax.rsqrt(square + norm.epsilon) * norm.scale[...]
            x, residual = echo.echo_pvary(x, residual, self.axis_name, config=backward)
            y, residual = block(x, residual, config=forward)
            stream = stream + y
        return stream, residual


class AfterNormDecoder(Decoder):
    layer_type = AfterNormLayer


def variants(settings: Settings) -> dict[str, tuple[type[Decoder], echo.DepthPlan]]:
    """Model and plan of each way to take the gradient."""
    fmt = echo.WireFormat(bits=settings.bits, block_size=settings.block_size)
    fed = echo.DepthPlan.uniform(echo.EchoConfig(format=fmt, min_bytes=0))
    plain = echo.DepthPlan.uniform(
        echo.EchoConfig(format=fmt, min_bytes=0, feedback=False)
    )
    exact = echo.DepthPlan.uniform(fed.body.exact())
    return {
        "exact": (Decoder, exact),
        "both ways, feedback": (Decoder, fed),
        "both ways, no feedback": (Decoder, plain),
        "backward, feedback, stream": (Decoder, exact.with_backward(fed)),
        "backward, feedback, after norm": (AfterNormDecoder, exact.with_backward(fed)),
        "backward, no feedback": (Decoder, exact.with_backward(plain)),
    }


def train(settings: Settings, text):
    """Parameters after some steps of exact training, and their specs."""
    mesh = make_mesh(MeshConfig(data_ranks=1, tensor_ranks=1))
    optimizer = make_optimizer(OptimizerConfig(), settings.steps)
    state, parts = create_state(
        settings.model(), mesh, optimizer=optimizer, seed=settings.seed
    )
    exact = echo.DepthPlan.uniform(echo.EchoConfig().exact())
    step = make_train_step(parts, mesh, optimizer=optimizer, plan=exact)
    for index in range(settings.steps):
        state, metrics = step(state, batch(settings, text, index))
        if index % 50 == 0 or index + 1 == settings.steps:
            print(f"step {index + 1}: loss {float(metrics.loss):.4f}", flush=True)
    return state.params, parts.specs


def batch(settings: Settings, text, index: int) -> jax.Array:
    return jnp.asarray(
        text_data.draw_batch(
            text,
            sizes=DataConfig(batch_size=settings.batch_size, length=settings.length),
            seed=settings.seed,
            step=index,
        )
    )


def gradient_function(settings: Settings, model: type[Decoder], plan, params, specs):
    """A jitted ``tokens -> gradient`` over simulated ranks."""
    build = lambda: model(settings.model(), rngs=nnx.Rngs(0))  # noqa: E731
    graphdef, _, _ = split_module(jax.eval_shape(build))
    cut, in_axes = split_ranks(params, specs, AXIS, settings.ranks)

    def loss(params, tokens):
        module = merge_module(graphdef, params)
        return module.loss(tokens[:, :-1], tokens[:, 1:], plan=plan)[0]

    ranked = jax.vmap(jax.grad(loss), in_axes=(in_axes, None), axis_name=AXIS)
    return jax.jit(lambda tokens: join_ranks(ranked(cut, tokens), specs, AXIS))


def relative_error(gradient, exact) -> float:
    difference = jax.tree.map(jnp.subtract, gradient, exact)
    return float(_norm(difference) / _norm(exact))


def _norm(tree) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))


def measure(settings: Settings) -> dict[str, list[float]]:
    """Relative gradient errors of each variant, one a batch."""
    text, _ = text_data.split_heldout(text_data.read_text(None), settings.length)
    params, specs = train(settings, text)
    batches = [
        batch(settings, text, settings.steps + index)
        for index in range(settings.batches)
    ]
    errors: dict[str, list[float]] = {}
    references: list = []
    for name, (model, plan) in variants(settings).items():
        function = gradient_function(settings, model, plan, params, specs)
        gradients = [function(tokens) for tokens in batches]
        if name == "exact":
            references = gradients
            continue
        errors[name] = [
            relative_error(gradient, reference)
            for gradient, reference in zip(gradients, references, strict=True)
        ]
        print(f"{name:32} {statistics.fmean(errors[name]):.4f}", flush=True)
    return errors


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    if settings.tiny:
        settings = dataclasses.replace(
            settings, layers=2, steps=5, ranks=2, batch_size=2, length=32, batches=2
        )
    writer = RecordWriter(settings.out)
    config = dataclasses.asdict(settings)
    del config["out"], config["seed"]
    for name, errors in measure(settings).items():
        writer.write(
            Record(
                experiment="gradient_error",
                metric="relative_gradient_error",
                value=statistics.fmean(errors),
                unit="1",
                spread=statistics.pstdev(errors),
                baseline="exact",
                seed=settings.seed,
                config={"variant": name, **config},
            )
        )


if __name__ == "__main__":
    main()
