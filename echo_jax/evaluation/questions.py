"""A benchmark set as token ids: what can be scored without texts or tokenizer."""

import dataclasses
import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from echo_jax.evaluation.encoding import encode_items
from echo_jax.evaluation.scoring import Request, Scores
from echo_jax.evaluation.sets import SETS, Item, Metric, grade
from echo_jax.models.tokenizer import TextTokenizer


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Questions:
    """A set as requests: a request for each choice, question after question."""

    name: str  # of the set
    metric: Metric
    requests: Sequence[Request]
    choices: Int[np.ndarray, "questions"]  # how many each question has
    gold: Int[np.ndarray, "questions"]  # index of the right choice
    characters: Int[np.ndarray, "requests"]  # length of each choice as text

    def __len__(self) -> int:
        return len(self.choices)

    @classmethod
    def encode(
        cls, name: str, items: Sequence[Item], tokenizer: TextTokenizer, *, first: int
    ) -> "Questions":
        """The items of a set as token ids.

        Args:
          name: a key of ``SETS``.
          items: from :func:`echo_jax.evaluation.read_items`.
          tokenizer: the model's.
          first: what stands for an empty context.
        """
        return cls(
            name=name,
            metric=SETS[name].metric,
            requests=encode_items(tokenizer, items, first=first),
            choices=np.array([len(item.contexts) for item in items]),
            gold=np.array([item.gold for item in items]),
            characters=np.array([n for item in items for n in item.characters]),
        )

    def grade(self, scores: Scores) -> dict[str, Float[np.ndarray, "questions"]]:
        """1 for each question that is answered rightly, by metric."""
        starts = np.cumsum(self.choices) - self.choices
        grades = []
        for start, count, gold in zip(starts, self.choices, self.gold, strict=True):
            part = slice(start, start + count)
            grades.append(
                grade(
                    self.metric,
                    scores.log_likelihoods[part],
                    scores.is_greedy[part],
                    gold=int(gold),
                    characters=self.characters[part],
                )
            )
        return {key: np.array([g[key] for g in grades]) for key in grades[0]}

    def limited(self, limit: int) -> "Questions":
        """That many questions at most, evenly spaced."""
        if limit >= len(self):
            return self
        kept = np.linspace(0, len(self) - 1, limit).round().astype(int)
        starts = np.cumsum(self.choices) - self.choices
        spans = [np.arange(starts[i], starts[i] + self.choices[i]) for i in kept]
        places = np.concatenate(spans)
        return dataclasses.replace(
            self,
            requests=[self.requests[place] for place in places],
            choices=self.choices[kept],
            gold=self.gold[kept],
            characters=self.characters[places],
        )


def save_questions(
    path: str | os.PathLike, sets: Sequence[Questions], **extra: np.ndarray
) -> None:
    """Writes sets, and other arrays beside them, into one compressed file."""
    arrays = dict(extra)
    for questions in sets:
        fields = {
            "tokens": np.concatenate([np.concatenate(r) for r in questions.requests]),
            "contexts": np.array([len(r.context) for r in questions.requests]),
            "continuations": np.array([len(r[1]) for r in questions.requests]),
            "choices": questions.choices,
            "gold": questions.gold,
            "characters": questions.characters,
        }
        for key, values in fields.items():
            arrays[f"{questions.name}/{key}"] = values.astype(np.int32)
    np.savez_compressed(path, allow_pickle=False, **arrays)


def load_questions(
    path: str | os.PathLike,
) -> tuple[list[Questions], dict[str, np.ndarray]]:
    """The sets of a file, and the other arrays in it.

    Raises:
      ValueError: if it cannot be read, or :func:`save_questions` did not write it.
    """
    try:
        return _read(path)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise ValueError(
            f"{path} is not a file of questions ({reason}): write it with "
            "save_questions."
        ) from error


def _read(path: str | os.PathLike) -> tuple[list[Questions], dict[str, np.ndarray]]:
    """As :func:`load_questions`, with whatever error a strange file raises."""
    with open(path, "rb") as file:
        arrays = np.load(file)
        if not isinstance(arrays, np.lib.npyio.NpzFile):
            raise ValueError("a single array")
        arrays = dict(arrays)
    fields: dict[str, dict[str, np.ndarray]] = {}
    extra: dict[str, np.ndarray] = {}
    for key, values in arrays.items():
        name, _, field = key.partition("/")
        if field:
            fields.setdefault(name, {})[field] = values
        else:
            extra[key] = values
    return [_from_arrays(name, found) for name, found in fields.items()], extra


def _from_arrays(name: str, fields: Mapping[str, Any]) -> Questions:
    if name not in SETS:
        raise ValueError(f"set {name!r} is not known")
    lengths = np.stack([fields["contexts"], fields["continuations"]], axis=1)
    parts = np.split(fields["tokens"], np.cumsum(lengths.reshape(-1))[:-1])
    return Questions(
        name=name,
        metric=SETS[name].metric,
        requests=[Request(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)],
        choices=fields["choices"],
        gold=fields["gold"],
        characters=fields["characters"],
    )
