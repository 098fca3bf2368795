"""Scores on disk, so that a run that was cut goes on where it stopped."""

import os
import pathlib
import tempfile

import numpy as np

from echo_jax.evaluation.questions import Questions
from echo_jax.evaluation.scoring import Scores


class SavedScores:
    """Scores of requests by variant and set, in one file that is replaced whole.

    Log-likelihoods are kept in float32. A file belongs to one questions file and one
    model; scores of another number of requests are not handed out.

    Args:
      path: the file; made when something is saved.
    """

    def __init__(self, path: str | os.PathLike):
        """Reads what is there."""
        self.path = pathlib.Path(path)
        self._arrays: dict[str, np.ndarray] = {}
        if self.path.exists():
            with np.load(self.path) as file:
                self._arrays = dict(file)

    def get(self, variant: str, questions: Questions) -> Scores | None:
        """The scores of a set, if they are there."""
        keys = [f"{variant}/{questions.name}/{field}" for field in Scores._fields]
        found = [self._arrays[key] for key in keys if key in self._arrays]
        count = len(questions.requests)
        if len(found) < len(keys) or any(len(values) != count for values in found):
            return None
        return Scores(*found)

    def put(self, variant: str, name: str, scores: Scores) -> None:
        """Adds the scores of a set; :meth:`write` saves them."""
        kept = Scores(scores.log_likelihoods.astype(np.float32), scores.is_greedy)
        for field, values in kept._asdict().items():
            self._arrays[f"{variant}/{name}/{field}"] = values

    def write(self) -> None:
        """Replaces the file; whoever stops the program loses no older scores."""
        folder = self.path.absolute().parent
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            try:
                np.savez_compressed(file, allow_pickle=False, **self._arrays)
            except BaseException:
                os.unlink(file.name)
                raise
        os.replace(file.name, self.path)
