"""Whether quantized sums pay for given messages, and with which settings."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp

from echo_jax.config import EchoConfig
from echo_jax.cost_model.model import SumTimes
from echo_jax.models.config import DecoderConfig

CHUNKS = (1, 2, 4, 8, 16)
# Echo is advised only where all that it sends is predicted to be faster by this
# fraction: one prediction in four is off by it or more
# (experiments/check_cost_model.py), and for a gain that may be none the exact sum is
# safer. So the margin also holds for what a lower threshold adds.
MARGIN = 0.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Message:
    """One or more sums of the same size.

    Raises:
      ValueError: for a size or a number below 1.
    """

    message_bytes: int  # size of a rank's tensor
    calls: int = 1  # number of sums of this size

    def __post_init__(self):
        if self.message_bytes < 1 or self.calls < 1:
            raise ValueError(
                f"message_bytes={self.message_bytes} and calls={self.calls} must be at "
                "least 1."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advice:
    """Which settings to use, and the times that are predicted with them.

    Made by :func:`advise`.
    """

    # Size from which messages are sent through the codec; None: they gain too little.
    min_bytes: int | None
    num_chunks: int  # number of pieces of a message
    messages: tuple[Message, ...]
    exact_seconds: tuple[float, ...]  # of one sum of each message
    echo_seconds: tuple[float, ...]  # the same through the codec, in num_chunks pieces

    @property
    def path(self) -> Literal["echo", "exact"]:
        """``"exact"`` if the messages gain too little from the codec."""
        return "exact" if self.min_bytes is None else "echo"

    def takes_echo(self, message: Message) -> bool:
        """Whether the advised settings send this message through the codec."""
        return self.min_bytes is not None and message.message_bytes >= self.min_bytes

    def configure(self, config: EchoConfig) -> EchoConfig:
        """``config`` with the advised path, ``min_bytes`` and ``num_chunks``."""
        if self.min_bytes is None:
            return config.exact()
        return dataclasses.replace(
            config, path="auto", min_bytes=self.min_bytes, num_chunks=self.num_chunks
        )

    @property
    def all_exact_seconds(self) -> float:
        """Time of all sums if all of them are exact."""
        return sum(
            m.calls * t for m, t in zip(self.messages, self.exact_seconds, strict=True)
        )

    @property
    def advised_seconds(self) -> float:
        """Time of all sums with the advised settings."""
        times = zip(self.messages, self.exact_seconds, self.echo_seconds, strict=True)
        return sum(m.calls * (y if self.takes_echo(m) else x) for m, x, y in times)

    def gain(self, *, compute_seconds: float) -> float:
        """Predicted speedup of a whole first token or training step.

        Args:
          compute_seconds: time of everything but the sums.

        Raises:
          ValueError: for a negative time, or one without end.
        """
        if not 0 <= compute_seconds < math.inf:
            raise ValueError(
                f"compute_seconds={compute_seconds} must be at least 0, and finite."
            )
        return times_as_fast(
            compute_seconds + self.all_exact_seconds,
            compute_seconds + self.advised_seconds,
        )

    def gain_of_share(self, share: float) -> float:
        """Predicted speedup of a whole, from the share of exact sums in its time.

        Args:
          share: fraction of the time that exact sums take, 0 to 1.

        Raises:
          ValueError: for a share outside 0 to 1.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"share={share} must lie in 0 to 1.")
        if not self.all_exact_seconds:
            return 1.0
        left = share * self.advised_seconds / self.all_exact_seconds
        return times_as_fast(1.0, 1 - share + left)


def times_as_fast(before: float, after: float) -> float:
    """How many times shorter a time became; without end where nothing is left.

    A burst can let all messages pass at once, and sums that a codec which is counted as
    free has made so small take no time at all.

    Args:
      before: seconds, or any other unit.
      after: in the same unit.
    """
    if after > 0:
        return before / after
    return math.inf if before > 0 else 1.0


def advise(
    times: SumTimes,
    messages: Sequence[Message],
    *,
    chunks: Sequence[int] = CHUNKS,
    margin: float = MARGIN,
) -> Advice:
    """The fastest settings for a set of sums; the exact path where echo does not pay.

    All messages from ``min_bytes`` on are sent through the codec, also those of a size
    that gains less than a smaller one: the time of all sums together decides.

    Args:
      times: a cost model.
      messages: the messages to be summed.
      chunks: numbers of pieces to choose from.
      margin: how much faster echo must be predicted to be; 0.2 is a fifth. For each
        number of pieces, those messages are sent through the codec for which the time
        of all sums is the shortest if echo's part of it is counted as longer by this
        fraction. All that echo sends is then faster by more than the margin, and so is
        the smallest message of it.

    Returns:
      The number of pieces with which all sums together are fastest, the break-even size
      for it as ``min_bytes``, and the predicted times. Of several break-evens it is one
      between the largest exact message and the smallest that echo sends.

    Raises:
      ValueError: without messages or pieces, or for a margin that is negative or not
        finite.

    Example:
        >>> advice = advise(model, [Message(message_bytes=1 << 24, calls=64)])
        >>> config = advice.configure(EchoConfig())
    """
    if not messages:
        raise ValueError("messages must not be empty: give at least one Message.")
    if min(chunks, default=0) < 1:
        raise ValueError(f"chunks={chunks!r} must hold numbers of at least 1.")
    if not 0 <= margin < math.inf:
        raise ValueError(f"margin={margin} must be at least 0, and finite.")
    advices = [_with_pieces(times, messages, count, margin) for count in sorted(chunks)]
    return min(advices, key=lambda advice: advice.advised_seconds)


