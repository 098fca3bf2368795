import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import echo_jax as echo
from echo_jax.layers import RopeScaling, join_ranks, merge_module, split_module
from echo_jax.models import Decoder, DecoderConfig
from echo_jax.models.decoder import layer_plans
from echo_jax.models.traffic import stream_traffic
from echo_jax.plan import group_by_config
from tests import hlo, modules
from tests.modules import AXIS
from tests.ranks import mesh

CONFIG = DecoderConfig(
    vocab_size=100,
    num_layers=2,
    width=64,
    num_heads=8,
    num_kv_heads=8,
    head_dim=8,
    mlp_width=96,
)
FOUR_BITS = echo.EchoConfig(min_bytes=0)
EXACT_PLAN = echo.DepthPlan.uniform(FOUR_BITS.exact())
ECHO_PLAN = echo.DepthPlan.uniform(FOUR_BITS)


def build(config=CONFIG):
    return Decoder(config, rngs=modules.rngs())


def tokens(batch=2, length=17, seed=0):
    random = np.random.default_rng(seed)
    return jnp.asarray(random.integers(0, CONFIG.vocab_size, (batch, length)))


@functools.cache
def loss_and_gradient(plan, size, config=CONFIG):
    """Loss and global gradient with simulated modules."""
    batch = tokens()
    specs = split_module(jax.eval_shape(lambda: build(config)))[2]

    def local(module, batch):
        graphdef, state = nnx.split(module)

        def loss(state):
            module = nnx.merge(graphdef, state)
            return module.loss(batch[:, :-1], batch[:, 1:], plan=plan)[0]

        value, gradient = jax.value_and_grad(loss)(state)
        return value, nnx.to_pure_dict(gradient)

    run = jax.jit(modules.simulated(local, lambda: build(config), size))
    values, gradients = run(modules.init(lambda: build(config)), batch)
    assert (values == values[0]).all()
    return float(values[0]), join_ranks(gradients, specs, AXIS)


def relative(one, other):
    square = lambda t: sum(float(jnp.sum(p**2)) for p in jax.tree.leaves(t))  # noqa: E731
    return (square(jax.tree.map(jnp.subtract, one, other)) / square(other)) ** 0.5


@pytest.fixture(scope="module")
def exact():
    return loss_and_gradient(EXACT_PLAN, 1)


LLAMA3 = RopeScaling(kind="llama3", factor=8.0, original_length=64)


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        pytest.param(2, {}, marks=pytest.mark.long),
        (8, {}),
        (8, {"tied_embeddings": True}),
        (2, {"tied_embeddings": True, "qk_norm": True, "rope_scaling": LLAMA3}),
    ],
)
def test_exact_ranks_change_nothing(size, changes):
    config = dataclasses.replace(CONFIG, **changes)
    loss, gradient = loss_and_gradient(EXACT_PLAN, 1, config)
    other_loss, other_gradient = loss_and_gradient(EXACT_PLAN, size, config)
    assert other_loss == pytest.approx(loss, rel=1e-6)
    assert relative(other_gradient, gradient) < 1e-5


def test_feedback_halves_the_gradient_error():
    """On six layers; without feedback the errors of all of them add up."""
    config = dataclasses.replace(CONFIG, num_layers=6)
    plain = echo.DepthPlan.uniform(dataclasses.replace(FOUR_BITS, feedback=False))
    plans = {"exact": EXACT_PLAN, "fed": ECHO_PLAN, "plain": plain}
    gradient = {k: loss_and_gradient(plan, 8, config)[1] for k, plan in plans.items()}
    with_feedback = relative(gradient["fed"], gradient["exact"])
    assert with_feedback < 0.6 * relative(gradient["plain"], gradient["exact"])


@pytest.mark.long
def test_more_bits_at_the_edges_help(exact):
    edges = echo.DepthPlan.edges(FOUR_BITS, first=1, last=1)
    error = relative(loss_and_gradient(edges, 4)[1], exact[1])
    assert error < relative(loss_and_gradient(ECHO_PLAN, 4)[1], exact[1])


