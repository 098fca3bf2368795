"""Gradients over the data axis in few bits: values, and what is owed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from echo_jax.training import GradientSync, GradientSyncConfig, residual_rms
from tests import hlo
from tests.ranks import bits_of, draw, mesh
from tests.training.synced import (
    SHAPES,
    SPECS,
    config,
    exact_total,
    gradients,
    owed,
    params,
    run,
    stepper,
    sync_of,
    total,
)

MESHES = [(8, 1), (4, 2), (3, 2)]


@pytest.mark.parametrize(("data", "tensor"), MESHES)
def test_c21_means_and_what_is_owed_are_the_sum_of_all_gradients(data, tensor):
    """Over 20 steps, against float64: the telescoping identity."""
    sync, seeds = sync_of(), range(20)
    step = stepper(sync, data, tensor)
    state = sync.create(params(), mesh(data=data, tensor=tensor))
    means, state = run(sync, state, step, seeds, data)
    found, wanted = total(means), exact_total(seeds, data)
    debts = owed(state, data, tensor)
    for name in ("bias", "kernel"):
        missing = wanted[name] - found[name]
        # Float32: each of 20 sums is rounded a few times.
        slack = 2e-5 * np.linalg.norm(wanted[name])
        assert np.linalg.norm(missing - debts[name] / data) <= slack
        # And what is owed is not nothing.
        assert np.linalg.norm(missing) > 100 * slack
    np.testing.assert_allclose(found["scale"], wanted["scale"], atol=1e-5)


def test_the_error_does_not_grow_with_steps_and_without_feedback_it_does():
    seeds = range(64)

    def errors(**fields):
        sync = sync_of(**fields)
        state = sync.create(params(), mesh(data=8, tensor=1))
        means, _ = run(sync, state, stepper(sync, 8, 1), seeds, 8)
        missing = {
            n: np.linalg.norm(
                total(means[:n])["kernel"] - exact_total(seeds[:n], 8)["kernel"]
            )
            for n in (2, 64)
        }
        return missing[64] / missing[2]

    assert errors() <= 1.15
    # A random walk from 2 to 64 steps.
    assert 4.0 <= errors(sums={"feedback": False}) <= 8.0


@pytest.mark.parametrize("algorithm", ["two-shot", "one-shot"])
@pytest.mark.parametrize("feedback", [True, False])
def test_errors_of_single_steps_are_as_expected(feedback, algorithm):
    """And with them what Adam divides by: mean squares grow by the square of it."""
    sync = sync_of(sums={"feedback": feedback, "algorithm": algorithm})
    seeds = range(1, 12)
    state = sync.create(params(), mesh(data=8, tensor=1))
    means, _ = run(sync, state, stepper(sync, 8, 1), seeds, 8)
    exact = [exact_total([seed], 8)["kernel"] for seed in seeds]
    found = [mean["kernel"] for mean in means]
    # The first step has nothing to repay.
    square = lambda values: np.mean(np.square(values[1:]))  # noqa: E731
    error = square(np.subtract(found, exact)) / square(exact)
    assert error == pytest.approx(sync.relative_error**2, rel=0.1)
    # Repaid or not, errors are next to uncorrelated with the gradient of the step.
    assert square(found) / square(exact) - 1 == pytest.approx(error, abs=0.01)
    assert sync_of(sums={"path": "exact"}).relative_error == 0.0


@pytest.mark.parametrize("check_vma", [True, False])
def test_c12_means_are_bit_identical_on_all_ranks(check_vma):
    sync = sync_of()
    step = stepper(sync, 4, 2, check_vma=check_vma)
    state = sync.create(params(), mesh(data=4, tensor=2))
    for seed in range(3):
        means, state = step(state, gradients(seed, 4))
    for leaf in jax.tree.leaves(means):
        copies: dict[str, list] = {}
        for shard in leaf.addressable_shards:
            copies.setdefault(str(shard.index), []).append(bits_of(shard.data))
        assert all(len(same) >= 4 for same in copies.values())
        for same in copies.values():
            assert all((other == same[0]).all() for other in same)


def test_simulated_ranks_give_the_same_bits():
    """The code path of shard_map, on one device."""
    sync, data = sync_of(), 8
    step = stepper(sync, data, 1)
    state = sync.create(params(), mesh(data=data, tensor=1))
    alone = GradientSync(config=sync.config)
    simulated = jax.jit(jax.vmap(alone.update, axis_name="data"))
    own = jax.vmap(
        lambda p: alone.init(p), in_axes=None, axis_name="data", axis_size=data
    )(params())
    for seed in range(3):
        means, state = step(state, gradients(seed, data))
        ranked, own = simulated(gradients(seed, data), own)
        for name in SHAPES:
            for rank in range(data):
                np.testing.assert_array_equal(ranked[name][rank], means[name])
    for left, right in zip(
        state.send + state.reduce, own.send + own.reduce, strict=True
    ):
        np.testing.assert_array_equal(left, np.asarray(right)[:, 0])


@pytest.mark.parametrize("leaf", ["kernel", "scale"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("residual_dtype", ["float32", "int8"])
def test_c4_a_step_that_is_not_finite_leaves_every_residual_as_it_was(
    leaf, bad, residual_dtype
):
    """One value on one rank; also on the ranks and in the blocks beside it."""
    sync = sync_of(sums={"residual_dtype": residual_dtype})
    step = stepper(sync, 4, 2)
    state = sync.create(params(), mesh(data=4, tensor=2))
    _, before = step(state, gradients(0, 4))
    poisoned = gradients(1, 4)
    poisoned[leaf][2, 5] = bad
    means, after = step(before, poisoned)
    assert float(residual_rms(before)) > 0
    for old, new in zip(*map(jax.tree.leaves, (before, after)), strict=True):
        np.testing.assert_array_equal(bits_of(old), bits_of(new))
    # Everyone sees it: a step that looks at its gradients can be skipped.
    assert not np.isfinite(np.asarray(means[leaf])).all()
    # And the next one is as if it had not been.
    again, _ = step(after, gradients(2, 4))
    clean, _ = step(before, gradients(2, 4))
    for name in SHAPES:
        np.testing.assert_array_equal(again[name], clean[name])
        assert np.isfinite(np.asarray(again[name])).all()


def test_c4_where_states_are_restored_by_others_a_bad_block_owes_nothing():
    sync = sync_of(keep_on_nonfinite=False)
    step = stepper(sync, 4, 2)
    state = sync.create(params(), mesh(data=4, tensor=2))
    poisoned = gradients(1, 4)
    poisoned["kernel"][2, 5, 3] = np.nan
    _, after = step(state, poisoned)
    owing = [np.asarray(leaf) for leaf in (*after.send, *after.reduce)]
    assert all(np.isfinite(leaf).all() for leaf in owing)
    empty = [(leaf == 0).all(axis=-1) for leaf in owing]
    assert any(where.any() for where in empty)
    assert not all(where.all() for where in empty)


def test_only_bytes_cross_the_data_axis_and_as_many_as_said():
    sync, data = sync_of(), 8
    step = stepper(sync, data, 1)
    state = sync.create(params(), mesh(data=data, tensor=1))
    compiled = step.lower(state, gradients(0, data)).compile()
    counts = hlo.counts(compiled)
    # One message; the small leaf exactly; and one flag over tensor ranks.
    assert counts.pop(("all-to-all", "u8")) == 1
    assert counts.pop(("all-gather", "u8")) == 1
    assert counts.pop(("all-reduce", "f32")) == 1
    assert not counts.keys() - {("all-reduce", "s32")}
    sent = sync.wire_bytes(params(), data)
    for one in hlo.collectives(compiled):
        if one.dtype == "u8":
            share = one.buffer_bytes * (data - 1) // data
            assert share == sent[one.op.replace("-", "_")]
        elif one.dtype == "f32":
            assert one.buffer_bytes == 4 * SHAPES["scale"][0]
    assert sent["all_reduce"] == 2 * 7 * 4 * 40 // 8


def test_one_message_costs_less_than_one_a_leaf():
    """In collectives, and in the padding that fills up every rank's chunk."""
    many = {f"kernel{i}": np.zeros((64, 65), np.float32) for i in range(20)}
    joined = GradientSync(config=config())
    apart = GradientSync(config=config(bucket_bytes=4))
    one = sum(joined.wire_bytes(many, 8).values())
    twenty = sum(apart.wire_bytes(many, 8).values())
    values = sum(leaf.size for leaf in many.values())
    ideal = 2 * 7 / 8 * values * 4.25 / 8
    # Every leaf ends on a block, every message on a block of each rank.
    assert ideal < one < 1.01 * ideal
    # 65 blocks a leaf are filled up to 72.
    assert twenty == pytest.approx(72 / 65 * one, rel=0.01)


