"""Work that comes out the same on devices of one process and of several.

Every result is the copy or the part of each rank, stacked along a leading axis that is
cut over all devices, so that each process can hand over its own.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import echo_jax as echo
from echo_jax import models
from echo_jax.models import DecoderConfig, GenerationConfig
from echo_jax.records import RecordWriter
from echo_jax.training import DataConfig, MeshConfig, TrainConfig, compare, prepare

FIXTURE = pathlib.Path(__file__).parents[1] / "models" / "fixtures" / "qwen3"
CALLS = 2

Results = dict[str, np.ndarray | jax.Array]


def config(**changes) -> echo.EchoConfig:
    return echo.EchoConfig(min_bytes=0, **changes)


def run_all(ranks: int) -> Results:
    """Everything, on a mesh of so many devices."""
    mesh = _mesh(ranks)
    results = _sums(mesh, "float32", pieces=1) | _sums(mesh, "bfloat16", pieces=3)
    return results | _parts(mesh) | _gradients(mesh) | _training(ranks) | _text(ranks)


def one_sum(ranks: int) -> None:
    """A sum in four bits, waited for."""
    results = _on_ranks(
        lambda x: {"y": echo.echo_psum(x, None, "tp", config=config())[0]},
        _mesh(ranks),
        64,
    )
    jax.block_until_ready(results)


def _mesh(ranks: int, axis_name: str = "tp") -> Mesh:
    return Mesh(np.array(jax.devices()[:ranks]), (axis_name,))


def _on_ranks(body, mesh: Mesh, *shape: int, dtype="float32") -> Results:
    """``body`` of each rank's Gaussian values of a shape; its dict, stacked."""

    def draw(index):
        rank = index[0].start or 0  # one device a slice
        values = np.random.default_rng(rank).standard_normal((1, *shape))
        return values.astype(jnp.dtype(dtype))

    spec = PartitionSpec("tp")
    x = jax.make_array_from_callback(
        (mesh.size, *shape), NamedSharding(mesh, spec), draw
    )

    def local(x):
        return {name: value[None] for name, value in body(x[0]).items()}

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))(x)


def _sums(mesh: Mesh, dtype: str, *, pieces: int) -> Results:
    """Calls in a row; then everything owed is paid exactly."""
    chosen = config(num_chunks=pieces)

    def body(x):
        results = {}
        residual = echo.init_residual(x, "tp", config=chosen)
        for call in range(CALLS):
            y, residual = echo.echo_psum(x, residual, "tp", config=chosen)
            results[f"psum {dtype}, call {call}"] = y
        results[f"owed {dtype}"] = residual.send
        results[f"owed sum {dtype}"] = residual.reduce
        y, _ = echo.flush(x, residual, "tp", config=chosen)
        return results | {f"flush {dtype}": y}

    return _on_ranks(body, mesh, 7, 100, dtype=dtype)


def _parts(mesh: Mesh) -> Results:
    """Scatter and gather, two calls each."""

    def body(x):
        results = {}
        residual = echo.init_residual(x, "tp", config=config())
        for call in range(2):
            y, residual = echo.echo_psum_scatter(x, residual, "tp", config=config())
            results[f"psum_scatter, call {call}"] = y
        residual = echo.init_residual(x, "tp", config=config())
        for call in range(2):
            y, residual = echo.echo_all_gather(x, residual, "tp", config=config())
            results[f"all_gather, call {call}"] = y
        return results

    return _on_ranks(body, mesh, 8, 100)


def _gradients(mesh: Mesh) -> Results:
    """Both directions of a small network, its sums in four bits each way."""

    def loss(h, weights):
        def layer(carry, w):
            h, residual = carry
            x, residual = echo.echo_pvary(h, residual, "tp", config=config())
            y, residual = echo.echo_psum(
                jnp.tanh(x * w), residual, "tp", config=config()
            )
            return (h + y, residual), None

        residual = echo.init_residual(h, "tp", config=config())
        (h, _), _ = lax.scan(layer, (h, residual), weights)
        return jnp.mean(h**2)

    def body(x):
        h = jnp.linspace(-1, 1, x[0].size).reshape(x[0].shape)
        value, (h_bar, w_bar) = jax.value_and_grad(loss, argnums=(0, 1))(h, x)
        return {"loss": value, "stream's gradient": h_bar, "gradient": w_bar}

    return _on_ranks(body, mesh, 3, 4, 64)


def _training(ranks: int) -> Results:
    """The losses of ``echo-jax train`` on a (data, tensor) mesh, three variants."""
    runs = prepare(
        TrainConfig(
            model=DecoderConfig(
                num_layers=1,
                width=32,
                num_heads=2,
                num_kv_heads=2,
                head_dim=16,
                mlp_width=64,
            ),
            data=DataConfig(batch_size=4, length=16, heldout_batches=2),
            mesh=MeshConfig(data_ranks=ranks // 2, tensor_ranks=2),
            variants=("echo",),
            steps=4,
        )
    )
    results, _ = compare(
        runs, RecordWriter(pathlib.Path("/dev/null")), progress=_ignore
    )
    return {
        f"training {result.variant}": np.array([*result.losses, *result.heldout])
        for result in results
    }


def _text(ranks: int) -> Results:
    """Tokens after two prompts, the prefill in four bits, greedy and drawn."""
    model = models.load(FIXTURE, _mesh(ranks, "tensor"))
    plan = echo.DepthPlan.uniform(config())
    prompts = [[5, 9, 200], list(range(40, 60))]
    chosen = GenerationConfig(max_new_tokens=6, temperature=0.8, stop_ids=())
    texts = models.generate(model, prompts, config=chosen, plan=plan)
    return {"drawn tokens": np.array(texts)}


def _ignore(*progress) -> None:
    pass
