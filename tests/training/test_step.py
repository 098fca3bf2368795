import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax.models import DecoderConfig
from echo_jax.training import (
    DataConfig,
    MeshConfig,
    OptimizerConfig,
    TrainConfig,
    create_state,
    make_eval_step,
    make_mesh,
    make_optimizer,
    make_train_step,
)
from echo_jax.training import data as text_data
from tests import hlo

MODEL = DecoderConfig(
    num_layers=2, width=64, num_heads=4, num_kv_heads=4, head_dim=16, mlp_width=96
)
STEPS = 50


def batch(index, batch_size=4, length=32):
    text = np.frombuffer(
        b"the quick brown fox jumps over the lazy dog. " * 50, np.uint8
    )
    sizes = DataConfig(batch_size=batch_size, length=length)
    return text_data.draw_batch(text, sizes=sizes, seed=0, step=index)


def train(variant, mesh_config, steps=STEPS):
    """Losses, the final state, and how often the step was compiled."""
    mesh = make_mesh(mesh_config)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2), STEPS)
    state, parts = create_state(MODEL, mesh, optimizer=optimizer, seed=0)
    plan = TrainConfig(model=MODEL).plan(variant)
    step = make_train_step(parts, mesh, optimizer=optimizer, plan=plan)
    losses = []
    for index in range(steps):
        state, metrics = step(state, jnp.asarray(batch(index)))
        losses.append(float(metrics.loss))
    evaluate = make_eval_step(parts, mesh, plan=plan)
    heldout = float(evaluate(state.params, jnp.asarray(batch(STEPS))))
    return losses, heldout, state, step._cache_size()


@pytest.fixture(scope="module")
def echo_run():
    return train("echo", MeshConfig())


def test_it_learns(echo_run):
    losses, heldout, _, _ = echo_run
    assert losses[-1] < 0.5 * losses[0]
    assert heldout < 0.5 * losses[0]


def test_the_second_step_does_not_recompile(echo_run):
    # Once for the state as created, and never again.
    assert echo_run[3] == 1


def compare_copies(state) -> int:
    """Compares all devices' bytes of what they share; how many copies there were."""
    compared = 0
    for leaf in jax.tree.leaves(state):
        copies = {}
        for shard in leaf.addressable_shards:
            copies.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        for same in copies.values():
            for other in same[1:]:
                assert same[0].tobytes() == other.tobytes()
                compared += 1
    return compared


def test_c12_replicated_state_is_bit_identical_on_all_ranks(echo_run):
    """After 50 steps."""
    assert compare_copies(echo_run[2]) > 0


@pytest.mark.long
def test_c12_replicated_state_is_bit_identical_after_500_steps():
    losses, _, state, programs = train("echo", MeshConfig(), steps=500)
    assert compare_copies(state) > 0
    assert losses[-1] < 0.1 * losses[0]
    assert programs == 1


def test_a_run_repeats_bit_for_bit(echo_run):
    losses, *_ = train("echo", MeshConfig(), steps=5)
    assert losses == echo_run[0][:5]


def test_the_mesh_does_not_matter_to_an_exact_run():
    one, *_ = train("exact", MeshConfig(data_ranks=1, tensor_ranks=1), steps=8)
    many, *_ = train("exact", MeshConfig(), steps=8)
    # Sums in another order; 8 steps do not amplify float32 rounding further.
    np.testing.assert_allclose(many, one, rtol=1e-4)


def run_steps(mesh_config, *, count=3, model=MODEL, variant="exact", **kwargs):
    """Losses and the final parameters; ``kwargs`` go to the step."""
    mesh = make_mesh(mesh_config)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2), STEPS)
    state, parts = create_state(model, mesh, optimizer=optimizer, seed=0)
    plan = TrainConfig(model=model).plan(variant)
    step = make_train_step(parts, mesh, optimizer=optimizer, plan=plan, **kwargs)
    losses = []
    for index in range(count):
        state, metrics = step(state, jnp.asarray(batch(index)))
        losses.append(float(metrics.loss))
    return losses, state, metrics