def test_small_messages_and_one_rank_are_exact():
    sync = GradientSync(config=GradientSyncConfig(min_leaf_bytes=0))
    state = jax.vmap(sync.init, in_axes=None, axis_name="data", axis_size=2)(params())
    assert not state.send  # 15 KiB are under min_bytes
    grads = gradients(0, 2)
    means, _ = jax.vmap(sync.update, axis_name="data")(grads, state)
    for name in SHAPES:
        np.testing.assert_array_equal(means[name][0], grads[name].mean(axis=0))
    alone = GradientSync(config=config())
    state = jax.vmap(alone.init, in_axes=None, axis_name="data", axis_size=1)(params())
    grads = gradients(0, 1)
    means, _ = jax.vmap(alone.update, axis_name="data")(grads, state)
    for name in SHAPES:
        np.testing.assert_array_equal(means[name], grads[name])


def test_it_stands_first_in_a_chain():
    sync = GradientSync(config=config())
    optimizer = optax.chain(
        sync.transformation, optax.clip_by_global_norm(1.0), optax.sgd(1.0)
    )

    def local(grads):
        state = optimizer.init(params())
        return optimizer.update(grads, state)[0]

    updates = jax.vmap(local, axis_name="data")(gradients(0, 4))
    norm = optax.tree.norm(jax.tree.map(lambda leaf: leaf[0], updates))
    assert float(norm) == pytest.approx(1.0, rel=1e-5)
    for leaf in jax.tree.leaves(updates):
        assert (leaf == leaf[:1]).all()