def test_cutting_the_scan_changes_rounding_alone():
    """A plan of several equal parts is the uniform plan, in more scans."""
    cut = echo.DepthPlan.edges(FOUR_BITS, edge_bits=4, first=1, last=1)
    assert len(set(layer_plans(cut, 2))) == 1
    # An equal configuration under another name, to keep the scans apart.
    apart = echo.DepthPlan(
        head=(dataclasses.replace(FOUR_BITS, backend="xla"),) * 2, body=FOUR_BITS
    )
    assert len(set(layer_plans(apart, 2))) == 2
    one, other = loss_and_gradient(ECHO_PLAN, 4), loss_and_gradient(apart, 4)
    # Codes on a rounding edge may fall to the other side: far below one rounding.
    assert other[0] == pytest.approx(one[0], rel=1e-4)
    assert relative(other[1], one[1]) < 0.02


def test_unrolling_changes_rounding_alone():
    """In parts of one layer and of two."""
    config = dataclasses.replace(CONFIG, num_layers=4)
    edges = echo.DepthPlan.edges(FOUR_BITS, first=1, last=1)
    assert [*group_by_config(layer_plans(edges, 4))] == [(0, 1), (1, 3), (3, 4)]
    unrolled = dataclasses.replace(config, unroll=2, remat="save_sums")
    one = loss_and_gradient(edges, 4, config)
    other = loss_and_gradient(edges, 4, unrolled)
    assert other[0] == pytest.approx(one[0], rel=1e-4)
    assert relative(other[1], one[1]) < 0.02


@pytest.mark.parametrize("remat", ["layer", "save_sums"])
def test_recomputing_changes_rounding_alone(remat):
    config = dataclasses.replace(CONFIG, remat=remat)
    one, other = (
        loss_and_gradient(ECHO_PLAN, 4),
        loss_and_gradient(ECHO_PLAN, 4, config),
    )
    assert other[0] == pytest.approx(one[0], rel=1e-4)
    assert relative(other[1], one[1]) < 0.02


def compiled_gradient(config, plan, mesh, batch):
    """The gradient over a mesh with one tensor axis, compiled."""
    graphdef, params, specs = split_module(build(config))

    def local(params, batch):
        def loss(params):
            module = merge_module(graphdef, params)
            return module.loss(batch[:, :-1], batch[:, 1:], plan=plan)[0]

        return jax.value_and_grad(loss)(params)

    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs, modules.REPLICATED),
        out_specs=(modules.REPLICATED, specs),
    )
    return jax.jit(run).lower(params, batch).compile()


@pytest.mark.parametrize("remat", ["none", "layer", "save_sums"])
def test_only_bytes_cross_ranks_and_their_count_is_known(remat):
    """One layer, so that no loop hides a repetition."""
    config = dataclasses.replace(CONFIG, num_layers=1, remat=remat)
    batch, size = tokens(), 8
    compiled = compiled_gradient(config, ECHO_PLAN, mesh(tensor=size), batch)
    found = collections.Counter()
    for collective in hlo.collectives(compiled):
        if collective.dtype == "u8":
            found[collective.op] += collective.buffer_bytes
        else:
            # The scales of three norms, which XLA sends together, and three numbers a
            # token in the cross entropy.
            assert collective.op == "all-reduce"
            small = max(3 * config.width, batch[:, 1:].size)
            assert collective.buffer_bytes <= 4 * small
    formula = collections.Counter()
    for direction in ("forward", "backward"):
        formula.update(
            stream_traffic(
                config, ECHO_PLAN, batch=2, length=16, ranks=size, direction=direction
            )
        )
    # A buffer holds the part for every rank, one of which stays at home.
    assert found["all-to-all"] * (size - 1) == formula["all_to_all"] * size
    assert found["all-gather"] * (size - 1) == formula["all_gather"] * size


def test_exact_plan_has_no_residual():
    partial = jax.ShapeDtypeStruct((2, 16, 64), jnp.float32)
    assert not EXACT_PLAN.residual_config(partial.shape, partial.dtype).feedback
    assert ECHO_PLAN.residual_config(partial.shape, partial.dtype).feedback


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_kv_heads": 3}, "must divide"),
        ({"head_dim": 7}, "even"),
        ({"width": 0}, "at least 1"),
        ({"remat": "all"}, "save_sums"),
        ({"unroll": 0}, "at least 1"),
    ],
)
def test_sizes_that_do_not_fit(changes, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(CONFIG, **changes)


def test_ranks_that_do_not_divide():
    with pytest.raises(
        ValueError, match=r"vocabulary=128 cannot be sharded over 3 ranks"
    ):
        CONFIG.check_ranks(3)
