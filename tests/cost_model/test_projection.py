"""Two levels become one where there is one node; assumptions are what they say."""

import dataclasses
import itertools
import pathlib
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_jax.config import EchoConfig
from echo_jax.cost_model import Message, TwoLevels, advise, project
from echo_jax.cost_model.projection import MEASURED
from tests.cost_model.models import models

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

import check_cost_model  # noqa: E402

SIZES = st.integers(1, 1 << 30)


def two_levels(model, nodes):
    slower = model.over(model.link.bytes_per_second / 20)
    return TwoLevels(inside=model, between=dataclasses.replace(slower, ranks=nodes))


@given(models(), SIZES, st.sampled_from([1, 4]))
def test_one_node_is_one_level(model, size, pieces):
    one = two_levels(model, 1)
    assert one.ranks == model.ranks
    assert one.exact_seconds(size) == model.exact_seconds(size)
    assert one.echo_seconds(size, pieces) == model.echo_seconds(size, pieces)
    messages = [Message(message_bytes=size)]
    assert advise(one, messages) == advise(model, messages)


@given(models(), SIZES)
def test_more_nodes_never_take_less(model, size):
    nodes = [two_levels(model, n) for n in (1, 2, 4, 8)]
    exact = [n.exact_seconds(size) for n in nodes]
    assert exact == sorted(exact)
    few = [n.echo_seconds(size) for n in nodes[1:]]
    for fewer, more in itertools.pairwise(few):
        assert fewer <= more * (1 + 1e-12)


@given(models(), SIZES, st.sampled_from([1, 4]))
def test_few_bits_go_where_they_pay_most(model, size, pieces):
    nodes = two_levels(model, 4)
    part = -(-size // model.ranks)
    between = model.exact_seconds(size) + nodes.between.echo_seconds(part, pieces)
    everywhere = model.echo_seconds(size, pieces) + nodes.between.echo_seconds(
        part, pieces
    )
    assert nodes.echo_seconds(size, pieces) == min(between, everywhere)
    wins = nodes.placement(size, pieces) == "everywhere"
    assert wins == (everywhere < between)


def test_projections_scale_as_they_say():
    size = 1 << 28
    h200, a100 = (project(name, 8) for name in ("h200", "a100"))
    assert h200.between.ranks == 1
    assert a100.inside.link.seconds(1.0) == pytest.approx(
        h200.inside.link.seconds(1.0) * 450 / 300
    )
    assert a100.inside.codec.value_seconds == pytest.approx(
        h200.inside.codec.value_seconds * 4.8 / 2.039
    )
    assert project("h200", 4).inside.ranks == 4
    slow, fast = (project("h200", 64, ethernet_gbit=gbit) for gbit in (100.0, 400.0))
    assert slow.ranks == 64
    assert slow.inside.ranks == slow.between.ranks == 8
    assert slow.exact_seconds(size) > fast.exact_seconds(size)
    gains = [
        advise(nodes, [Message(message_bytes=size)]).gain(compute_seconds=0.0)
        for nodes in (slow, fast)
    ]
    assert gains[0] > gains[1] > 1


def test_between_nodes_alone_there_is_a_choice_of_algorithm():
    config = EchoConfig(algorithm="one-shot")
    nodes = project("h200", 64, config=config)
    assert nodes.inside.config.algorithm == "two-shot"
    assert nodes.between.config == config
    assert project("h200", 2, config=config).inside.config == config


def test_the_measured_machine_is_the_one_that_was_measured():
    records = check_cost_model.sums(
        ROOT / "experiments" / "results" / "bench_nvlink.jsonl",
        lambda c: (
            check_cost_model.is_plain(c)
            and c["case"] in ("psum bf16", "default settings")
        ),
    )
    found = check_cost_model.model_of(records, rated=False)
    for size in (1 << 20, 1 << 24, 1 << 28, 1 << 30):
        assert MEASURED.exact_seconds(size) == pytest.approx(
            found.exact_seconds(size), rel=0.1
        )
        assert MEASURED.echo_seconds(size) == pytest.approx(
            found.echo_seconds(size), rel=0.1
        )


def test_pieces_overlap_as_they_were_measured_to():
    records = check_cost_model.sums(
        ROOT / "experiments" / "results" / "bench_nvlink.jsonl",
        lambda c: (
            check_cost_model.is_plain(c)
            and check_cost_model.PIECES.sub("", c["case"]) in ("psum bf16", "4 bits")
        ),
    )
    found = check_cost_model.model_of(records, rated=False)
    assert found.codec.overlap == pytest.approx(MEASURED.codec.overlap, abs=0.1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"machine": "abacus", "ranks": 8}, "'abacus' must be one of"),
        ({"machine": "h200", "ranks": 12}, "ranks=12 must fill nodes"),
        ({"machine": "h200", "ranks": 0}, "ranks=0 must fill nodes"),
        ({"machine": "h200", "ranks": 8, "ethernet_gbit": 0.0}, "ethernet_gbit=0"),
    ],
)
def test_impossible_machines_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        project(**arguments)
