import numpy as np
import pytest

import echo_jax as echo
from echo_jax import models
from echo_jax.evaluation import Questions, Scorer, read_items
from tests.evaluation.sets import make_folder
from tests.models.checkpoints import FIXTURES, loaded

lm_eval = pytest.importorskip("lm_eval", reason="needs the extra eval")

from lm_eval.api.instance import Instance  # noqa: E402

from echo_jax.evaluation.harness import (  # noqa: E402
    EchoLM,
    LocalTask,
    evaluate_tasks,
    local_tasks,
)

PLAN = echo.DepthPlan.edges(echo.EchoConfig(), first=1, last=0)
NAMES = ("arc_easy", "lambada", "blimp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("sets"))


@pytest.fixture(scope="module")
def tokenizer():
    return models.load_tokenizer(FIXTURES / "qwen3")


@pytest.fixture(scope="module")
def lm(tokenizer):
    return EchoLM(loaded("qwen3", 2), tokenizer, PLAN, batch_tokens=64)


def ask(kind: str, *arguments) -> Instance:
    return Instance(kind, doc={}, arguments=arguments, idx=0)


def test_the_harness_and_the_scorer_agree(lm, tokenizer, folder):
    rows = evaluate_tasks(lm, local_tasks(NAMES, folder))
    scorer = Scorer(loaded("qwen3", 2), [PLAN], batch_tokens=64)
    for name in NAMES:
        items = read_items(name, folder)
        questions = Questions.encode(name, items, tokenizer, first=lm.prefix_token_id)
        scores = scorer.score(questions.requests, PLAN)
        pairs = [
            ask("loglikelihood", *pair)
            for item in items
            for pair in zip(item.contexts, item.continuations, strict=True)
        ]
        assert lm.loglikelihood(pairs) == list(
            zip(scores.log_likelihoods, scores.is_greedy, strict=True)
        )
        for metric, right in questions.grade(scores).items():
            assert rows[name][metric] == pytest.approx(right.mean())
            error = right.std(ddof=1) / np.sqrt(len(right))
            assert rows[name][f"{metric}_stderr"] == pytest.approx(error)


def test_every_row_carries_the_bytes_that_were_sent(lm, folder):
    rows = evaluate_tasks(lm, local_tasks(["arc_easy"], folder, limit=1))
    row = rows["arc_easy"]
    assert row["questions"] == 1
    # Five sums of 64 values: three in 8 bits and a scale a block, two in 4, by each of
    # the two exchanges to the one other rank, half of the values in each.
    assert row["bytes_per_token"] == 3 * 66 + 2 * 34
    exact = EchoLM(
        lm.model, lm.text_tokenizer, echo.DepthPlan.uniform(echo.EchoConfig().exact())
    )
    assert 0 < row["bytes_per_token"] < exact.bytes_per_token / 2


def test_simple_evaluate_drives_the_model(lm, folder):
    task = LocalTask("arc_easy", read_items("arc_easy", folder))
    found = lm_eval.simple_evaluate(lm, tasks=[task], bootstrap_iters=0)
    wanted = evaluate_tasks(lm, {"arc_easy": task})["arc_easy"]["acc"]
    assert found["results"]["arc_easy"]["acc,none"] == wanted
    assert len(found["samples"]["arc_easy"]) == 3


def test_a_text_as_a_whole_is_the_sum_of_its_tokens(lm, tokenizer):
    text = "the cat sat on the mat"
    (whole, nothing) = lm.loglikelihood_rolling(
        [ask("loglikelihood_rolling", text), ask("loglikelihood_rolling", "")]
    )
    ((wanted, _),) = lm.loglikelihood([ask("loglikelihood", "", text)])
    assert whole == wanted
    assert nothing == 0.0
    # Longer than the model: every token is scored once, in windows.
    long = "the cat sat on the mat " * 40
    ids = tokenizer.encode(long)
    assert len(ids) > lm.max_length
    (found,) = lm.loglikelihood_rolling([ask("loglikelihood_rolling", long)])
    assert found < -len(ids) / 2


def test_text_ends_before_the_first_stop(lm, tokenizer):
    prompt = "hello there"
    (whole,) = lm.generate_until(
        [ask("generate_until", prompt, {"until": [], "max_gen_toks": 12})]
    )
    ids = models.generate(
        lm.model,
        [tokenizer.encode(prompt)],
        config=models.GenerationConfig(max_new_tokens=12),
        plan=PLAN,
    )
    assert whole == tokenizer.decode(ids[0])
    stop = whole[3]
    (cut,) = lm.generate_until(
        [ask("generate_until", prompt, {"until": [stop], "max_gen_toks": 12})]
    )
    assert cut == whole[: whole.index(stop)]


def test_the_same_request_is_drawn_anew_each_time(lm):
    """Metrics over repeated samples need samples that differ; runs must agree."""
    options = {"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 2.0}
    requests = [ask("generate_until", "hello there", options)] * 3
    texts = lm.generate_until(requests)
    assert len(set(texts)) == 3
    assert lm.generate_until(requests) == texts


def test_the_prompt_too_long_for_new_tokens_loses_its_start(lm):
    long = "the cat sat on the mat " * 60
    (text,) = lm.generate_until(
        [ask("generate_until", long, {"until": ["zzz"], "max_gen_toks": 4})]
    )
    assert isinstance(text, str)
