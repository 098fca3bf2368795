"""Residuals of gradients on another mesh than the one that left them."""

import warnings

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding

from echo_jax.training import GradientSync, GradientSyncState, fit_state, residual_rms
from tests.ranks import bits_of, mesh
from tests.training.synced import (
    exact_total,
    owed,
    params,
    run,
    stepper,
    sync_of,
    total,
)


def fresh(sync: GradientSync, data: int, tensor: int) -> GradientSyncState:
    return sync.create(params(), mesh(data=data, tensor=tensor))


def trained(sync: GradientSync, data: int, tensor: int, seeds=range(3)):
    step = stepper(sync, data, tensor)
    return run(sync, fresh(sync, data, tensor), step, seeds, data)


@pytest.mark.parametrize(("old", "new", "tensor"), [(8, 4, 1), (2, 4, 2), (4, 3, 2)])
def test_c22_on_other_data_ranks_the_mean_debt_is_carried_over(old, new, tensor):
    """So that the sums of means telescope across the change."""
    sync = sync_of()
    before, state = trained(sync, old, tensor)
    with pytest.warns(UserWarning, match=f"by {old} data ranks, {new} are here: every"):
        moved, words = fit_state(state, fresh(sync, new, tensor))
    assert words is not None
    debts, after = owed(state, old, tensor), owed(moved, new, tensor)
    for name in debts:
        np.testing.assert_allclose(
            after[name] / new, debts[name] / old, atol=1e-6 * np.abs(debts[name]).max()
        )
    assert all(leaf.sharding.mesh.size == new * tensor for leaf in moved.send)

    seeds = range(10, 15)
    later, state = run(sync, moved, stepper(sync, new, tensor), seeds, new)
    found = total(before + later)
    wanted = total([exact_total(range(3), old), exact_total(seeds, new)])
    left = owed(state, new, tensor)
    for name in left:
        missing = wanted[name] - found[name]
        slack = 2e-5 * np.linalg.norm(wanted[name])
        assert np.linalg.norm(missing - left[name] / new) <= slack


def test_c22_the_same_mesh_keeps_every_bit_and_says_nothing():
    sync = sync_of(sums={"residual_dtype": "int8"})
    _, state = trained(sync, 4, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same, words = fit_state(state, fresh(sync, 4, 2))
    assert words is None
    for old, new in zip(*map(jax.tree.leaves, (state, same)), strict=True):
        np.testing.assert_array_equal(bits_of(old), bits_of(new))


@pytest.mark.parametrize(
    ("old", "new", "data", "tensor"),
    [
        ({}, {}, 4, 1),  # other tensor ranks
        ({}, {"bucket_bytes": 5000}, 4, 2),  # leaves in other messages
        ({}, {"sums": {"residual_dtype": "bfloat16"}}, 4, 2),
        ({"sums": {"feedback": False}}, {}, 4, 2),
    ],
)
def test_c22_what_does_not_fit_starts_from_zero_loudly(old, new, data, tensor):
    _, state = trained(sync_of(**old), 4, 2)
    empty = fresh(sync_of(**new), data, tensor)
    with pytest.warns(UserWarning, match="cannot be carried over and start from zero"):
        found, words = fit_state(state, empty)
    assert words is not None
    assert found is empty
    assert float(residual_rms(found)) == 0.0


def test_c22_half_bytes_and_a_checkpoint_without_residuals_start_from_zero_loudly():
    sync = sync_of(sums={"residual_dtype": "int4"})
    _, state = trained(sync, 4, 2)
    empty = fresh(sync, 2, 2)
    with pytest.warns(UserWarning, match="4 data ranks, 2 are here: in one byte or"):
        assert fit_state(state, empty)[0] is empty
    with pytest.warns(UserWarning, match="has no residuals of gradients"):
        assert fit_state(None, empty)[0] is empty


@pytest.mark.parametrize("residual_dtype", ["bfloat16", "int8"])
def test_a_state_is_checkpointed_and_restored_bit_for_bit(tmp_path, residual_dtype):
    sync = sync_of(sums={"residual_dtype": residual_dtype})
    _, state = trained(sync, 4, 2)
    sharding = NamedSharding(mesh(data=4, tensor=2), sync.state_spec)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, args=ocp.args.StandardSave({"residual": state}))
        manager.wait_until_finished()
        like = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=sharding
            ),
            fresh(sync, 4, 2),
        )
        restored = manager.restore(
            3, args=ocp.args.StandardRestore({"residual": like})
        )["residual"]
    for old, new in zip(*map(jax.tree.leaves, (state, restored)), strict=True):
        np.testing.assert_array_equal(bits_of(old), bits_of(new))
    # It is what the next step takes.
    step = stepper(sync, 4, 2)
    means, _ = run(sync, state, step, [9], 4)
    again, _ = run(sync, restored, step, [9], 4)
    np.testing.assert_array_equal(means[0]["kernel"], again[0]["kernel"])


def test_a_checkpoint_is_read_without_the_mesh_that_wrote_it(tmp_path):
    """Its own shapes say how many data ranks there were."""
    sync = sync_of()
    _, state = trained(sync, 8, 1)
    here = fresh(sync, 2, 1)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, args=ocp.args.StandardSave({"residual": state}))
        manager.wait_until_finished()
        found = manager.item_metadata(3)["residual"]
        whole = NamedSharding(mesh(data=2, tensor=1), jax.sharding.PartitionSpec())
        like = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole),
            found,
        )
        restored = manager.restore(
            3, args=ocp.args.StandardRestore({"residual": like})
        )["residual"]
    with pytest.warns(UserWarning, match="8 data ranks, 2 are here"):
        moved, _ = fit_state(GradientSyncState(**restored), here)
    debts, after = owed(state, 8, 1), owed(moved, 2, 1)
    np.testing.assert_allclose(after["bias"] / 2, debts["bias"] / 8, atol=1e-6)


def test_the_size_of_what_is_owed():
    sync = sync_of()
    _, state = trained(sync, 4, 2)
    values = np.asarray(state.send[0])
    assert float(residual_rms(state)) == pytest.approx(
        np.sqrt(np.mean(np.square(values))), rel=1e-5
    )
