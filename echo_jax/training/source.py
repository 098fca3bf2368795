"""Where batches come from, and how they reach the mesh."""

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from echo_jax.training.config import TrainConfig
from echo_jax.training.corpus import Corpus, is_corpus
from echo_jax.training.data import Batch, ByteText
from echo_jax.training.ranks import AnyMesh, placement

Source = ByteText | Corpus


def open_source(config: TrainConfig) -> Source:
    """Opens the text of a run and checks that the run fits it.

    Raises:
      ValueError: if it cannot be read, is too short, or has another vocabulary than
        the model.
    """
    sizes, vocab_size = config.data, config.model.vocab_size
    path = sizes.path
    if path is None or not is_corpus(path):
        return ByteText(path, sizes.length)
    corpus = Corpus(path)
    if vocab_size != corpus.vocab_size:
        raise ValueError(
            f"vocab_size={vocab_size} is not that of {path}, whose tokenizer has "
            f"{corpus.vocab_size} tokens: use --vocab-size {corpus.vocab_size}."
        )
    corpus.check(sizes)
    return corpus


class Feeder:
    """Puts each process's rows of a batch where the mesh wants them."""

    def __init__(self, mesh: AnyMesh, batch_size: int):
        """See the class."""
        self.batch_size = batch_size
        self.mesh = placement(mesh)
        indices = self._sharding(0).addressable_devices_indices_map((batch_size,))
        spans = [_rows(index, 0, batch_size) for index in indices.values()]
        # The rows that the devices of this process need; neighbours in every mesh
        # that make_mesh lays out.
        self.rows = slice(min(s.start for s in spans), max(s.stop for s in spans))

    def place(self, rows: Batch) -> jax.Array:
        """A batch, sharded over the data axis, from this process's ``rows`` of it.

        Args:
          rows: int32 ``(rows, length + 1)``, or ``(steps, rows, length + 1)`` for the
            batches of several steps.

        Returns:
          A global array ``(batch_size, length + 1)``, with the same leading axis if
          there is one.
        """
        rows = np.asarray(rows)
        lead = rows.ndim - 2
        shape = (*rows.shape[:lead], self.batch_size, rows.shape[-1])

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            wanted, first = _rows(index, lead, self.batch_size), self.rows.start
            return rows[..., wanted.start - first : wanted.stop - first, :]

        return jax.make_array_from_callback(shape, self._sharding(lead), part)

    def _sharding(self, lead: int) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*[None] * lead, "data"))


def _rows(index: tuple[slice, ...] | None, axis: int, batch_size: int) -> slice:
    """The rows that a device holds, with a start and a stop."""
    assert index is not None  # every device of the mesh holds some
    start, stop, _ = index[axis].indices(batch_size)
    return slice(start, stop)
