import contextlib
import dataclasses
import gc
import pathlib
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from echo_jax.models import DecoderConfig
from echo_jax.records import RecordWriter
from echo_jax.training import (
    CheckpointConfig,
    CheckpointWarning,
    DataConfig,
    MeshConfig,
    TrainConfig,
    TrainingRun,
    TrainState,
    compare,
    make_mesh,
    prepare,
    residual_rms,
)
from echo_jax.training.checkpoint import Checkpoints, Identity, Snapshot
from echo_jax.training.fingerprint import fingerprint
from echo_jax.training.run_log import RunLog
from tests.ranks import bits_of

TINY = TrainConfig(
    model=DecoderConfig(
        num_layers=1, width=32, num_heads=4, num_kv_heads=4, head_dim=8, mlp_width=32
    ),
    data=DataConfig(batch_size=2, length=16, heldout_batches=1),
    mesh=MeshConfig(data_ranks=1, tensor_ranks=2),
    checkpoint=CheckpointConfig(every=2, keep=2),
    steps=6,
    log_every=2,
)
IDENTITY = Identity(config={"steps": 6}, data="abc", ranks={"data": 1, "tensor": 2})


def nothing(*_):
    pass


def start(folder, config=TINY, **kwargs):
    writer = RecordWriter(folder / "metrics.jsonl")
    return TrainingRun(prepare(config), "echo", writer=writer, **kwargs)


def train(folder, steps=TINY.steps, config=TINY, **kwargs):
    """A run that was stopped after so many steps, or all of them."""
    run = start(folder, config, **kwargs)
    run.train(nothing, lambda: run.steps_done >= steps)
    run.close()
    return run


