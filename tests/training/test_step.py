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
    state, parts = create_state(MODEL, optimizer, mesh, seed=0)
    plan = TrainConfig(model=MODEL).plan(variant)
    step = make_train_step(parts, mesh, optimizer, plan)
    losses = []
    for index in range(steps):
        state, metrics = step(state, jnp.asarray(batch(index)))
        losses.append(float(metrics.loss))
    evaluate = make_eval_step(parts, mesh, plan)
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


def test_c12_replicated_state_is_bit_identical_on_all_ranks(echo_run):
    """After 50 steps every device holds the same bytes of what it shares."""
    compared = 0
    for leaf in jax.tree.leaves(echo_run[2]):
        copies = {}
        for shard in leaf.addressable_shards:
            copies.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        for same in copies.values():
            for other in same[1:]:
                assert same[0].tobytes() == other.tobytes()
                compared += 1
    assert compared > 0


def test_a_run_repeats_bit_for_bit(echo_run):
    losses, *_ = train("echo", MeshConfig(), steps=5)
    assert losses == echo_run[0][:5]


def test_the_mesh_does_not_matter_to_an_exact_run():
    one, *_ = train("exact", MeshConfig(data_ranks=1, tensor_ranks=1), steps=8)
    many, *_ = train("exact", MeshConfig(), steps=8)
    # Sums in another order; 8 steps do not amplify float32 rounding further.
    np.testing.assert_allclose(many, one, rtol=1e-4)


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
        ({"model": dataclasses.replace(MODEL, vocab_size=100)}, "too small for bytes"),
    ],
)
def test_configurations_that_do_not_fit(changes, words):
    with pytest.raises(ValueError, match=words):
        TrainConfig(**{"model": MODEL, **changes})


def test_too_few_devices():
    with pytest.raises(ValueError, match=r"needs 64 devices, 8 are here"):
        make_mesh(MeshConfig(data_ranks=16))
