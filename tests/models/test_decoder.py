import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import echo_jax as echo
from echo_jax.layers import join_ranks, split_module
from echo_jax.models import Decoder, DecoderConfig
from echo_jax.models.decoder import layer_plans
from echo_jax.models.traffic import stream_traffic
from tests import modules as ranks
from tests.modules import AXIS

CONFIG = DecoderConfig(
    vocab_size=100,
    num_layers=3,
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
    return Decoder(config, rngs=ranks.rngs())


def tokens(batch=2, length=17, seed=0):
    random = np.random.default_rng(seed)
    return jnp.asarray(random.integers(0, CONFIG.vocab_size, (batch, length)))


def loss_and_gradient(plan, size, config=CONFIG, batch=None):
    """Loss and global gradient with simulated ranks."""
    batch = tokens() if batch is None else batch
    specs = split_module(jax.eval_shape(lambda: build(config)))[2]

    def local(module, batch):
        from flax import nnx

        graphdef, state = nnx.split(module)

        def loss(state):
            module = nnx.merge(graphdef, state)
            return module.loss(batch[:, :-1], batch[:, 1:], plan=plan)[0]

        value, gradient = jax.value_and_grad(loss)(state)
        return value, nnx.to_pure_dict(gradient)

    run = jax.jit(ranks.simulated(local, lambda: build(config), size))
    values, gradients = run(ranks.init(lambda: build(config)), batch)
    assert (values == values[0]).all()
    return float(values[0]), join_ranks(gradients, specs, AXIS)


def relative(one, other):
    square = lambda t: sum(float(jnp.sum(p**2)) for p in jax.tree.leaves(t))  # noqa: E731
    return (square(jax.tree.map(jnp.subtract, one, other)) / square(other)) ** 0.5


@pytest.fixture(scope="module")
def exact():
    return loss_and_gradient(EXACT_PLAN, 1)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [2, 8])
def test_exact_ranks_change_nothing(size, tied):
    config = dataclasses.replace(CONFIG, tied_embeddings=tied)
    loss, gradient = loss_and_gradient(EXACT_PLAN, 1, config)
    other_loss, other_gradient = loss_and_gradient(EXACT_PLAN, size, config)
    assert other_loss == pytest.approx(loss, rel=1e-6)
    assert relative(other_gradient, gradient) < 1e-5


def test_feedback_halves_the_gradient_error(exact):
    plain = echo.DepthPlan.uniform(dataclasses.replace(FOUR_BITS, feedback=False))
    with_feedback = relative(loss_and_gradient(ECHO_PLAN, 8)[1], exact[1])
    without = relative(loss_and_gradient(plain, 8)[1], exact[1])
    assert with_feedback < 0.6 * without


def test_more_bits_at_the_edges_help(exact):
    edges = echo.DepthPlan.edges(FOUR_BITS, first=1, last=1)
    error = relative(loss_and_gradient(edges, 4)[1], exact[1])
    assert error < relative(loss_and_gradient(ECHO_PLAN, 4)[1], exact[1])


def test_cutting_the_scan_changes_rounding_alone():
    """A plan of several equal parts is the uniform plan, in more scans."""
    cut = echo.DepthPlan.edges(FOUR_BITS, edge_bits=4, first=1, last=1)
    assert len(set(layer_plans(cut, 3))) == 1
    # An equal configuration under another name, to keep the scans apart.
    apart = echo.DepthPlan(
        head=(dataclasses.replace(FOUR_BITS, min_bytes=1),) * 2, body=FOUR_BITS
    )
    assert len(set(layer_plans(apart, 3))) == 3
    one, other = loss_and_gradient(ECHO_PLAN, 4), loss_and_gradient(apart, 4)
    # Codes on a rounding edge may fall to the other side: far below one rounding.
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


def collectives(config, plan, mesh, batch, gradient=True):
    """``(op, dtype, elements)`` of each collective over the tensor axis."""

    def loss(module, batch):
        return module.loss(batch[:, :-1], batch[:, 1:], plan=plan)[0]

    from flax import nnx

    graphdef, params, specs = split_module(build(config))

    def local(params, batch):
        function = lambda p: loss(nnx.merge(graphdef, nnx.State(p)), batch)  # noqa: E731
        return jax.value_and_grad(function)(params) if gradient else function(params)

    out_specs = (ranks.REPLICATED, specs) if gradient else ranks.REPLICATED
    run = jax.shard_map(
        local, mesh=mesh, in_specs=(specs, ranks.REPLICATED), out_specs=out_specs
    )
    text = jax.jit(run).lower(params, batch).compile().as_text()
    found = []
    names = "all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute"
    pattern = rf"= (.+?) ({names})(-start)?\("
    for line in text.splitlines():
        match = re.search(pattern, line)
        if match:
            shapes = re.findall(r"(\w+)\[([\d,]*)\]", match[1])
            for dtype, dims in shapes:
                size = int(np.prod([int(d) for d in dims.split(",") if d] or [1]))
                found.append((match[2], dtype, size))
    return found


@pytest.mark.parametrize("remat", ["none", "save_sums"])
def test_only_bytes_cross_ranks_and_their_count_is_known(remat):
    """One layer, so that no loop hides a repetition; 8 ranks."""
    config = dataclasses.replace(CONFIG, num_layers=1, remat=remat)
    batch, size = tokens(), 8
    found = collectives(config, ECHO_PLAN, ranks.make_mesh(tensor=size), batch)
    counts, per_token = {}, batch[:, 1:].size
    for op, dtype, elements in found:
        if dtype == "u8":
            counts[op] = counts.get(op, 0) + elements
        else:
            assert op == "all-reduce"
            assert elements <= max(config.width, per_token)
    formula = {}
    for direction in ("forward", "backward"):
        sent = stream_traffic(
            config, ECHO_PLAN, batch=2, length=16, ranks=size, direction=direction
        )
        for op, number in sent.items():
            formula[op] = formula.get(op, 0) + number
    # A buffer holds the part for every rank, one of which stays at home.
    assert counts["all-to-all"] * (size - 1) == formula["all_to_all"] * size
    assert counts["all-gather"] * (size - 1) == formula["all_gather"] * size


def test_exact_plan_has_no_residual():
    partial = jax.ShapeDtypeStruct((2, 16, 64), jnp.float32)
    assert not EXACT_PLAN.residual_config(partial.shape, partial.dtype).feedback
    assert ECHO_PLAN.residual_config(partial.shape, partial.dtype).feedback


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_kv_heads": 3}, "must divide"),
        ({"head_dim": 7}, "even"),
        ({"width": 0}, "at least 1"),
        ({"remat": "all"}, "save_sums"),
    ],
)
def test_sizes_that_do_not_fit(changes, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(CONFIG, **changes)


def test_ranks_that_do_not_divide():
    with pytest.raises(ValueError, match=r"num_heads=8 cannot be cut over 3 ranks"):
        CONFIG.check_ranks(3)