def test_means_have_the_dtype_of_their_leaves():
    sync = GradientSync(config=config())
    tree = {"a": draw(0, 2, 4096, dtype="bfloat16"), "b": draw(1, 2, 4096)}
    own = jax.tree.map(lambda leaf: leaf[0], tree)
    state = jax.vmap(sync.init, in_axes=None, axis_name="data", axis_size=2)(own)
    means, _ = jax.vmap(sync.update, axis_name="data")(tree, state)
    assert means["a"].dtype == jnp.bfloat16
    assert means["b"].dtype == jnp.float32
    assert len(state.send) == 1


@pytest.mark.usefixtures("as_shipped")
def test_misuse_is_refused_with_the_way_out():
    sync = sync_of()
    devices = mesh(data=4, tensor=2)
    state = sync.create(params(), devices)

    def forgotten(state, params):
        grads = jax.grad(lambda p: sum(map(jnp.sum, jax.tree.leaves(p))))(params)
        return sync.update(grads, state)

    def lower(local, state):
        specs = (sync.state_spec, SPECS)
        return jax.jit(
            jax.shard_map(local, mesh=devices, in_specs=specs, out_specs=specs[::-1])
        ).lower(state, params())

    with pytest.raises(ValueError, match=r"right:  jax\.grad\(loss\)\(sync\.per_rank"):
        lower(forgotten, state)
    right = lambda state, params: sync.update(sync.per_rank(params), state)  # noqa: E731
    lower(right, state)
    with pytest.raises(ValueError, match="residuals of 0 messages, these gradients"):
        lower(right, state._replace(send=(), reduce=()))
    with pytest.raises(ValueError, match="residual does not belong"):
        lower(right, state._replace(send=(state.send[0][:, :, :3],)))
    with pytest.raises(ValueError, match="bucket_bytes=0"):
        GradientSyncConfig(bucket_bytes=0)
    with pytest.raises(ValueError, match="must be an EchoConfig"):
        GradientSyncConfig(sums=4)  # ty: ignore
    with pytest.raises(ValueError, match="int32 is not supported"):
        jax.vmap(GradientSync().update, axis_name="data")(
            {"bias": np.ones((8, 9), np.int32)}, state
        )


def test_per_rank_changes_no_value():
    sync = sync_of()
    tree = jax.tree.map(jnp.asarray, gradients(0, 1))
    same = jax.vmap(sync.per_rank, axis_name="data")(tree)
    for name in SHAPES:
        np.testing.assert_array_equal(same[name], tree[name])
    assert sync.state_spec == P(("data", "tensor"))
