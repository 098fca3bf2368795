"""How far a plan's predictions on running text are from those of exact sums."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from echo_jax.collectives import exact
from echo_jax.models.decoder import Decoder
from echo_jax.models.loading import LoadedModel
from echo_jax.models.sampling import greedy
from echo_jax.models.switched import Configs, choices, run_by_choice
from echo_jax.plan import DepthPlan
from echo_jax.typing import AnyFloat


class ProseQuality(NamedTuple):
    """Means over the tokens of each window of text."""

    divergence: Float[np.ndarray, "windows"]  # KL of the exact model to this, nats
    loss: Float[np.ndarray, "windows"]  # cross entropy of the text, nats a token
    agreement: Float[np.ndarray, "windows"]  # share of tokens with the same likeliest


class Prose:
    """Windows of text under exact sums, to compare plans with.

    Which plan runs is an argument of one compiled program; the exact stream is kept on
    the device, not its logits.

    Args:
      model: from :func:`echo_jax.models.load`.
      windows: token ids, one more a window than are predicted.
      configs: every configuration of the plans that will be measured
        (:func:`echo_jax.models.switched.distinct_configs`), that of ``exact`` too.
      exact_plan: what the others are compared with.
      batch: windows at a time; divides their number.

    Raises:
      ValueError: if ``batch`` does not divide the windows.
    """

    def __init__(
        self,
        model: LoadedModel,
        windows: Int[np.ndarray, "windows length"],
        *,
        configs: Configs,
        exact_plan: DepthPlan,
        batch: int,
    ):
        """See the class."""
        if len(windows) % batch:
            raise ValueError(
                f"batch={batch} does not divide {len(windows)} windows: leave some out."
            )
        whole = PartitionSpec()
        run = functools.partial(run_by_choice, configs=configs)
        self._stream_of = jax.jit(model.on_ranks(run, (whole, whole), whole))
        self._compare = jax.jit(
            model.on_ranks(_compare, (whole, whole, whole), (whole, whole, whole))
        )
        self._model, self._configs = model, configs
        self._batches = np.split(np.asarray(windows, np.int32), len(windows) // batch)
        self._wanted = [self._stream(part, exact_plan) for part in self._batches]

    def measure(self, plan: DepthPlan) -> ProseQuality:
        """The quality of one plan."""
        params = self._model.params
        parts = [
            self._compare(params, wanted, self._stream(part, plan), part[:, 1:])
            for part, wanted in zip(self._batches, self._wanted, strict=True)
        ]
        columns = zip(*parts, strict=True)
        return ProseQuality(*(np.concatenate(jax.device_get(c)) for c in columns))

    def _stream(self, windows: Int[np.ndarray, "batch length"], plan: DepthPlan):
        chosen = choices(plan, self._configs, self._model.config.num_calls)
        return self._stream_of(self._model.params, windows[:, :-1], chosen)


def _compare(
    decoder: Decoder,
    wanted: AnyFloat,
    found: AnyFloat,
    targets: Int[Array, "batch length"],
) -> tuple[Float[Array, "batch"], Float[Array, "batch"], Float[Array, "batch"]]:
    """Divergence, loss and agreement, each the mean over a window's tokens."""
    axis = decoder.axis_name

    def one_window(arguments):
        wanted, found, targets = arguments
        wanted, found = (
            decoder.read_out(exact.pvary(stream, axis), jnp.float32)
            for stream in (wanted, found)
        )
        same = greedy(wanted, axis) == greedy(found, axis)
        wanted, found = (_log_softmax(logits, axis) for logits in (wanted, found))
        # Padded columns have no probability; their logs may be anything finite.
        terms = jnp.exp(wanted) * (wanted - found)
        divergence = exact.psum(jnp.sum(terms, axis=-1), axis)
        columns = found.shape[-1]
        local = targets - jax.lax.axis_index(axis) * columns
        mine = (local >= 0) & (local < columns)
        index = jnp.where(mine, local, 0)[:, None]
        own = jnp.take_along_axis(found, index, axis=-1)[:, 0]
        loss = -exact.psum(jnp.where(mine, own, 0.0), axis)
        return jnp.mean(divergence), jnp.mean(loss), jnp.mean(same)

    # A window at a time: two sets of logits of a batch would fill a device.
    return jax.lax.map(one_window, (wanted, found, targets))


def _log_softmax(
    logits: Float[Array, "length local_vocab"], axis: str
) -> Float[Array, "length local_vocab"]:
    """This rank's log-probabilities from logits that are cut by vocabulary."""
    peak = jax.lax.pmax(jnp.max(logits, axis=-1, keepdims=True), axis)
    total = exact.psum(jnp.sum(jnp.exp(logits - peak), axis=-1, keepdims=True), axis)
    return logits - exact.pvary(peak + jnp.log(total), axis)