def break_even(
    times: SumTimes, *, num_chunks: int = 1, margin: float = 0.0, largest: int = 1 << 34
) -> int | None:
    """A message size at which echo becomes faster than the exact sum.

    Found by bisection up to ``largest``. Where the times cross once, echo is faster
    from this size on and not below it. Where they cross more than once, as they may on
    a link with a burst or by the padding of blocks, this is one of the crossings, and
    sizes on either side of it may be better summed the other way. :func:`advise`
    compares the times of all messages that it is given.

    Args:
      times: a cost model.
      num_chunks: number of pieces.
      margin: by which fraction echo must be faster.
      largest: the largest size to consider, in bytes.

    Returns:
      A size in bytes at which echo is faster by more than the margin, while with one
      byte less it is not, or 1; None if it is not at the largest size, even if it is at
      smaller ones.
    """
    if not _pays(times, largest, num_chunks, margin):
        return None
    return _crossing(times, 0, largest, num_chunks, margin)


def decoder_messages(
    config: DecoderConfig,
    *,
    tokens: int,
    what: Literal["first token", "step"] = "first token",
) -> tuple[Message, ...]:
    """The sums of a decoder's layers in one pass.

    The two sums over the vocabulary, which are sent in more bits, are left out.

    Args:
      config: the decoder.
      tokens: number of tokens of the whole batch of one tensor-parallel group.
      what: the forward pass of a prompt, or a training step, which has as many sums in
        the backward pass.

    Raises:
      ValueError: if ``what`` is neither, or for less than one token.
    """
    if what not in ("first token", "step"):
        raise ValueError(f"what={what!r} must be 'first token' or 'step'.")
    if tokens < 1:
        raise ValueError(f"tokens={tokens} must be at least 1.")
    calls = config.num_calls
    if what == "step":
        calls *= 2
        if config.remat == "layer":
            calls += config.num_layers  # the first sum of each layer runs again
    size = tokens * config.width * jnp.dtype(config.dtype).itemsize
    return (Message(message_bytes=size, calls=calls),)


def _pays(times: SumTimes, size: int, num_chunks: int, margin: float) -> bool:
    exact, echo = times.exact_seconds(size), times.echo_seconds(size, num_chunks)
    return exact > (1 + margin) * echo


def _crossing(
    times: SumTimes, low: int, high: int, num_chunks: int, margin: float
) -> int:
    """Where echo becomes faster, above ``low``; at ``high`` it is faster."""
    while high - low > 1:
        middle = (low + high) // 2
        pays = _pays(times, middle, num_chunks, margin)
        low, high = (low, middle) if pays else (middle, high)
    return high


def _with_pieces(
    times: SumTimes, messages: Sequence[Message], num_chunks: int, margin: float
) -> Advice:
    """The advice if messages are cut into ``num_chunks`` pieces."""
    none = Advice(
        min_bytes=None,
        num_chunks=num_chunks,
        messages=tuple(messages),
        exact_seconds=tuple(times.exact_seconds(m.message_bytes) for m in messages),
        echo_seconds=tuple(
            times.echo_seconds(m.message_bytes, num_chunks) for m in messages
        ),
    )
    # A larger message may gain less than a smaller one: of padding to whole blocks, or
    # because a burst lets the smaller one's codes pass. So every threshold is tried. Of
    # those that are equally good, the first one sends the least through the codec.
    sizes = sorted({message.message_bytes for message in messages}, reverse=True)
    some = [dataclasses.replace(none, min_bytes=size) for size in sizes]
    best = min((none, *some), key=lambda advice: _counted_seconds(advice, margin))
    if best.min_bytes is None:
        return none
    below = max((size for size in sizes if size < best.min_bytes), default=0)
    least = _crossing(times, below, best.min_bytes, num_chunks, margin)
    return dataclasses.replace(best, min_bytes=least)


def _counted_seconds(advice: Advice, margin: float) -> float:
    """Time of all sums, in which what echo sends counts as longer by the margin."""
    times = zip(advice.messages, advice.exact_seconds, advice.echo_seconds, strict=True)
    return sum(
        m.calls * ((1 + margin) * y if advice.takes_echo(m) else x) for m, x, y in times
    )
