import numpy as np
import pytest

import echo_jax as echo
from echo_jax.evaluation import Prose, Request, Scorer, refine_plan
from tests.models.checkpoints import EXACT, loaded, reference

FOUR = echo.EchoConfig(min_bytes=0)
UNIFORM = echo.DepthPlan.uniform(FOUR)
EDGES = echo.DepthPlan.edges(FOUR, first=1, last=0)
PLANS = {"exact": EXACT, "uniform": UNIFORM, "edges": EDGES}
NAME, CALLS = "qwen3", 4


def draw_requests(count: int) -> list[Request]:
    draw = np.random.default_rng(0)
    vocab = loaded(NAME, 2).config.vocab_size
    lengths = draw.integers(1, 24, (count, 2))
    return [
        Request(*(draw.integers(0, vocab, n).tolist() for n in pair))
        for pair in lengths
    ]


REQUESTS = draw_requests(40)


@pytest.fixture(scope="module")
def scorer():
    return Scorer(loaded(NAME, 2), list(PLANS.values()), batch_tokens=96)


def log_softmax(logits):
    logits = np.float64(logits)
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize("name", PLANS)
def test_scores_are_those_of_the_logits(scorer, name):
    model, plan = loaded(NAME, 2), PLANS[name]
    scores = scorer.score(REQUESTS, plan)
    for number in (0, 7, 23):
        context, continuation = REQUESTS[number]
        tokens = np.array([*context, *continuation])
        # In a batch of the same shape: elsewhere sums may round another way, and a
        # value that lies at the edge of two codes then gets the other one.
        length = scorer.length_of(REQUESTS[number])
        batch = np.zeros((scorer.rows(length), length), int)
        batch[0, : len(tokens) - 1] = tokens[:-1]
        logits = model.logits(batch, plan=plan)[0]
        logs = log_softmax(logits)[len(context) - 1 : len(tokens) - 1]
        wanted = logs[np.arange(len(continuation)), continuation].sum()
        assert scores.log_likelihoods[number] == pytest.approx(wanted, abs=1e-3)
        greedy = (logs.argmax(-1) == continuation).all()
        assert scores.is_greedy[number] == greedy


def test_what_greedy_decoding_writes_is_greedy(scorer):
    prompt = reference(NAME)["prompt_1"].tolist()
    written = reference(NAME)["greedy_1"].tolist()[:5]
    other = [*written[:-1], (written[-1] + 1) % 90]
    found = scorer.score([Request(prompt, written), Request(prompt, other)], EXACT)
    assert found.is_greedy.tolist() == [True, False]


def test_a_score_is_the_same_alone_and_in_any_batch(scorer):
    """To the last bit, which a path chosen by size would change."""
    together = scorer.score(REQUESTS, UNIFORM).log_likelihoods
    backwards = scorer.score(REQUESTS[::-1], UNIFORM).log_likelihoods[::-1]
    np.testing.assert_array_equal(together, backwards)
    for number in (0, 11, 39):
        alone = scorer.score([REQUESTS[number]], UNIFORM).log_likelihoods
        assert alone[0] == together[number]


def test_plans_without_a_minimum_are_what_is_scored(scorer):
    """A plan for users, exact on such short texts, is scored as if they were long."""
    users = Scorer(loaded(NAME, 2), [echo.DepthPlan.uniform()], batch_tokens=96)
    found = users.score(REQUESTS[:4], echo.DepthPlan.uniform()).log_likelihoods
    np.testing.assert_allclose(
        found, scorer.score(REQUESTS[:4], UNIFORM).log_likelihoods, atol=1e-4
    )


