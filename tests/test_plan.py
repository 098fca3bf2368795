import json
import math
import pathlib
from typing import Any

import jax.numpy as jnp
import pytest

from echo_jax import DepthPlan, EchoConfig, WireFormat
from echo_jax.cli_model import PlanOptions
from echo_jax.plan import Sensitivity

CONFIG = EchoConfig(min_bytes=0)


def _bits(plan):
    return ["exact" if c.is_exact else c.format.bits for c in plan]


def test_uniform_is_the_same_configuration_at_every_call():
    plan = DepthPlan.uniform(CONFIG)
    assert plan[0] == plan[1000] == CONFIG
    assert list(plan.bind(5)) == [CONFIG] * 5
    assert list(plan.backward.bind(5)) == [CONFIG] * 5


def test_uniform_may_end_exactly():
    plan = DepthPlan.uniform(CONFIG, exact_final=True, num_calls=4)
    assert _bits(plan) == [4, 4, 4, "exact"]
    assert plan[3] == CONFIG.exact()


def test_edges_gives_the_layers_at_the_ends_more_bits():
    plan = DepthPlan.edges(CONFIG, edge_bits=8, first=2, last=1)
    assert _bits(plan.bind(12)) == [8] * 4 + [4] * 6 + [8] * 2
    plan = DepthPlan.edges(CONFIG, edge_bits=6, first=1, last=2, calls_per_layer=1)
    assert _bits(plan.bind(6)) == [6, 4, 4, 4, 6, 6]
    plan = DepthPlan.edges(CONFIG, exact_final=True)
    assert _bits(plan.bind(8)) == [8, 8, 8, 8, 4, 4, 8, "exact"]
    plan = DepthPlan.edges(CONFIG, first=0, last=0, exact_final=True)
    assert _bits(plan.bind(3)) == [4, 4, "exact"]


def test_edges_of_a_shallow_model_meet():
    assert _bits(DepthPlan.edges(CONFIG).bind(4)) == [8] * 4
    assert _bits(DepthPlan.edges(CONFIG).bind(2)) == [8] * 2
    assert _bits(DepthPlan.edges(CONFIG, exact_final=True).bind(1)) == ["exact"]


def test_backward_is_indexed_by_the_call_it_mirrors():
    """Going backward the last call is that of layer 0."""
    plan = DepthPlan.edges(CONFIG, first=2, last=1, exact_final=True).bind(12)
    assert _bits(plan.backward) == ["exact", 8] + [4] * 6 + [8] * 4
    assert _bits(plan.backward.backward) == _bits(plan)


@pytest.mark.parametrize("num_calls", [1, 2, 4, 6])
def test_backward_is_the_plan_in_reverse_where_the_ends_overlap(num_calls):
    plan = DepthPlan.edges(CONFIG, exact_final=True).bind(num_calls)
    assert _bits(plan.backward) == _bits(plan)[::-1]
    assert plan.backward[0].is_exact


def test_a_backward_plan_of_its_own():
    forward = DepthPlan.edges(CONFIG)
    plan = forward.with_backward(DepthPlan.uniform(CONFIG, exact_final=True)).bind(8)
    assert _bits(plan) == [8, 8, 8, 8, 4, 4, 8, 8]
    # In the order in which they run, the last is the mirror of the first.
    assert _bits(plan.backward) == ["exact"] + [4] * 7


def test_negative_indices_and_iteration():
    plan = DepthPlan.edges(CONFIG).bind(10)
    assert plan[-1] == plan[9]
    assert plan[-10] == plan[0]
    assert len(plan) == 10
    assert len(list(plan)) == 10
    for index in (10, -11):
        with pytest.raises(IndexError, match="plan for 10 calls"):
            plan[index]


def test_a_plan_that_needs_the_number_of_calls_says_so():
    plan = DepthPlan.edges(CONFIG)
    for use in (len, list, lambda p: p[0]):
        with pytest.raises(ValueError, match=r"plan\.bind\(num_calls\)"):
            use(plan)
    with pytest.raises(ValueError, match="made for 4 calls, the model has 6"):
        DepthPlan.uniform(CONFIG, num_calls=4).bind(6)


@pytest.mark.parametrize(
    "other",
    [
        EchoConfig(format=WireFormat(block_size=32)),
        EchoConfig(format=WireFormat(rotate=False)),
        EchoConfig(residual_dtype="float32"),
        EchoConfig(min_bytes=1),
    ],
)
def test_calls_that_could_not_share_a_residual_are_refused(other):
    with pytest.raises(ValueError, match="share one residual"):
        DepthPlan(body=CONFIG, tail=(other,))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"first": -1}, "first=-1"),
        ({"last": -1}, "last=-1"),
        ({"calls_per_layer": 0}, "calls_per_layer=0"),
        ({"edge_bits": 5}, r"bits=5.*choose one of"),
        ({"num_calls": -2}, "num_calls=-2"),
    ],
)
def test_refused_arguments_of_edges(arguments, message):
    with pytest.raises(ValueError, match=message):
        DepthPlan.edges(CONFIG, **arguments)