@pytest.fixture(scope="module")
def exact_steps():
    return run_steps(MeshConfig(data_ranks=2, tensor_ranks=2))


# Sums in another order: three steps do not amplify float32 rounding further.
CLOSE = {"rtol": 2e-5}


def test_accumulated_parts_are_the_whole_batch(exact_steps):
    losses, _, metrics = run_steps(
        MeshConfig(data_ranks=2, tensor_ranks=2), accumulate=2
    )
    np.testing.assert_allclose(losses, exact_steps[0], **CLOSE)
    np.testing.assert_allclose(metrics.grad_norm, exact_steps[2].grad_norm, rtol=1e-4)


@pytest.mark.long
def test_simulated_ranks_compute_what_devices_do(exact_steps):
    config = MeshConfig(data_ranks=2, tensor_ranks=2)
    simulated = dataclasses.replace(config, simulated=True)
    losses, state, metrics = run_steps(simulated)
    np.testing.assert_allclose(losses, exact_steps[0], **CLOSE)
    np.testing.assert_allclose(metrics.stream, exact_steps[2].stream, rtol=1e-4)
    assert len(jax.tree.leaves(state)[0].devices()) == 1
    # A code that falls to the other side of a rounding edge moves the loss by far less
    # than the codec does.
    echo, other = (run_steps(c, variant="echo")[0] for c in (config, simulated))
    np.testing.assert_allclose(echo, other, rtol=1e-3)


def test_several_steps_in_a_call_are_the_same_steps(exact_steps):
    mesh = make_mesh(MeshConfig(data_ranks=2, tensor_ranks=2))
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2), STEPS)
    state, parts = create_state(MODEL, mesh, optimizer=optimizer, seed=0)
    plan = TrainConfig(model=MODEL).plan("exact")
    steps = make_train_step(
        parts, mesh, optimizer=optimizer, plan=plan, steps_per_call=3
    )
    state, metrics = steps(state, jnp.stack([batch(i) for i in range(3)]))
    assert int(state.step) == 3
    np.testing.assert_allclose(metrics.loss, exact_steps[0], **CLOSE)
    with pytest.raises(ValueError, match="steps_per_call=0"):
        make_train_step(parts, mesh, optimizer=optimizer, plan=plan, steps_per_call=0)


def test_a_sync_is_called_once_a_step_and_its_residual_is_carried(exact_steps):
    """What was owed after a step arrives in the next one."""
    config = MeshConfig(data_ranks=2, tensor_ranks=2)
    mesh = make_mesh(config)
    ranks = jax.sharding.NamedSharding(mesh, jax.P(("data", "tensor")))
    seen = []

    def sync(gradients, residual):
        seen.append(1)  # while tracing
        return jax.lax.pmean(gradients, "data"), residual + 1.0

    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2), STEPS)
    state, parts = create_state(MODEL, mesh, optimizer=optimizer, seed=0)
    owed = jax.device_put(jnp.arange(4.0), ranks)
    state = state._replace(gradient_residual=owed)
    parts = parts._replace(shardings=parts.shardings._replace(gradient_residual=ranks))
    plan = TrainConfig(model=MODEL).plan("exact")
    step = make_train_step(
        parts, mesh, optimizer=optimizer, plan=plan, accumulate=2, sync=sync
    )
    for index in range(3):
        state, metrics = step(state, jnp.asarray(batch(index)))
    assert len(seen) == 1
    np.testing.assert_array_equal(state.gradient_residual, np.arange(4.0) + 3)
    np.testing.assert_allclose(metrics.loss, exact_steps[0][2], **CLOSE)