def same_bits(one, other) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(bits_of(a).tobytes() == bits_of(b).tobytes() for a, b in pairs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing interrupted."""
    return train(tmp_path_factory.mktemp("whole"))


def test_resuming_changes_no_bit(tmp_path, whole):
    first = train(tmp_path, steps=3)  # between two checkpoints: stopping saves too
    again = train(tmp_path, resume=True)
    assert (first.steps_done, again.steps_done) == (3, 6)
    assert again.result.losses == whole.result.losses
    assert same_bits(again.state, whole.state)
    assert again.notes == ()


def test_a_complete_run_is_not_trained_again(whole):
    folder = whole.writer.path.parent
    again = train(folder, resume=True)
    assert again.result.step_seconds is None
    assert same_bits(again.state, whole.state)
    names = {path.name for path in (folder / "checkpoints" / "echo").iterdir()}
    assert names == {"4", "6"}  # as many as are kept, the last step among them


@pytest.mark.parametrize(
    "mesh",
    [
        MeshConfig(data_ranks=2, tensor_ranks=4),
        pytest.param(
            MeshConfig(data_ranks=1, tensor_ranks=2, simulated=True),
            marks=pytest.mark.long,
        ),
    ],
)
def test_another_mesh_cuts_the_same_state_anew(tmp_path, mesh):
    saved = train(tmp_path, steps=4)
    again = start(tmp_path, dataclasses.replace(TINY, mesh=mesh), resume=True)
    assert same_bits(again.state, saved.state)
    notes = "".join(again.notes)
    assert ("resharded for 2 data x 4 tensor ranks" in notes) is not mesh.simulated
    again.train(nothing, lambda: False)
    assert again.is_complete
    again.close()


def test_c22_gradients_in_4_bits_are_resumed_with_what_is_owed(tmp_path):
    config = dataclasses.replace(
        TINY,
        model=dataclasses.replace(TINY.model, width=64),
        mesh=MeshConfig(data_ranks=2, tensor_ranks=1),
        data=dataclasses.replace(TINY.data, batch_size=4),
        gradient_bits=4,
        steps=4,
    )
    whole = train(tmp_path / "whole", config=config)
    train(tmp_path / "cut", steps=1, config=config)
    again = train(tmp_path / "cut", config=config, resume=True)
    assert float(residual_rms(again.state.gradient_residual)) > 0
    assert same_bits(again.state, whole.state)
    for mesh, words in (
        (MeshConfig(data_ranks=4, tensor_ranks=1), "mean of what those 2 owed"),
        (MeshConfig(data_ranks=1, tensor_ranks=2), "reset to zero"),
    ):
        moved = start(
            tmp_path / "cut", dataclasses.replace(config, mesh=mesh), resume=True
        )
        assert same_bits(moved.state.params, whole.state.params)
        assert "resharded" in moved.notes[0]
        assert words in moved.notes[1]


def residual_state(mesh, fill):
    """A state with a residual of every rank, as a gradient sync leaves it."""
    places = (PartitionSpec(), PartitionSpec(("data", "tensor")))
    whole, cut = (NamedSharding(mesh, place) for place in places)
    size = mesh.size
    state = TrainState(
        step=jnp.int32(2),
        params={"w": jnp.arange(8.0)},
        opt_state=(jnp.ones(3),),
        key=jnp.zeros(2, jnp.uint32),
        gradient_residual={"w": jnp.full(4 * size, fill) + jnp.arange(4.0 * size)},
    )
    where = TrainState(whole, {"w": whole}, (whole,), whole, {"w": cut})
    return jax.device_put(state, where), where


def test_c22_persistent_residuals_come_back_whole(tmp_path):
    two = make_mesh(MeshConfig(data_ranks=1, tensor_ranks=2))
    state, where = residual_state(two, 0.5)
    checkpoints = Checkpoints(tmp_path, keep=2, identity=IDENTITY)
    checkpoints.save(Snapshot(state, {"next_index": 2}, [3.0, 2.0]))
    checkpoints.close()
    again = checkpoints.restore(jax.eval_shape(lambda: state), where)
    assert same_bits(again.state, state)
    assert again[1:] == ({"next_index": 2}, [3.0, 2.0], ())
    four = make_mesh(MeshConfig(data_ranks=2, tensor_ranks=2))
    other, where = residual_state(four, 0.0)
    wider = IDENTITY._replace(ranks={"data": 2, "tensor": 2})
    moved = Checkpoints(tmp_path, keep=2, identity=wider)
    again = moved.restore(jax.eval_shape(lambda: other), where)
    # As it was saved, for fit_state.
    assert same_bits(again.state.gradient_residual, state.gradient_residual)
    assert same_bits(again.state.params, state.params)
    (note,) = again.notes
    assert "resharded for 2 data x 2 tensor ranks" in note


def flip(path: pathlib.Path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def truncate(path: pathlib.Path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def small_state(step):
    """A state of a few arrays that costs no training."""
    values = np.random.default_rng(step).standard_normal((64, 64))
    return TrainState(
        step=jnp.int32(step),
        params={"w": jnp.asarray(values, jnp.float32)},
        opt_state=(jnp.full(3, step, jnp.float32),),
        key=jnp.zeros(2, jnp.uint32),
    )


@pytest.fixture
def saved(tmp_path):
    """Checkpoints of steps 2 and 4, and what restoring them gives."""
    checkpoints = Checkpoints(tmp_path / "c", keep=3, identity=IDENTITY)
    for step in (2, 4):
        checkpoints.save(Snapshot(small_state(step), {"next_index": step}, [1.0]))
    checkpoints.close()
    state = small_state(0)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes, places = jax.eval_shape(lambda: state), jax.tree.map(lambda _: place, state)
    return checkpoints, lambda: checkpoints.restore(shapes, places)


@pytest.fixture
def _trailing_threads():
    """orbax's threads may meet the error once more after it has been reported."""
    yield
    gc.collect()


after_errors = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)


