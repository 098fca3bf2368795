"""Log-likelihoods of continuations, by plan, whatever else is in the batch."""

import collections
import concurrent.futures
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from echo_jax.collectives import exact
from echo_jax.layers.embedding import vocab_parallel_cross_entropy
from echo_jax.models.decoder import Decoder
from echo_jax.models.loading import LoadedModel
from echo_jax.models.switched import choices, distinct_configs, run_by_choice
from echo_jax.plan import DepthPlan
from echo_jax.typing import AnyFloat

TokenIds = Sequence[int] | Int[np.ndarray, "length"]
Progress = Callable[[int, int], None]  # requests done, requests in all

# What requests are padded to; steps of at most a half waste a sixth of the work.
LENGTHS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_IN_FLIGHT = 3  # batches handed to the device before the first is waited for


class Request(NamedTuple):
    """Token ids of a context, at least one, and of what is to follow it."""

    context: TokenIds
    continuation: TokenIds


class Scores(NamedTuple):
    """Of each request: how likely its continuation is, and whether it is greedy."""

    log_likelihoods: Float[np.ndarray, "requests"]  # nats, summed over the continuation
    # Whether greedy decoding would write the continuation: at none of its positions is
    # another token likelier.
    is_greedy: Bool[np.ndarray, "requests"]


