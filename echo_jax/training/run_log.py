"""Where the figures of a run go: records, and TensorBoard where it is asked for."""

import dataclasses
import importlib.util
import pathlib
import warnings
from typing import Any

import jax

from echo_jax.records import Record, RecordWriter
from echo_jax.training.checkpoint import CheckpointWarning
from echo_jax.training.config import TrainConfig, Variant

Figures = dict[str, tuple[float, str]]  # name: value and unit


class RunLog:
    """The figures of one variant. Of several processes only the first one writes.

    Args:
      config: of the run; every record carries it.
      variant: which all-reduces.
      writer: of the records; TensorBoard's files go to a folder beside its file.

    Raises:
      ValueError: if TensorBoard is asked for and tensorboardX is not installed.
    """

    def __init__(self, config: TrainConfig, variant: Variant, writer: RecordWriter):
        """See the class."""
        self._writer, self._seed = writer, config.seed
        chosen = dataclasses.asdict(config)
        del chosen["seed"], chosen["variants"]
        self._config = {"variant": variant, **chosen}
        self._writes = jax.process_index() == 0
        self._board = None
        if config.tensorboard and self._writes:
            self._board = TensorBoard(writer.path.parent / "tensorboard" / variant)

    def write(
        self,
        metric: str,
        value: float | int | None,
        unit: str,
        *,
        spread: float | None = None,
        baseline: str | None = None,
        **kinds,
    ) -> None:
        """Writes one record. A disk that is full costs a warning, not the training.

        Args:
          metric: its name.
          value: the figure; None is not written.
          unit: of the figure.
          spread: how far repetitions lie apart, in the same unit.
          baseline: what the figure is compared with.
          **kinds: what else goes into the record's ``config``.
        """
        if value is None or not self._writes:
            return
        record = Record(
            experiment="train",
            metric=metric,
            value=float(value),
            unit=unit,
            spread=spread,
            baseline=baseline,
            seed=self._seed,
            config={**self._config, **kinds},
        )
        try:
            self._writer.write(record)
        except OSError as error:
            warnings.warn(
                f"{self._writer.path}: figures could not be written "
                f"({error.strerror}).",
                CheckpointWarning,
                stacklevel=2,
            )

    def write_step(self, figures: Figures, step: int) -> None:
        """Writes the figures of one step, to TensorBoard too."""
        for name, (value, unit) in figures.items():
            self.write(name, value, unit, step=step)
        if self._board is not None:
            values = {name: value for name, (value, _) in figures.items()}
            self._board.write(values, step)

    def close(self) -> None:
        """Waits until everything is written."""
        if self._board is not None:
            self._board.close()


class TensorBoard:
    """Writes scalars for TensorBoard.

    Args:
      folder: a folder of its own for each run.

    Raises:
      ValueError: if tensorboardX is not installed.
    """

    def __init__(self, folder: pathlib.Path):
        """See the class."""
        check_tensorboard()
        import tensorboardX

        self._writer = tensorboardX.SummaryWriter(str(folder))

    def write(self, figures: dict[str, Any], step: int) -> None:
        """Writes the figures of one step."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()


def check_tensorboard() -> None:
    """Refuses to start without the package that writes TensorBoard's files.

    Raises:
      ValueError: if tensorboardX is not installed.
    """
    if importlib.util.find_spec("tensorboardX") is None:
        raise ValueError(
            "--tensorboard needs tensorboardX, which is not installed: "
            "pip install 'echo_jax[train]', or leave the option out."
        )