def test_plans_share_their_programs_and_progress_is_told(scorer):
    seen = []
    scorer.compile(REQUESTS)
    programs = dict(scorer._compiled)
    for plan in PLANS.values():
        scorer.score(REQUESTS, plan, progress=lambda *args: seen.append(args))
    assert scorer._compiled == programs
    assert seen[-1] == (len(REQUESTS), len(REQUESTS))
    assert [done for done, _ in seen[: len(seen) // 3]] == sorted(
        done for done, _ in seen[: len(seen) // 3]
    )


def test_a_context_that_is_too_long_loses_its_start():
    short = Scorer(loaded(NAME, 2), [EXACT], batch_tokens=16, lengths=(16,))
    long = Request([5] * 30 + list(range(10)), [7, 8, 9])
    kept = Request(long.context[-14:], long.continuation)
    found = short.score([long, kept], EXACT).log_likelihoods
    assert found[0] == found[1]


@pytest.mark.usefixtures("as_shipped")
def test_what_cannot_be_scored(scorer):
    with pytest.raises(ValueError, match="put the checkpoint's first token"):
        scorer.score([Request([], [1])], EXACT)
    with pytest.raises(ValueError, match="cut it into several"):
        scorer.score([Request([1], [1] * 300)], EXACT)
    with pytest.raises(ValueError, match="batch_tokens=0"):
        Scorer(loaded(NAME, 2), [EXACT], batch_tokens=0)


@pytest.fixture(scope="module")
def windows():
    vocab = loaded(NAME, 2).config.vocab_size
    return np.random.default_rng(1).integers(0, vocab, (4, 17))


@pytest.fixture(scope="module")
def prose(windows):
    widths = [
        echo.DepthPlan.uniform(
            echo.EchoConfig(min_bytes=0, format=echo.WireFormat(bits=bits))
        )
        for bits in (3, 4, 6, 8)
    ]
    model = loaded(NAME, 2)
    return Prose(model, windows, exact_plan=EXACT, plans=widths, batch=2)


def test_divergence_loss_and_agreement_are_those_of_the_logits(prose, windows):
    model = loaded(NAME, 2)
    found = prose.measure(UNIFORM)
    halves = np.split(windows[:, :-1], 2)  # as prose cuts them
    wanted, rounded = (
        log_softmax(np.concatenate([model.logits(half, plan=plan) for half in halves]))
        for plan in (EXACT, UNIFORM)
    )
    divergence = (np.exp(wanted) * (wanted - rounded)).sum(-1).mean(-1)
    np.testing.assert_allclose(found.divergence, divergence, rtol=1e-2, atol=1e-6)
    assert divergence.min() > 1e-4
    picked = np.take_along_axis(rounded, windows[:, 1:, None], axis=-1)
    np.testing.assert_allclose(found.loss, -picked.mean((1, 2)), rtol=1e-5)
    same = (wanted.argmax(-1) == rounded.argmax(-1)).mean(-1)
    np.testing.assert_allclose(found.agreement, same, atol=1 / 16 + 1e-6)
    nothing = prose.measure(EXACT)
    assert np.abs(nothing.divergence).max() < 1e-6
    assert nothing.agreement.min() == 1


def test_search_finds_a_better_plan_of_the_same_cost(prose):
    """From bits on the calls that need them least."""
    sensitivity = echo.plan.Sensitivity(effects=(0.0, 0.0, 1.0, 1.0), bits=4)
    start = echo.DepthPlan.from_sensitivity(sensitivity, FOUR, bits=5.25)
    rounds = []
    found = refine_plan(
        prose, start, bits=5.25, progress=lambda *args: rounds.append(args)
    )
    assert found.average_bits <= 5.25
    before, after = (
        float(prose.measure(plan).divergence.mean()) for plan in (start, found)
    )
    assert after < before
    assert rounds
    assert rounds[-1][1] == pytest.approx(after)


@pytest.mark.usefixtures("as_shipped")
def test_what_cannot_be_measured_or_refined(prose, windows):
    model = loaded(NAME, 2)
    with pytest.raises(ValueError, match="batch=3 does not divide 4"):
        Prose(model, windows, exact_plan=EXACT, plans=[UNIFORM], batch=3)
    plan = EDGES.bind(CALLS)
    with pytest.raises(ValueError, match=r"more than bits=4\.0"):
        refine_plan(prose, plan, bits=4.0)
    with pytest.raises(ValueError, match="start from a plan of these widths"):
        refine_plan(prose, plan, bits=8.0, widths=(3, 4))
