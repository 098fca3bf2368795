"""Going on from a checkpoint in several processes, one of which cannot read it.

Each check prints a line that says what this process found; the test compares them.
"""

import pathlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import echo_jax as echo
from echo_jax.training import (
    CheckpointWarning,
    GradientSync,
    GradientSyncConfig,
    MeshConfig,
    TrainState,
    fit_state,
    make_mesh,
)
from echo_jax.training.checkpoint import Checkpoints, Identity, Snapshot


def run_all(folder: pathlib.Path, rank: int) -> None:
    mesh = make_mesh(MeshConfig(data_ranks=2, tensor_ranks=1))
    fit_residuals(mesh)
    restore(folder, mesh, rank)


def fit_residuals(mesh) -> None:
    """What four data ranks owed, read by two that are processes of their own."""
    sums = echo.EchoConfig(min_bytes=0)
    specs = {"w": PartitionSpec()}
    sync = GradientSync(config=GradientSyncConfig(sums=sums), specs=specs)
    whole = NamedSharding(mesh, PartitionSpec())
    params = {"w": jax.device_put(np.zeros((128, 128), np.float32), whole)}
    fresh = sync.create(params, mesh)
    for ranks in (2, 4):
        saved = _owed_by(ranks, fresh, whole)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fitted, _ = fit_state(saved, fresh)
        owed = [float(jnp.sum(part)) for part in fitted.send]
        print(f"found fit {ranks} {len(caught)} {owed}", flush=True)


def _owed_by(ranks: int, fresh, whole):
    """Residuals of so many data ranks, whole on every device; each value is one."""
    blocks = [part.shape[1] * part.shape[2] // ranks for part in fresh.send]
    size = fresh.send[0].shape[-1]

    def ones(*shape):
        return jax.device_put(np.ones(shape, np.float32), whole)

    layout = np.asarray(fresh.layout.addressable_data(0))[:1]
    return fresh._replace(
        layout=jax.device_put(np.repeat(layout, ranks), whole),
        send=tuple(ones(ranks, ranks, n, size) for n in blocks),
        reduce=tuple(ones(ranks, n, size) for n in blocks),
    )


def restore(folder: pathlib.Path, mesh, rank: int) -> None:
    """The second process cannot read the newest of two checkpoints."""
    identity = Identity(config={}, data="text", ranks={"data": 2, "tensor": 1})
    checkpoints = Checkpoints(folder, keep=3, identity=identity)
    for step in (2, 4):
        checkpoints.save(Snapshot(_state(mesh, step), {"next": step}, [1.0]))
    checkpoints.close()
    state, read = _state(mesh, 0), checkpoints._read
    shapes = jax.eval_shape(lambda: state)
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    for fault in (MemoryError, OSError):

        def fails(step, items, fault=fault):
            if rank == 1 and step == 4 and items:
                raise fault("not here")
            return read(step, items)

        checkpoints._read = fails
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                found = checkpoints.restore(shapes, places)
            except (MemoryError, RuntimeError) as error:
                print(f"found {type(error).__name__}: {error}", flush=True)
                continue
        told = sum(issubclass(w.category, CheckpointWarning) for w in caught)
        value = float(jnp.sum(found.state.params["w"]))
        print(f"found {found.position['next']} {value} {told}", flush=True)
    checkpoints.save(Snapshot(_state(mesh, 4), {"next": 4}, [1.0]))
    checkpoints.close()


def _state(mesh, step: int) -> TrainState:
    cut = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())
    return TrainState(
        step=jax.device_put(np.int32(step), whole),
        params={"w": jax.device_put(np.full(8, step, np.float32), cut)},
        opt_state=(jax.device_put(np.zeros(3, np.float32), whole),),
        key=jax.device_put(np.zeros(2, np.uint32), whole),
    )
