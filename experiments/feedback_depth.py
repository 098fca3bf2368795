"""Does the harm of 4-bit sums stay flat with depth, as the bound says it does?

Trains decoders of one width and growing depth, each three times from the same
parameters on the same text: exact sums, 4 bits both ways with feedback, and without.
Then the exactly trained one reads held-out text with its sums in 4 bits. Ranks of the
tensor axis are simulated by ``vmap``, the code path of shard_map; layers are scanned,
so that a deep model compiles no longer than a shallow one.

    python experiments/feedback_depth.py            # minutes on an H200
    python experiments/feedback_depth.py --tiny     # under a minute on a CPU

Held-out gaps of trained models differ by a few tenths of a percent from seed to seed;
the divergence of logits does not.
"""

import dataclasses
import functools
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import optax
import tyro
from flax import nnx

import echo_jax as echo
from echo_jax.collectives import exact
from echo_jax.config import Backend
from echo_jax.layers import (
    join_ranks,
    merge_module,
    split_module,
    split_ranks,
    vocab_parallel_cross_entropy,
)
from echo_jax.models import Decoder, DecoderConfig
from echo_jax.records import Record, RecordWriter
from echo_jax.training import DataConfig, OptimizerConfig, make_optimizer
from echo_jax.training import data as text_data

