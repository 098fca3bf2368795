"""What a sum costs follows from bytes, ranks and pieces as it must."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import echo_jax as echo
from echo_jax.cost_model import CodecSpeed, CostModel, ExactSpeed, Link
from tests.cost_model.models import LAN, models

SIZES = st.integers(1, 1 << 30)
PIECES = st.sampled_from([1, 2, 4, 16])


@given(models(), SIZES, SIZES, PIECES)
def test_more_bytes_never_take_less(model, one, other, pieces):
    small, large = sorted([one, other])
    assert model.exact_seconds(small) <= model.exact_seconds(large)
    # A piece more, because there is a block more, can hide what one alone could not.
    blocks = min(small, large) // 4 // model.ranks
    if blocks >= pieces * model.config.format.block_size:
        echo_times = [model.echo_seconds(size, pieces) for size in (small, large)]
        assert echo_times[0] <= echo_times[1] * (1 + 1e-12)


@given(models(), SIZES)
def test_twice_as_many_ranks_never_take_less(model, size):
    twice = dataclasses.replace(model, ranks=2 * model.ranks)
    assert model.exact_seconds(size) <= twice.exact_seconds(size)
    assert model.echo_seconds(size) <= twice.echo_seconds(size) * (1 + 1e-12)


@given(models(), SIZES, PIECES)
def test_a_slower_link_never_takes_less(model, size, pieces):
    slower = model.over(model.link.bytes_per_second / 2)
    assert model.exact_seconds(size) <= slower.exact_seconds(size)
    assert model.echo_seconds(size, pieces) <= slower.echo_seconds(size, pieces)


def test_without_latency_and_codec_time_goes_with_bytes_on_the_wire():
    """A bandwidth alone: the two times are those of ``wire_bytes``."""
    model = CostModel(
        ranks=8,
        link=Link(latency_seconds=0.0, bytes_per_second=1e9),
        exact=ExactSpeed(),
        codec=CodecSpeed(piece_seconds=0.0, value_seconds=0.0),
    )
    shape = (512, 4096)
    config = echo.EchoConfig(min_bytes=0)
    few = sum(echo.wire_bytes(shape, 8, config).values())
    exact = sum(echo.wire_bytes(shape, 8, config.exact()).values())
    assert model.echo_seconds(2 * 512 * 4096) == pytest.approx(few / 1e9)
    assert model.exact_seconds(2 * 512 * 4096) == pytest.approx(exact / 1e9)


def test_one_shot_saves_an_exchange_and_sends_all_chunks_to_all():
    link = Link(latency_seconds=1e-3, bytes_per_second=1e9)
    codec = CodecSpeed(piece_seconds=0.0, value_seconds=0.0)
    once = echo.EchoConfig(algorithm="one-shot")
    size = 1 << 22
    for ranks in (1, 2, 8):
        two = CostModel(ranks=ranks, link=link, exact=ExactSpeed(), codec=codec)
        one = dataclasses.replace(two, config=once)
        steps = (ranks - 1) * link.latency_seconds
        wire = two.echo_seconds(size) - 2 * steps
        assert one.echo_seconds(size) == pytest.approx(steps + ranks / 2 * wire)
        assert one.echo_seconds(size, 4) == pytest.approx(4 * steps + ranks / 2 * wire)
        at_once = dataclasses.replace(link, at_once=True)
        gathered = dataclasses.replace(one, link=at_once).echo_seconds(size)
        assert gathered == one.echo_seconds(size)


def test_pieces_hide_the_shorter_part_and_cost_a_call_each():
    free = CodecSpeed(piece_seconds=0.0, value_seconds=8e-9, overlap=1.0)
    link = dataclasses.replace(LAN.link, latency_seconds=0.0, stall=0.0)
    model = dataclasses.replace(LAN, codec=free, link=link)
    size = 1 << 24
    codec = free.value_seconds * model.values(size)
    wire = model.echo_seconds(size) - codec
    assert model.echo_seconds(size, 4) == pytest.approx(
        max(codec, wire) + min(codec, wire) / 4
    )
    # Without overlap and stall a piece more is a call more.
    apart = dataclasses.replace(LAN.codec, overlap=0.0)
    model = dataclasses.replace(LAN, codec=apart, link=link)
    more = model.echo_seconds(size, 5) - model.echo_seconds(size, 4)
    assert more == pytest.approx(apart.piece_seconds)
    # A message of one block for each rank cannot be cut.
    tiny = 2 * 64 * model.ranks
    assert model.echo_seconds(tiny, 16) == model.echo_seconds(tiny)


def test_a_stall_costs_one_exchange_more():
    size = 1 << 24
    free = dataclasses.replace(
        LAN, link=dataclasses.replace(LAN.link, stall=0.0, efficiency=1.0)
    )
    stalled = dataclasses.replace(
        LAN, link=dataclasses.replace(LAN.link, stall=1.0, efficiency=1.0)
    )
    config = echo.EchoConfig(min_bytes=0)
    exchange = echo.wire_bytes((size // 2,), 4, config)["all_to_all"]
    more = stalled.echo_seconds(size) - free.echo_seconds(size)
    assert more == pytest.approx(exchange / LAN.link.bytes_per_second)


def test_what_fits_into_the_burst_passes_at_once():
    """And what does not takes so much less as the burst takes at the link's rate."""
    shaped = dataclasses.replace(
        LAN, link=dataclasses.replace(LAN.link, burst_bytes=10**6)
    )
    unlimited = LAN.over(math.inf)
    saved = 1e6 / LAN.link.bytes_per_second
    for times in (CostModel.exact_seconds, CostModel.echo_seconds):
        assert times(shaped, 1 << 18) == times(unlimited, 1 << 18)
        assert times(shaped, 1 << 24) < times(LAN, 1 << 24)
    apart = dataclasses.replace(LAN.exact, overlap=0.0)
    slow, quick = (dataclasses.replace(m, exact=apart) for m in (LAN, shaped))
    assert slow.exact_seconds(1 << 24) - quick.exact_seconds(1 << 24) == (
        pytest.approx(saved)
    )
    assert LAN.echo_seconds(1 << 24) - shaped.echo_seconds(1 << 24) == (
        pytest.approx(saved)
    )


