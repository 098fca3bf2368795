"""Echo is advised where, and only where, it is predicted to pay."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import echo_jax as echo
from echo_jax.cost_model import (
    CodecSpeed,
    CostModel,
    ExactSpeed,
    Link,
    Message,
    advise,
    break_even,
    decoder_messages,
)
from echo_jax.cost_model.advice import CHUNKS
from echo_jax.models import DecoderConfig
from echo_jax.models.traffic import stream_traffic
from tests.cost_model.models import LAN, models

FAST = LAN.over(1e12)  # on which the codec takes longer than the exact bytes
FAST = dataclasses.replace(FAST, exact=dataclasses.replace(LAN.exact, byte_seconds=0.0))
ROUNDING = 1e-12  # of sums of a few times, relative
MESSAGES = st.lists(
    st.builds(
        Message, message_bytes=st.integers(1, 1 << 30), calls=st.integers(1, 100)
    ),
    min_size=1,
    max_size=6,
)


def times_of(model, messages, pieces) -> tuple[float, float]:
    """Seconds of all of them, exact and through the codec."""
    exact = [m.calls * model.exact_seconds(m.message_bytes) for m in messages]
    few = [m.calls * model.echo_seconds(m.message_bytes, pieces) for m in messages]
    return math.fsum(exact), math.fsum(few)


@given(models(), MESSAGES, st.sampled_from([0.0, 0.1, 0.5]))
def test_echo_is_never_advised_where_it_is_predicted_to_be_slower(
    model, messages, margin
):
    """Neither all that it sends nor the smallest message of it."""
    advice = advise(model, messages, margin=margin)
    sent = sorted(filter(advice.takes_echo, messages), key=lambda m: m.message_bytes)
    for some in (sent, sent[:1]):
        exact, few = times_of(model, some, advice.num_chunks)
        assert exact >= (1 + margin) * few * (1 - ROUNDING)
    assert advice.advised_seconds <= advice.all_exact_seconds
    assert advice.gain(compute_seconds=1e-3) >= 1
    assert (advice.path == "echo") == bool(sent)


@given(models(), MESSAGES, st.sampled_from([0.0, 0.1, 0.5]), st.sampled_from(CHUNKS))
def test_no_other_threshold_would_be_better(model, messages, margin, pieces):
    """If few bits count as longer by the margin; without a margin, in plain time."""

    def counted(sent):
        exact, _ = times_of(model, [m for m in messages if m not in sent], pieces)
        return exact + (1 + margin) * times_of(model, sent, pieces)[1]

    advice = advise(model, messages, chunks=[pieces], margin=margin)
    least = counted([m for m in messages if advice.takes_echo(m)])
    for size in (math.inf, *(m.message_bytes for m in messages)):
        sent = [m for m in messages if m.message_bytes >= size]
        assert least <= counted(sent) * (1 + ROUNDING)


@given(models(), st.integers(1, 1 << 30), st.sampled_from([0.0, 0.2]))
def test_of_one_size_the_advice_is_the_break_even(model, size, margin):
    message = Message(message_bytes=size, calls=7)
    advice = advise(model, [message], margin=margin)
    pieces = advice.num_chunks
    least = break_even(model, num_chunks=pieces, margin=margin, largest=size)
    assert advice.min_bytes == least


def test_a_large_message_that_gains_less_leaves_the_others_their_gain():
    """The burst lets the codes of the smaller ones pass, not those of the large one."""
    model = CostModel(
        ranks=2,
        link=Link(latency_seconds=0.0, bytes_per_second=125e6, burst_bytes=64 << 20),
        exact=ExactSpeed(),
        codec=CodecSpeed(piece_seconds=0.0, value_seconds=2 * 0.575 / 125e6),
    )
    small = Message(message_bytes=230 << 20, calls=100)
    large = Message(message_bytes=6 << 30)
    ratios = [times_of(model, [m], 1) for m in (small, large)]
    gains = [exact / few for exact, few in ratios]
    assert gains[0] > 1.2 > gains[1] > 1
    assert advise(model, [large]).path == "exact"
    advice = advise(model, [small, large])
    assert advice.all_exact_seconds == pytest.approx(190.3, abs=0.1)
    assert advice.advised_seconds == pytest.approx(153.8, abs=0.1)
    assert all(map(advice.takes_echo, (small, large)))
    # Fewer of the small ones do not make up for the large one.
    few = dataclasses.replace(small, calls=1)
    assert advise(model, [few, large]).path == "exact"


@given(models(), MESSAGES)
def test_no_other_number_of_pieces_would_be_better(model, messages):
    best = advise(model, messages).advised_seconds
    for pieces in CHUNKS:
        assert best <= advise(model, messages, chunks=[pieces]).advised_seconds


@given(models(), st.sampled_from(CHUNKS))
def test_the_break_even_is_where_the_times_cross(model, pieces):
    size = break_even(model, num_chunks=pieces)
    if size is None:
        large = 1 << 34
        assert model.exact_seconds(large) <= model.echo_seconds(large, pieces)
        return
    assert model.exact_seconds(size) > model.echo_seconds(size, pieces)
    if size > 1:
        assert model.exact_seconds(size - 1) <= model.echo_seconds(size - 1, pieces)


def test_a_slow_link_pays_sooner_than_a_fast_one():
    sizes = [break_even(LAN.over(rate)) for rate in (1e6, 1e7, 1e8)]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 3
    assert break_even(FAST) is None


def test_the_exact_path_is_advised_where_few_bits_lose():
    message = Message(message_bytes=1 << 26)
    advice = advise(FAST, [message])
    assert advice.path == "exact"
    assert advice.configure(echo.EchoConfig()).is_exact
    assert advice.gain(compute_seconds=0.0) == 1
    assert advice.gain_of_share(0.5) == 1


def test_the_advised_configuration_takes_the_path_that_was_counted():
    messages = [Message(message_bytes=1 << n) for n in range(12, 28, 2)]
    advice = advise(LAN, messages)
    assert {advice.takes_echo(message) for message in messages} == {True, False}
    config = advice.configure(echo.EchoConfig())
    for message in messages:
        shape = (message.message_bytes // 2048, 1024)
        path = echo.explain(shape, "float16", 4, config).path
        assert path == ("echo" if advice.takes_echo(message) else "exact")
    assert config.num_chunks == advice.num_chunks


def test_sums_that_take_no_time_gain_none():
    """As those of one rank."""
    alone = dataclasses.replace(LAN, ranks=1)
    advice = advise(alone, [Message(message_bytes=1 << 20)])
    assert advice.path == "exact"
    assert advice.gain(compute_seconds=0.0) == advice.gain_of_share(1.0) == 1


def test_gains_follow_from_the_share_of_the_sums():
    messages = [Message(message_bytes=1 << 24, calls=10)]
    advice = advise(LAN, messages)
    exact, few = advice.all_exact_seconds, advice.advised_seconds
    assert exact == pytest.approx(10 * LAN.exact_seconds(1 << 24))
    # Half of the time computing is as much computing as summing.
    assert advice.gain_of_share(0.5) == pytest.approx(
        advice.gain(compute_seconds=exact)
    )
    assert advice.gain_of_share(1.0) == pytest.approx(exact / few)
    assert advice.gain_of_share(0.0) == 1
    gains = [advice.gain(compute_seconds=t) for t in (0.0, 0.1, 1.0)]
    assert gains == sorted(gains, reverse=True)


def test_a_decoders_messages_are_those_that_it_sends():
    """Against the byte counts of ``stream_traffic``, which count the vocabulary too."""
    config = DecoderConfig(num_layers=3, width=64, dtype="bfloat16", remat="layer")
    exact = echo.DepthPlan.uniform(echo.EchoConfig().exact()).bind(config.num_calls)
    for what, directions in (
        ("first token", ["forward"]),
        ("step", ["forward", "backward"]),
    ):
        (message,) = decoder_messages(config, tokens=128, what=what)
        a_sum = echo.wire_bytes((128, 64), 4, exact.vocab)
        sent = sum(
            sum(
                stream_traffic(
                    config, exact, batch=1, length=128, ranks=4, direction=direction
                ).values()
            )
            for direction in directions
        )
        vocabulary = len(directions)
        assert message.message_bytes == 128 * 64 * 2
        assert sent == (message.calls + vocabulary) * sum(a_sum.values())


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: advise(LAN, []), "messages must not be empty"),
        (lambda: advise(LAN, [Message(message_bytes=1)], chunks=[0]), "chunks="),
        (lambda: advise(LAN, [Message(message_bytes=1)], margin=-1.0), "margin=-1.0"),
        (lambda: Message(message_bytes=0), "message_bytes=0"),
        (lambda: Message(message_bytes=1, calls=0), "calls=0"),
        (lambda: decoder_messages(DecoderConfig(), tokens=0), "tokens=0"),
        (
            lambda: decoder_messages(DecoderConfig(), tokens=1, what="steps"),
            "what='steps' must be 'first token' or 'step'",
        ),
    ],
)
@pytest.mark.usefixtures("as_shipped")
def test_misuse_is_refused(build, words):
    with pytest.raises(ValueError, match=words):
        build()
    advice = advise(LAN, [Message(message_bytes=1)])
    with pytest.raises(ValueError, match="share=2"):
        advice.gain_of_share(2.0)
    with pytest.raises(ValueError, match="compute_seconds=-1"):
        advice.gain(compute_seconds=-1.0)