RESULTS = pathlib.Path(__file__).parent / "results" / "feedback_depth.jsonl"
AXIS = "tensor"
EXACT, FED, PLAIN = "exact", "echo", "no-feedback"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is trained and measured."""

    depths: tuple[int, ...] = (4, 8, 16, 32, 64)  # layers; two sums each
    width: int = 256  # of the stream, at every depth
    bits: int = 4  # of a code
    ranks: int = 8  # simulated
    steps: int = 200  # of each training
    batch_size: int = 8  # sequences in a step
    length: int = 256  # tokens in a sequence
    heldout_batches: int = 8  # on which models are compared
    learning_rate: float = 2e-3
    # Text to train on, read byte by byte; None for source code of Python.
    text: pathlib.Path | None = None
    backend: Backend = "auto"
    seed: int = 0
    out: pathlib.Path = RESULTS
    tiny: bool = False  # two small models, two steps

    @property
    def sizes(self) -> DataConfig:
        """Of the batches."""
        return DataConfig(
            batch_size=self.batch_size,
            length=self.length,
            heldout_batches=self.heldout_batches,
        )

    def model(self, layers: int, dtype: str) -> DecoderConfig:
        """The decoder of one depth, computing in a dtype."""
        return DecoderConfig(
            dtype=dtype,
            num_layers=layers,
            width=self.width,
            num_heads=8,
            num_kv_heads=8,
            head_dim=max(2, self.width // 8),
            mlp_width=self.width * 5 // 2 // 8 * 8,
        )

    def plans(self) -> dict[str, echo.DepthPlan]:
        """The sums of each variant; small ones go through the codec as well."""
        config = echo.EchoConfig(
            format=echo.WireFormat(bits=self.bits), min_bytes=0, backend=self.backend
        )
        plain = dataclasses.replace(config, feedback=False)
        return {
            EXACT: echo.DepthPlan.uniform(config.exact()),
            FED: echo.DepthPlan.uniform(config),
            PLAIN: echo.DepthPlan.uniform(plain),
        }


class DepthModel:
    """A decoder of one depth on simulated ranks.

    It trains in bfloat16 and reads in float32, in which divergences are those of the
    sums alone.
    """

    def __init__(self, settings: Settings, layers: int):
        def build(dtype: str) -> Decoder:
            config = settings.model(layers, dtype)
            return Decoder(config, rngs=nnx.Rngs(settings.seed))

        def structure(dtype: str):
            return split_module(jax.eval_shape(lambda: build(dtype)))

        self.settings = settings
        self.trainer, _, self.specs = structure("bfloat16")
        self.reader = structure("float32")[0]
        self.first = jax.jit(lambda: split_module(build("bfloat16"))[1])()
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(self.first))

    def on_ranks(self, graphdef: nnx.GraphDef, function: Callable, params, *args):
        """``function(decoder, *args)`` on every rank, results with a leading axis."""
        cut, in_axes = split_ranks(params, self.specs, AXIS, self.settings.ranks)

        def local(params):
            return function(merge_module(graphdef, params), *args)

        return jax.vmap(local, in_axes=(in_axes,), axis_name=AXIS)(cut)

    def train(self, plan: echo.DepthPlan, text) -> tuple[dict, float]:
        """Trained parameters, and the median seconds of a step."""
        settings = self.settings
        rate = OptimizerConfig(learning_rate=settings.learning_rate)
        optimizer = make_optimizer(rate, settings.steps)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params, opt_state, tokens):
            loss, grads = self._gradient(params, plan, tokens)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        params = jax.tree.map(jnp.copy, self.first)
        opt_state, seconds = optimizer.init(params), []
        for index in range(settings.steps):
            batch = text_data.draw_batch(
                text, sizes=settings.sizes, seed=settings.seed, step=index
            )
            start = time.perf_counter()
            params, opt_state, loss = step(params, opt_state, jnp.asarray(batch))
            loss.block_until_ready()
            seconds.append(time.perf_counter() - start)
        return params, statistics.median(seconds[1:])

    def _gradient(self, params, plan: echo.DepthPlan, tokens):
        def one_rank(decoder, tokens):
            graphdef, params = nnx.split(decoder)

            def loss(params):
                module = nnx.merge(graphdef, params)
                return module.loss(tokens[:, :-1], tokens[:, 1:], plan=plan)[0]

            value, grads = jax.value_and_grad(loss)(params)
            return value, nnx.to_pure_dict(grads)

        losses, grads = self.on_ranks(self.trainer, one_rank, params, tokens)
        return losses[0], join_ranks(grads, self.specs, AXIS)

    @functools.cached_property
    def compare(self) -> Callable:
        """A jitted ``(params, tokens) -> loss and divergence of each variant``."""
        plans = self.settings.plans()

        def one_rank(decoder, tokens):
            logits = {
                name: decoder(tokens[:, :-1], plan=plan)[0]
                for name, plan in plans.items()
            }
            return {
                name: {
                    "loss": jnp.mean(
                        vocab_parallel_cross_entropy(found, tokens[:, 1:], AXIS)
                    ),
                    "kl": divergence(logits[EXACT], found),
                }
                for name, found in logits.items()
            }

        def compare(params, tokens):
            found = self.on_ranks(self.reader, one_rank, params, tokens)
            return jax.tree.map(lambda leaf: leaf[0], found)

        return jax.jit(compare)

    def heldout(self, params, text) -> dict[str, dict[str, list[float]]]:
        """For each variant the loss and the divergence from exact of every batch."""
        found: dict[str, dict[str, list[float]]] = {}
        for index in range(self.settings.heldout_batches):
            batch = text_data.heldout_batch(
                text, sizes=self.settings.sizes, index=index
            )
            for name, figures in self.compare(params, jnp.asarray(batch)).items():
                for metric, value in figures.items():
                    variant = found.setdefault(name, {})
                    variant.setdefault(metric, []).append(float(value))
        return found


def divergence(wanted: jax.Array, found: jax.Array) -> jax.Array:
    """Mean KL divergence in nats of logits whose vocabulary is cut over ranks."""
    wanted, found = log_softmax(wanted), log_softmax(found)
    # Padded columns have no probability.
    terms = jnp.where(wanted > -1e30, jnp.exp(wanted) * (wanted - found), 0.0)
    return jnp.mean(exact.psum(jnp.sum(terms, axis=-1), AXIS))


def log_softmax(logits: jax.Array) -> jax.Array:
    """This rank's part of it."""
    logits = logits.astype(jnp.float32)
    peak = jax.lax.pmax(jnp.max(logits, axis=-1, keepdims=True), AXIS)
    total = jnp.sum(jnp.exp(logits - peak), axis=-1, keepdims=True)
    return logits - peak - jnp.log(exact.psum(total, AXIS))