@after_errors
@pytest.mark.usefixtures("_trailing_threads")
@pytest.mark.parametrize("damage", [flip, truncate, pathlib.Path.unlink])
@pytest.mark.parametrize("item", ["state", "meta"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(saved, damage, item):
    checkpoints, restore = saved
    folder = checkpoints.folder / "4" / item
    files = [path for path in folder.rglob("*") if path.is_file()]
    damage(max(files, key=lambda path: path.stat().st_size))
    with pytest.warns(CheckpointWarning, match=r"step 4.*cannot be read.*one before"):
        snapshot = restore()
    assert same_bits(snapshot.state, small_state(2))
    assert snapshot.position == {"next_index": 2}
    assert (checkpoints.folder / "unreadable-4").is_dir()
    checkpoints.save(Snapshot(small_state(4), {"next_index": 4}, [1.0]))
    assert same_bits(restore().state, small_state(4))
    checkpoints.close()


@pytest.mark.parametrize("error", [MemoryError, jax.errors.JaxRuntimeError])
def test_a_device_without_memory_costs_no_checkpoint(saved, monkeypatch, error):
    """A mesh that is too small says nothing about the files."""
    checkpoints, restore = saved

    def exhausted(*_):
        raise error("RESOURCE_EXHAUSTED")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "_read", exhausted)
        with pytest.raises(error, match="RESOURCE_EXHAUSTED"):
            restore()
    assert same_bits(restore().state, small_state(4))


def test_what_a_killed_writer_left_is_no_checkpoint(saved):
    checkpoints, restore = saved
    left = checkpoints.folder / "6.orbax-checkpoint-tmp"
    shutil.copytree(checkpoints.folder / "4", left)
    assert checkpoints.steps() == [2, 4]
    assert same_bits(restore().state, small_state(4))


@after_errors
@pytest.mark.usefixtures("_trailing_threads")
def test_nothing_readable_is_an_error_and_no_new_start(saved):
    checkpoints, restore = saved
    for path in checkpoints.folder.rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with (
        pytest.warns(CheckpointWarning),
        pytest.raises(ValueError, match=r"No checkpoint in .* can be read") as error,
    ):
        restore()
    assert error.value.__cause__ is not None  # what was wrong with the oldest


def save(checkpoints, step):
    checkpoints.save(Snapshot(small_state(step), {}, []))
    checkpoints.close()


@contextlib.contextmanager
def full_disk(free_bytes):
    """A limit on the size of each file stands for it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@after_errors
@pytest.mark.usefixtures("_trailing_threads")
def test_a_full_disk_costs_no_older_checkpoint(saved):
    checkpoints, restore = saved
    for step in (6, 8, 10, 12):
        with (
            full_disk(1 << 10),
            pytest.warns(CheckpointWarning, match=r"not be written.*step 4"),
        ):
            save(checkpoints, step)
    assert checkpoints.steps() == [2, 4]
    save(checkpoints, 14)
    assert same_bits(restore().state, small_state(14))


@after_errors
@pytest.mark.usefixtures("_trailing_threads")
def test_a_full_disk_does_not_stop_the_training(tmp_path, whole):
    run = start(tmp_path)
    with full_disk(0), pytest.warns(CheckpointWarning) as caught:
        run.train(nothing, lambda: run.steps_done >= 4)
    run.close()
    text = " ".join(str(warning.message) for warning in caught)
    assert "checkpoint" in text
    assert "figures" in text
    run.train(nothing, lambda: False)
    run.close()
    assert same_bits(run.state, whole.state)
    assert (tmp_path / "checkpoints" / "echo" / "6").is_dir()


def test_a_folder_that_cannot_be_made_does_not_stop_the_training(tmp_path):
    (tmp_path / "taken").write_text("a file")
    checkpoints = Checkpoints(tmp_path / "taken" / "run", keep=1, identity=IDENTITY)
    with pytest.warns(
        CheckpointWarning, match=r"could not be written.*there is no complete"
    ):
        save(checkpoints, 2)


def test_an_error_in_training_leaves_nothing_open(tmp_path, monkeypatch):
    """And a checkpoint that was being written is there."""
    closed = []
    monkeypatch.setattr(RunLog, "close", lambda log: closed.append(log))

    def fails(variant, step, loss):
        if step == 3:
            raise ZeroDivisionError

    config = dataclasses.replace(TINY, variants=("exact",))
    writer = RecordWriter(tmp_path / "metrics.jsonl")
    with pytest.raises(ZeroDivisionError):
        compare(prepare(config), writer, progress=fails)
    assert len(closed) == 1
    assert (tmp_path / "checkpoints" / "exact" / "2").is_dir()
    # Other text: refused while the run is made.
    other = tmp_path / "other.txt"
    other.write_text("other text " * 1000)
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, path=other)
    )
    with pytest.raises(ValueError, match="text is another one"):
        compare(prepare(config), writer, progress=nothing, resume=True)
    assert len(closed) == 2


def test_after_an_error_no_other_process_is_waited_for(saved, monkeypatch):
    checkpoints, _ = saved

    class Waits:
        def wait_until_finished(self):
            raise AssertionError("another process may have died")

        close = wait_until_finished

    checkpoints._manager = Waits()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    checkpoints.abandon()
    assert checkpoints._manager is None


def test_a_field_that_a_checkpoint_does_not_know_had_its_default(saved):
    """As for the config.json of a run that an older version of the package started."""
    checkpoints, _ = saved
    now = IDENTITY._replace(config={**IDENTITY.config, "steps_per_call": 1})
    later = Checkpoints(checkpoints.folder, keep=3, identity=now)
    state = small_state(0)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    places = jax.tree.map(lambda _: place, state)
    snapshot = later.restore(jax.eval_shape(lambda: state), places)
    assert same_bits(snapshot.state, small_state(4))


def test_another_configuration_or_text_is_refused_by_name(saved):
    checkpoints, _ = saved
    other = IDENTITY._replace(config={"steps": 7, "seed": 1}, data="xyz")
    changed = Checkpoints(checkpoints.folder, keep=3, identity=other)
    state = small_state(0)
    with pytest.raises(ValueError, match="seed was 0, is 1") as error:
        changed.restore(state, state)
    assert "steps was 6, is 7" in str(error.value)
    assert "the text is another one" in str(error.value)
    with pytest.raises(ValueError, match="seed was 0, is 1"):
        changed.check(resume=True)
    assert checkpoints.steps() == [2, 4]


def test_a_new_run_among_the_checkpoints_of_another_is_refused(saved, tmp_path):
    """Orbax would keep none of its steps that the other run has passed already."""
    checkpoints, _ = saved
    with pytest.raises(ValueError, match="another run, the newest of step 4"):
        checkpoints.check(resume=False)
    checkpoints.check(resume=True)
    (checkpoints.folder / "4" / "meta" / "metadata").write_text("{")
    checkpoints.check(resume=True)  # whether it can be read is for restore to say
    Checkpoints(tmp_path / "none", keep=1, identity=IDENTITY).check(resume=False)


def test_a_fingerprint_sees_every_bit_and_its_place():
    values = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    (original,) = jax.tree.leaves(fingerprint([jnp.asarray(values)]))
    for row in range(3):
        for column in range(5):
            changed = values.copy()
            changed.view(np.uint32)[row, column] ^= 1 << 31
            (found,) = fingerprint([jnp.asarray(changed)])
            assert found != original
    for dtype in ("bfloat16", "int8", "uint8", "float16"):
        numbers = jnp.arange(12).astype(dtype)
        assert fingerprint([numbers]) != fingerprint([numbers[::-1]])


def test_a_fingerprint_is_the_same_on_every_mesh():
    values = jnp.asarray(np.random.default_rng(1).standard_normal((8, 16)))
    mesh = make_mesh(MeshConfig(data_ranks=2, tensor_ranks=4))
    cut = NamedSharding(mesh, PartitionSpec("data", "tensor"))
    run = jax.jit(fingerprint)
    assert run([values]) == run([jax.device_put(values, cut)])
