import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import echo_jax as echo
from echo_jax import models
from echo_jax.collectives import exact
from echo_jax.models.switched import (
    choices,
    distinct_configs,
    run_by_choice,
    unconditional,
)
from tests.models.checkpoints import (
    EXACT,
    FIXTURES,
    FOUR_BITS,
    loaded,
    reference,
    tensor_mesh,
)
from tests.ranks import bits_of

FOUR = echo.EchoConfig(min_bytes=0)
EDGES = echo.DepthPlan.edges(FOUR, first=1, last=0, exact_final=True)
PLAIN = echo.DepthPlan.uniform(
    echo.EchoConfig(min_bytes=0, feedback=False, format=echo.WireFormat(rotate=False))
)
PLANS = {"exact": EXACT, "four": FOUR_BITS, "edges": EDGES, "plain": PLAIN}


def simulated(name: str, ranks: int) -> models.LoadedModel:
    return models.load(FIXTURES / name, tensor_mesh(1), simulate=ranks)


@pytest.fixture(scope="module")
def by_choice():
    """One program for all plans: ``plan -> logits`` on two devices."""
    model, tokens = loaded("qwen3", 2), reference("qwen3")["tokens"]
    configs = distinct_configs(PLANS.values(), 4)

    def local(decoder, tokens, chosen):
        stream = run_by_choice(decoder, tokens, chosen, configs=configs)
        return decoder.read_out(exact.pvary(stream, decoder.axis_name))

    whole = PartitionSpec()
    out = PartitionSpec(None, None, "tensor")
    run = jax.jit(model.on_ranks(local, (whole, whole), out))

    def logits(plan):
        found = run(model.params, tokens, choices(plan, configs, 4))
        return np.asarray(found)[..., : model.config.vocab_size]

    yield logits
    assert run._cache_size() == 1


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_as_an_argument_computes_what_the_plan_itself_does(by_choice, name):
    model, tokens = loaded("qwen3", 2), reference("qwen3")["tokens"]
    wanted = model.logits(tokens, plan=PLANS[name])
    # The same sums of the same values; the compiler may fuse their surroundings anew.
    np.testing.assert_allclose(by_choice(PLANS[name]), wanted, atol=2e-5, rtol=0)
    exact_logits = np.asarray(model.logits(tokens, plan=EXACT))
    assert name == "exact" or np.abs(exact_logits - wanted).max() > 1e-4


@pytest.mark.parametrize("plan", ["exact", "four"])
def test_simulated_ranks_compute_what_devices_do(plan):
    """Heads padded: four ranks and three."""
    tokens = reference("qwen3")["tokens"]
    for ranks in (3, 4):
        wanted = loaded("qwen3", ranks).logits(tokens, plan=PLANS[plan])
        found = simulated("qwen3", ranks).logits(tokens, plan=PLANS[plan])
        assert found.shape == wanted.shape
        # A code may change where fusions round differently: a step of a block.
        atol = 2e-5 if plan == "exact" else 2e-2
        np.testing.assert_allclose(found, wanted, atol=atol, rtol=0)


def test_text_on_simulated_ranks_is_the_same():
    prompts = [reference("llama")[f"prompt_{i}"].tolist() for i in range(2)]
    config = models.GenerationConfig(max_new_tokens=6, stop_ids=())
    wanted = models.generate(loaded("llama", 2), prompts, config=config)
    assert models.generate(simulated("llama", 2), prompts, config=config) == wanted


def test_a_model_on_simulated_ranks_is_saved_unpadded(tmp_path):
    models.save(tmp_path / "saved", simulated("qwen3", 3))
    again = models.load(tmp_path / "saved", tensor_mesh(1))
    wanted = loaded("qwen3", 1)
    for found, leaf in zip(
        jax.tree.leaves(again.params), jax.tree.leaves(wanted.params), strict=True
    ):
        np.testing.assert_array_equal(bits_of(found), bits_of(leaf))


def test_unconditional_plans_keep_everything_else():
    plan = echo.DepthPlan.edges(echo.EchoConfig(), first=1)
    always = unconditional(plan, 6)
    assert {config.min_bytes for config in always} == {0} == {always.vocab.min_bytes}
    assert [c.format for c in always] == [c.format for c in plan.bind(6)]


@pytest.mark.usefixtures("as_shipped")
def test_what_cannot_be_run_together():
    other = echo.DepthPlan.uniform(
        dataclasses.replace(FOUR, format=echo.WireFormat(block_size=32))
    )
    configs = distinct_configs([FOUR_BITS, other], 4)
    model = loaded("qwen3", 2)
    run = model.on_ranks(
        lambda *args: run_by_choice(*args, configs=configs),
        (PartitionSpec(), PartitionSpec()),
        PartitionSpec(),
    )
    with pytest.raises(ValueError, match="share a residual"):
        run(model.params, np.zeros((1, 4), int), np.zeros(5, int))
    with pytest.raises(ValueError, match="made without"):
        choices(other, distinct_configs([FOUR_BITS], 4), 4)
    with pytest.raises(ValueError, match="simulate=2 is for one device"):
        models.load(FIXTURES / "qwen3", tensor_mesh(2), simulate=2)