def gap(found: list[float], wanted: list[float]) -> tuple[float, float]:
    """Percent by which losses lie above others, and its spread over batches."""
    gaps = [100 * (a / b - 1) for a, b in zip(found, wanted, strict=True)]
    whole = 100 * (statistics.fmean(found) / statistics.fmean(wanted) - 1)
    return whole, statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else 0.0


def figures(model: DepthModel, text, heldout) -> Iterator[tuple]:
    """``(metric, value, unit, spread, variant, sums)`` of one depth.

    ``sums`` says which: those of training and reading, or those of reading alone.
    """
    plans, losses = model.settings.plans(), {}
    for name, plan in plans.items():
        params, seconds = model.train(plan, text)
        found = model.heldout(params, heldout)
        losses[name] = found[name]["loss"]
        yield "step_ms", 1e3 * seconds, "ms", None, name, "training"
        spread = statistics.stdev(losses[name]) if len(losses[name]) > 1 else None
        mean = statistics.fmean(losses[name])
        yield "heldout_loss", mean, "nats", spread, name, "training"
        if name != EXACT:
            yield (
                "heldout_gap_percent",
                *_with_unit(gap(losses[name], losses[EXACT])),
                name,
                "training",
            )
            continue
        for other in (FED, PLAIN):
            kl = found[other]["kl"]
            spread = statistics.stdev(kl) if len(kl) > 1 else None
            yield "logit_kl", statistics.fmean(kl), "nats", spread, other, "reading"
            yield (
                "heldout_gap_percent",
                *_with_unit(gap(found[other]["loss"], losses[EXACT])),
                other,
                "reading",
            )


def _with_unit(found: tuple[float, float]) -> tuple[float, str, float]:
    return found[0], "%", found[1]


def growth(divergences: dict[tuple[str, int], float]) -> Iterator[tuple[str, float]]:
    """By variant: the divergence of the deepest model over that of the shallowest."""
    for variant in (FED, PLAIN):
        depths = [depth for name, depth in divergences if name == variant]
        low, high = (divergences[variant, f(depths)] for f in (min, max))
        if low > 0:
            yield variant, high / low


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    if settings.tiny:
        settings = dataclasses.replace(
            settings,
            depths=(1, 2),
            width=32,
            ranks=2,
            steps=2,
            batch_size=2,
            length=32,
            heldout_batches=2,
        )
    text, heldout = text_data.split_heldout(
        text_data.read_text(settings.text), settings.length
    )
    writer, divergences = RecordWriter(settings.out), {}
    chosen = dataclasses.asdict(settings)
    for name in ("depths", "out", "seed", "tiny", "text"):
        del chosen[name]
    chosen["text"] = "Python" if settings.text is None else settings.text.name
    tokens = settings.steps * settings.batch_size * settings.length

    def write(metric, value, unit, *, spread=None, **config):
        writer.write(
            Record(
                experiment="feedback_depth",
                metric=metric,
                value=value,
                unit=unit,
                spread=spread,
                baseline=EXACT if metric != "heldout_loss" else None,
                seed=settings.seed,
                config={**config, "tokens": tokens, **chosen},
            )
        )

    for layers in settings.depths:
        start = time.perf_counter()
        model = DepthModel(settings, layers)
        for metric, value, unit, spread, variant, sums in figures(model, text, heldout):
            write(
                metric, value, unit, spread=spread, variant=variant, sums=sums,
                layers=layers, parameters=model.parameters,
            )  # fmt: skip
            print(
                f"{layers:3} layers {sums:9} {variant:12} {metric}: {value:.5g} {unit}"
            )
            if metric == "logit_kl":
                divergences[variant, layers] = value
        seconds = time.perf_counter() - start
        print(f"{layers:3} layers: {seconds:.0f} s in all", flush=True)
    for variant, ratio in growth(divergences):
        write("logit_kl_growth", ratio, "1", variant=variant, sums="reading")
        print(f"{variant}: divergence grows {ratio:.2f}x from first to last depth")


if __name__ == "__main__":
    main()