def test_adding_beside_sending_takes_as_long_as_the_longer():
    size, quiet = 1 << 24, dataclasses.replace(LAN.link, latency_seconds=0.0)

    def seconds(overlap, byte_seconds=3e-9, rate=5e7):
        exact = ExactSpeed(byte_seconds=byte_seconds, overlap=overlap)
        model = dataclasses.replace(LAN, link=quiet, exact=exact)
        return model.over(rate).exact_seconds(size)

    adding, wire = seconds(0.0, rate=math.inf), seconds(0.0, byte_seconds=0.0)
    assert seconds(0.0) == pytest.approx(adding + wire)
    assert seconds(1.0) == pytest.approx(max(adding, wire))
    assert seconds(0.5) == pytest.approx((seconds(0.0) + seconds(1.0)) / 2)


def test_a_tree_helps_small_messages_of_many_ranks_alone():
    ring = dataclasses.replace(LAN, ranks=64)
    tree = dataclasses.replace(ring, exact=dataclasses.replace(LAN.exact, tree=True))
    assert tree.exact_seconds(1024) < ring.exact_seconds(1024)
    assert tree.exact_seconds(1 << 30) == ring.exact_seconds(1 << 30)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_an_exchange_at_once_waits_one_step_for_all_ranks(ranks):
    """A ring of the exact sum has as many steps as both exchanges in turn."""
    link = dataclasses.replace(LAN.link, at_once=True)
    turns = dataclasses.replace(LAN, ranks=ranks)
    once = dataclasses.replace(turns, link=link)
    saved = max(0, ranks - 2) * link.latency_seconds
    for pieces in (1, 4):
        less = turns.echo_seconds(1 << 22, pieces) - once.echo_seconds(1 << 22, pieces)
        assert less == pytest.approx(pieces * saved, abs=1e-12)
    assert once.exact_seconds(1 << 22) == turns.exact_seconds(1 << 22)


def test_one_rank_sends_nothing():
    alone = dataclasses.replace(LAN, ranks=1)
    assert alone.exact_seconds(1 << 20) == 0
    codec = LAN.codec
    assert alone.echo_seconds(1 << 20) == pytest.approx(
        codec.piece_seconds + codec.value_seconds * (1 << 19)
    )
    assert LAN.echo_seconds(0) > 0


@given(models())
def test_a_saved_model_comes_back(tmp_path_factory, model):
    path = tmp_path_factory.mktemp("models") / "folder" / "model.json"
    unlimited = model.over(math.inf)
    for given_model in (model, unlimited):
        given_model.save(path)
        assert "Infinity" not in path.read_text()
        assert CostModel.load(path) == given_model


def test_a_file_without_the_newer_figures_is_read(tmp_path):
    """Links knew no burst and sums no overlap when it was written: both are none."""
    path = tmp_path / "model.json"
    LAN.save(path)
    entries = json.loads(path.read_text())
    del entries["link"]["burst_bytes"], entries["exact"]["overlap"]
    del entries["link"]["at_once"]
    path.write_text(json.dumps(entries))
    found = CostModel.load(path)
    assert found.link == LAN.link
    assert found.exact == ExactSpeed(byte_seconds=LAN.exact.byte_seconds)


@pytest.mark.usefixtures("as_shipped")
def test_a_path_may_be_text(tmp_path):
    path = str(tmp_path / "model.json")
    with pytest.raises(ValueError, match=r"model\.json cannot be read \(No such file"):
        CostModel.load(path)
    LAN.save(path)
    assert CostModel.load(path) == LAN


def test_what_is_no_model_says_so(tmp_path):
    path = tmp_path / "model.json"
    for text in ("nothing", "{}", "[]", '{"link": {"speed": 1}}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="holds no cost model"):
            CostModel.load(path)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: dataclasses.replace(LAN, ranks=0), "ranks=0"),
        (lambda: dataclasses.replace(LAN, dtype="int8"), "int8 is not supported"),
        (lambda: LAN.over(0.0), "bytes_per_second=0.0 must be above 0"),
        (lambda: dataclasses.replace(LAN.link, stall=1.5), "stall=1.5"),
        (lambda: dataclasses.replace(LAN.link, efficiency=2.0), "efficiency=2.0"),
        (lambda: dataclasses.replace(LAN.link, latency_seconds=-1.0), "latency"),
        (lambda: dataclasses.replace(LAN.link, burst_bytes=-1), "burst_bytes=-1"),
        (lambda: ExactSpeed(overlap=1.5), "overlap=1.5 must lie in 0 to 1"),
        (lambda: ExactSpeed(byte_seconds=math.inf), "byte_seconds=inf"),
        (lambda: dataclasses.replace(LAN.codec, overlap=-0.1), "overlap=-0.1"),
        (lambda: dataclasses.replace(LAN.codec, value_seconds=-1.0), "value_seconds"),
    ],
)
def test_impossible_figures_are_refused(build, words):
    with pytest.raises(ValueError, match=words):
        build()