def test_a_step_that_is_not_finite_changes_nothing():
    config = MeshConfig(data_ranks=1, tensor_ranks=2)
    mesh = make_mesh(config)
    optimizer = make_optimizer(OptimizerConfig(), STEPS)
    state, parts = create_state(MODEL, mesh, optimizer=optimizer, seed=0)

    def broken(gradients, residual):
        gradients = jax.lax.pmean(gradients, "data")
        return jax.tree.map(lambda g: g * jnp.nan, gradients), residual

    plan = TrainConfig(model=MODEL).plan("exact")
    step = make_train_step(parts, mesh, optimizer=optimizer, plan=plan, sync=broken)
    before = jax.tree.map(np.asarray, (state.params, state.opt_state))
    state, metrics = step(state, jnp.asarray(batch(0)))
    assert int(metrics.skipped) == 1
    assert int(state.step) == 1
    jax.tree.map(np.testing.assert_array_equal, before, (state.params, state.opt_state))


@pytest.mark.parametrize("remat", ["none", "save_sums"])
def test_c14_no_collective_of_a_step_runs_twice(remat):
    """Two layers without a loop, which would hide a repetition."""
    model = dataclasses.replace(MODEL, num_layers=2, unroll=2, remat=remat)
    mesh = make_mesh(MeshConfig(data_ranks=1, tensor_ranks=2))
    optimizer = make_optimizer(OptimizerConfig(), STEPS)
    state, parts = create_state(model, mesh, optimizer=optimizer, seed=0)
    plan = TrainConfig(model=model).plan("echo")
    step = make_train_step(parts, mesh, optimizer=optimizer, plan=plan)
    compiled = step.lower(state, jnp.asarray(batch(0))).compile()
    # Embedding, two sums of each layer, their two mirrors, the readout's.
    found = hlo.counts(compiled)
    assert found["all-to-all", "u8"] == 10
    assert found["all-gather", "u8"] == 10


def test_half_precision_computes_and_single_keeps():
    model = dataclasses.replace(MODEL, dtype="bfloat16")
    losses, state, _ = run_steps(MeshConfig(data_ranks=1, tensor_ranks=2), model=model)
    assert losses[-1] < losses[0]
    kinds = {leaf.dtype for leaf in jax.tree.leaves(state.params)}
    assert kinds == {jnp.dtype("float32")}


def test_weight_decay_leaves_vectors_alone():
    optimizer = make_optimizer(
        OptimizerConfig(learning_rate=1.0, warmup=0.0, weight_decay=0.5), 10
    )
    params = {"norm": {"scale": jnp.ones(3)}, "dense": {"kernel": jnp.ones((3, 3))}}
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    assert (updates["norm"]["scale"] == 0).all()
    assert (updates["dense"]["kernel"] < 0).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 0}, "steps=0"),
        ({"variants": ()}, "at least one"),
        ({"variants": ("echo", "echo")}, "once"),
        ({"mesh": MeshConfig(data_ranks=3, tensor_ranks=1)}, "3 data ranks"),
        ({"mesh": MeshConfig(data_ranks=1, tensor_ranks=3)}, "vocabulary=256"),
        ({"mesh": MeshConfig(data_ranks=1, tensor_ranks=8)}, "num_heads=4"),
        ({"seed": -1}, "seed=-1"),
        ({"optimizer": OptimizerConfig(accumulate=3)}, "3 parts of a step"),
        ({"steps_per_call": 3}, "steps=200 must be a multiple"),
        ({"steps_per_call": 4, "log_every": 2}, "log_every=2 must be a multiple"),
        ({"evaluate_every": -1}, "evaluate_every=-1"),
        ({"model": dataclasses.replace(MODEL, vocab_size=100)}, "too small for bytes"),
    ],
)
def test_configurations_that_do_not_fit(changes, words):
    with pytest.raises(ValueError, match=words):
        TrainConfig(**{"model": MODEL, **changes})


def test_too_few_devices():
    with pytest.raises(ValueError, match=r"needs 64 devices, 8 are here"):
        make_mesh(MeshConfig(data_ranks=16))