class Scorer:
    """Scores requests under any of a few plans.

    Requests are grouped by length into buckets. All batches of a bucket have the same
    shape, and every call is quantized whatever its size, so that a score depends on
    nothing but the request, bit for bit. Which plan runs is an argument of the compiled
    programs, of which there are two for each bucket. Logits are float32 even if the
    model is bfloat16.

    Args:
      model: from :func:`echo_jax.models.load`.
      plans: what :meth:`score` may be asked for; those with feedback share block size
        and rotation.
      batch_tokens: tokens of a batch, padding included.
      lengths: of the buckets in tokens, ascending. Requests longer than the last, or
        than the model's positions, lose the start of their context.

    Raises:
      ValueError: for plans that cannot share a residual, when the first is scored.

    Example:
        >>> scorer = Scorer(model, [exact, edges])
        >>> difference = scorer.score(requests, edges).log_likelihoods - wanted
    """

    def __init__(
        self,
        model: LoadedModel,
        plans: Sequence[DepthPlan],
        *,
        batch_tokens: int = 4096,
        lengths: Sequence[int] = LENGTHS,
    ):
        """See the class."""
        if batch_tokens < 1:
            raise ValueError(f"batch_tokens={batch_tokens} must be at least 1.")
        self.model, self.batch_tokens = model, batch_tokens
        limit = model.checkpoint.max_length
        self.lengths = tuple(n for n in lengths if n < limit) + (
            (limit,) if max(lengths) >= limit else ()
        )
        self.configs = distinct_configs(plans, model.config.num_calls)
        self._compiled: dict[int, tuple[Callable, Callable]] = {}

    def score(
        self,
        requests: Sequence[Request],
        plan: DepthPlan,
        *,
        progress: Progress | None = None,
    ) -> Scores:
        """Scores every request under one of the plans.

        Args:
          requests: in any order, of any lengths.
          plan: one of those that the scorer was made for.
          progress: called with the requests done and the requests in all.

        Raises:
          ValueError: for an empty context or continuation, or a continuation that
            alone is too long.
        """
        chosen = choices(plan, self.configs, self.model.config.num_calls)
        found = np.zeros(len(requests)), np.zeros(len(requests), bool)
        pending: collections.deque = collections.deque()
        done = 0

        def finish() -> None:
            nonlocal done
            numbers, results = pending.popleft()
            for values, result in zip(found, results, strict=True):
                values[numbers] = np.asarray(result)[: len(numbers)]
            done += len(numbers)
            if progress is not None:
                progress(done, len(requests))

        for length, numbers in self._batches(requests):
            rows = [requests[number] for number in numbers]
            inputs, targets = self._pack(rows, length)
            stream_of, score_of = self._programs(length)
            params = self.model.params
            stream = stream_of(params, inputs, chosen)
            pending.append((numbers, score_of(params, stream, targets)))
            if len(pending) > _IN_FLIGHT:
                finish()
        while pending:
            finish()
        return Scores(*found)

    def compile(self, requests: Sequence[Request], *, threads: int = 8) -> None:
        """Compiles what these requests need, several programs at a time."""
        lengths = sorted({self.length_of(request) for request in requests})
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            list(pool.map(self._programs, lengths))

    def length_of(self, request: Request) -> int:
        """The bucket of a request.

        Raises:
          ValueError: as :meth:`score`.
        """
        context, continuation = map(len, request)
        if not context or not continuation:
            raise ValueError(
                f"a request of {context} and {continuation} tokens: both need at least "
                "one; put the checkpoint's first token in front of an empty context."
            )
        if continuation > self.lengths[-1]:
            raise ValueError(
                f"a continuation of {continuation} tokens is longer than "
                f"{self.lengths[-1]}: cut it into several requests."
            )
        needed = min(context + continuation - 1, self.lengths[-1])
        return next(length for length in self.lengths if length >= needed)

    def rows(self, length: int) -> int:
        """Requests in a batch of a bucket."""
        return max(1, self.batch_tokens // length)

    def _batches(self, requests: Sequence[Request]):
        """``(length, numbers of requests)``; the longest first, to fail early."""
        buckets: dict[int, list[int]] = {}
        for number, request in enumerate(requests):
            buckets.setdefault(self.length_of(request), []).append(number)
        for length in sorted(buckets, reverse=True):
            numbers, rows = np.array(buckets[length]), self.rows(length)
            for start in range(0, len(numbers), rows):
                yield length, numbers[start : start + rows]

    def _pack(self, requests: Sequence[Request], length: int):
        """Inputs and targets ``(rows, length)``; a target of -1 does not count."""
        inputs = np.zeros((self.rows(length), length), np.int32)
        targets = np.full_like(inputs, -1)
        for row, (context, continuation) in enumerate(requests):
            tokens = np.concatenate([context, continuation])[-length - 1 :]
            inputs[row, : len(tokens) - 1] = tokens[:-1]
            start = len(tokens) - 1 - len(continuation)
            targets[row, start : len(tokens) - 1] = continuation
        return inputs, targets

    def _programs(self, length: int) -> tuple[Callable, Callable]:
        """The compiled pass and the compiled scores of its stream, for one bucket."""
        if length not in self._compiled:
            params, replicated = self.model.params, PartitionSpec()
            shape = (self.rows(length), length)
            tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
            sums = jax.ShapeDtypeStruct((self.model.config.num_calls + 1,), jnp.int32)
            run = functools.partial(run_by_choice, configs=self.configs)
            lowered = jax.jit(
                self.model.on_ranks(run, (replicated, replicated), replicated)
            ).lower(params, tokens, sums)
            score = jax.jit(
                self.model.on_ranks(
                    _score, (replicated, replicated), (replicated, replicated)
                )
            )
            scored = score.lower(params, lowered.out_info, tokens)
            self._compiled[length] = lowered.compile(), scored.compile()
        return self._compiled[length]


def _score(
    decoder: Decoder, stream: AnyFloat, targets: Int[Array, "batch length"]
) -> tuple[Float[Array, "batch"], Bool[Array, "batch"]]:
    """Log-likelihood of the targets that count, and whether each is the likeliest."""
    axis = decoder.axis_name
    logits = decoder.read_out(exact.pvary(stream, axis), jnp.float32)
    counts = targets >= 0
    labels = jnp.where(counts, targets, 0)
    losses = vocab_parallel_cross_entropy(logits, labels, axis)
    # The loss of the likeliest token is that of a label with the peak for its logit.
    peak = jax.lax.pmax(jnp.max(logits, axis=-1), axis)
    columns = logits.shape[-1]
    local = labels - jax.lax.axis_index(axis) * columns
    mine = (local >= 0) & (local < columns)
    own = jnp.take_along_axis(logits, jnp.where(mine, local, 0)[..., None], axis=-1)
    own = exact.psum(jnp.where(mine, own[..., 0], 0.0), axis)
    likelihood = -jnp.sum(jnp.where(counts, losses, 0.0), axis=-1)
    return likelihood, jnp.all(~counts | (own >= peak), axis=-1)
