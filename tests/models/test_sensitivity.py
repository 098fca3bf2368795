import dataclasses
import itertools

import numpy as np
import pytest

import echo_jax as echo
from echo_jax.models.sensitivity import measure_sensitivity, plot_sensitivity
from echo_jax.plan import Sensitivity
from tests.models.checkpoints import EXACT, loaded, reference

FOUR = echo.EchoConfig(min_bytes=0)


@pytest.fixture(scope="module")
def measured():
    seen = []
    tokens = reference("qwen3")["tokens"]
    found = measure_sensitivity(
        loaded("qwen3", 2), tokens, progress=lambda *args: seen.append(args)
    )
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    return found


def divergence(wanted, found):
    log = lambda x: x - np.log(np.exp(x).sum(-1, keepdims=True))  # noqa: E731
    wanted, found = log(np.float64(wanted)), log(np.float64(found))
    return (np.exp(wanted) * (wanted - found)).sum(-1).mean()


@pytest.mark.parametrize("feedback", [True, False])
def test_an_effect_is_that_of_the_call_quantized_alone(measured, feedback):
    """By a plan in which only that call is not exact, and the next may pay for it."""
    model, tokens = loaded("qwen3", 2), reference("qwen3")["tokens"]
    assert len(measured.effects) == 4
    wanted = model.logits(tokens, plan=EXACT)
    config = dataclasses.replace(FOUR, feedback=feedback)
    call = 1
    plan = echo.DepthPlan(
        head=tuple(config if i == call else config.exact() for i in range(4)),
        body=config.exact(),
        num_calls=4,
        vocab_bits=8,
    )
    found = divergence(wanted, model.logits(tokens, plan=plan))
    if not feedback:
        other = measure_sensitivity(model, tokens, config=config)
        assert other.effects[call] == pytest.approx(found, rel=1e-2)
        # What the next call pays does less harm.
        assert measured.effects[call] < other.effects[call]
    else:
        assert measured.effects[call] == pytest.approx(found, rel=1e-2)


def test_the_budget_goes_where_it_helps_most():
    effects = (8.0, 1.0, 0.5, 0.0, 2.0, 0.25)
    sensitivity = Sensitivity(effects=effects, bits=4)
    plan = echo.DepthPlan.from_sensitivity(sensitivity, FOUR, bits=4.5)
    chosen = [config.format.bits for config in plan]
    assert plan.average_bits <= 4.5
    # No other choice of widths within the budget does less harm.
    harm = lambda bits: sum(  # noqa: E731
        e * (15 / (2**b - 1)) ** 2 for e, b in zip(effects, bits, strict=True)
    )
    allowed = [
        bits
        for bits in itertools.product((3, 4, 6, 8), repeat=6)
        if sum(bits) / 6 + 0.25 <= 4.5
    ]
    best = min(map(harm, allowed))
    assert harm(chosen) <= 1.1 * best
    # Backward in the order in which the calls run.
    assert [config.format.bits for config in plan.backward] == chosen[::-1]


def test_a_wide_budget_gives_every_call_the_most():
    sensitivity = Sensitivity(effects=(1.0, 2.0), bits=4)
    plan = echo.DepthPlan.from_sensitivity(sensitivity, FOUR, bits=9.0)
    assert [config.format.bits for config in plan] == [8, 8]
    assert plan.average_bits == 8.25


def test_a_plan_is_saved_and_loaded_with_what_it_is_for(measured, tmp_path):
    plan = echo.DepthPlan.from_sensitivity(measured, FOUR)
    path = tmp_path / "plan.json"
    plan.save(path, model="tiny", axis_size=2)
    assert echo.DepthPlan.load(path) == plan
    assert echo.DepthPlan.load(path, model="tiny", axis_size=2) == plan
    with pytest.raises(ValueError, match="plan for axis_size=2, not 4: measure"):
        echo.DepthPlan.load(path, axis_size=4)
    with pytest.raises(ValueError, match="plan for model='tiny', not 'other'"):
        echo.DepthPlan.load(path, model="other")
    edges = echo.DepthPlan.edges(FOUR, first=1, exact_final=True).bind(8)
    edges.save(path, model="tiny", axis_size=2)
    assert list(echo.DepthPlan.load(path)) == list(edges)


def test_a_picture_is_drawn(measured, tmp_path):
    plan = echo.DepthPlan.from_sensitivity(measured, FOUR)
    plot_sensitivity(measured, tmp_path / "picture.png", plan=plan)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("as_shipped")
def test_what_cannot_be_planned(tmp_path):
    sensitivity = Sensitivity(effects=(1.0,), bits=4)
    with pytest.raises(ValueError, match=r"bits=3\.0.*at least 3\.25"):
        echo.DepthPlan.from_sensitivity(sensitivity, FOUR, bits=3.0)
    with pytest.raises(ValueError, match="at least 0; got"):
        Sensitivity(effects=(float("nan"),), bits=4)
    with pytest.raises(ValueError, match=r"missing.json cannot be read"):
        echo.DepthPlan.load(tmp_path / "missing.json")
    (tmp_path / "cut.json").write_text('{"calls": [')
    with pytest.raises(ValueError, match="is not a plan"):
        echo.DepthPlan.load(tmp_path / "cut.json")
    with pytest.raises(ValueError, match="does not know the number of calls"):
        echo.DepthPlan.edges().save(tmp_path / "x.json", model="m", axis_size=2)
    with pytest.raises(ValueError, match="rounds nothing that could be measured"):
        measure_sensitivity(loaded("llama", 2), np.zeros((1, 4), int), config=EXACT[0])


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([[1, 300]], "not all among the model's 300"),
        ([1, 2], r"shape \(2,\)"),
        ([[]], r"shape \(1, 0\)"),
        ([[1.0, 2.0]], "float64 must be integers"),
    ],
)
def test_tokens_that_are_none_of_the_models_are_refused(tokens, words):
    """They would read as zeros, and no call would seem to do any harm."""
    with pytest.raises(ValueError, match=words):
        measure_sensitivity(loaded("qwen3", 2), np.array(tokens))