def test_a_file_with_a_wrong_value_is_named(tmp_path):
    path = tmp_path / "plan.json"
    DepthPlan.uniform(CONFIG, num_calls=2).save(path, model="m", axis_size=2)
    path.write_text(path.read_text().replace('"vocab_bits": 8', '"vocab_bits": 5'))
    with pytest.raises(ValueError, match=r"plan\.json is not a plan.*bits=5"):
        DepthPlan.load(path)


def test_the_folder_of_a_plan_is_made(tmp_path):
    path, plan = tmp_path / "new" / "plan.json", DepthPlan.uniform(CONFIG, num_calls=2)
    plan.save(path, model="m", axis_size=2)
    assert list(DepthPlan.load(path)) == list(plan)
    with pytest.raises(OSError, match=r"plan\.json"):
        plan.save(path / "plan.json", model="m", axis_size=2)


@pytest.mark.parametrize("effect", [-1.0, math.nan, math.inf])
def test_harm_that_cannot_be_compared_is_refused(effect):
    with pytest.raises(ValueError, match="divergence of each call"):
        Sensitivity(effects=(1.0, effect), bits=4)
    with pytest.raises(ValueError, match="bits=0"):
        Sensitivity(effects=(1.0,), bits=0)


def test_a_residual_is_needed_only_where_a_call_can_owe():
    shape, dtype = (64, 64), jnp.bfloat16
    no_feedback = EchoConfig(min_bytes=0, feedback=False)
    small = EchoConfig(min_bytes=1 << 20)
    needs = {
        DepthPlan.uniform(CONFIG): True,
        DepthPlan.uniform(no_feedback): False,
        DepthPlan.uniform(CONFIG.exact()): False,
        DepthPlan.uniform(small): False,
        DepthPlan(body=no_feedback, head=(CONFIG,)): True,
    }
    for plan, needed in needs.items():
        assert plan.residual_config(shape, dtype).feedback is needed


@pytest.mark.parametrize("other", [None, EchoConfig(), 3])
@pytest.mark.usefixtures("as_shipped")
def test_what_is_no_plan_is_refused_by_name(other):
    if other is not None:
        with pytest.raises(TypeError, match="backward plan of a DepthPlan"):
            DepthPlan.uniform().with_backward(other)
    with pytest.raises(TypeError, match="head of a DepthPlan must be a tuple"):
        DepthPlan(body=EchoConfig(), head=other)
    with pytest.raises(TypeError, match="head and tail of a DepthPlan hold"):
        DepthPlan(body=EchoConfig(), head=(other,) if other is None else (3,))


@pytest.mark.usefixtures("as_shipped")
def test_a_plan_of_lists_can_be_hashed_and_one_of_no_calls_costs_nothing():
    listed = DepthPlan(body=EchoConfig(), head=[EchoConfig()])
    assert hash(listed) == hash(DepthPlan(body=EchoConfig(), head=(EchoConfig(),)))
    assert DepthPlan.uniform(num_calls=0).average_bits == 0


def test_a_file_whose_calls_are_no_list_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    DepthPlan.uniform(num_calls=2).save(path, model="m", axis_size=2)
    path.write_text(json.dumps({**json.loads(path.read_text()), "calls": {}}))
    with pytest.raises(ValueError, match=r"plan\.json is not a plan .* no list\.$"):
        DepthPlan.load(path)


@pytest.mark.parametrize(
    ("config", "bits", "words"),
    [
        (EchoConfig().exact(), 17.0, "has no bits to spend"),
        (EchoConfig(), math.nan, "bits=nan is less"),
    ],
)
def test_a_budget_that_cannot_be_spent_is_refused(config, bits, words):
    sensitivity = Sensitivity(effects=(1.0, 2.0), bits=4)
    with pytest.raises(ValueError, match=words):
        DepthPlan.from_sensitivity(sensitivity, config, bits=bits)


@pytest.mark.usefixtures("as_shipped")
def test_bare_effects_are_no_sensitivity():
    bare: Any = (1.0, 2.0)
    with pytest.raises(TypeError, match=r"got tuple: measure it .*effects=\("):
        DepthPlan.from_sensitivity(bare)


@pytest.mark.parametrize(
    "other", [{"plan": "exact"}, {"config": EchoConfig(min_bytes=0)}]
)
def test_options_beside_a_plan_file_are_refused_not_ignored(other):
    file = pathlib.Path("plan.json")
    assert PlanOptions(plan_file=file).name == "plan"
    with pytest.raises(ValueError, match=r"plan\.json says how every sum is sent"):
        PlanOptions(plan_file=file, **other)
