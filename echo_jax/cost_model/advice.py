"""Whether few bits pay for the messages at hand, and with which settings."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp

from echo_jax.config import EchoConfig
from echo_jax.cost_model.model import SumTimes
from echo_jax.models.config import DecoderConfig

CHUNKS = (1, 2, 4, 8, 16)
# Echo is advised only where it is predicted to be so much faster: predictions are off
# by more than a few percent, and where little is to be gained the exact sum is safe.
MARGIN = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Message:
    """Sums of one size.

    Raises:
      ValueError: for a size or a number under 1.
    """

    message_bytes: int  # of a rank's tensor
    calls: int = 1  # how many such sums there are

    def __post_init__(self):
        if self.message_bytes < 1 or self.calls < 1:
            raise ValueError(
                f"message_bytes={self.message_bytes} and calls={self.calls} must be at "
                "least 1."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advice:
    """Which settings to use, and what they are predicted to bring.

    Made by :func:`advise`.
    """

    min_bytes: int | None  # from which on messages gain enough; None: none does
    num_chunks: int  # pieces that messages travel in
    messages: tuple[Message, ...]
    exact_seconds: tuple[float, ...]  # of one sum of each message
    echo_seconds: tuple[float, ...]  # the same through the codec, in num_chunks pieces

    @property
    def path(self) -> Literal["echo", "exact"]:
        """Exact where no message gains enough."""
        return "exact" if self.min_bytes is None else "echo"

    def takes_echo(self, message: Message) -> bool:
        """Whether the advised settings send this message through the codec."""
        return self.min_bytes is not None and message.message_bytes >= self.min_bytes

    def configure(self, config: EchoConfig) -> EchoConfig:
        """The configuration with the advised path, threshold and pieces."""
        if self.min_bytes is None:
            return config.exact()
        return dataclasses.replace(
            config, path="auto", min_bytes=self.min_bytes, num_chunks=self.num_chunks
        )

    @property
    def all_exact_seconds(self) -> float:
        """Time of all sums, exact."""
        return sum(
            m.calls * t for m, t in zip(self.messages, self.exact_seconds, strict=True)
        )

    @property
    def advised_seconds(self) -> float:
        """Time of all sums with the advised settings."""
        times = zip(self.messages, self.exact_seconds, self.echo_seconds, strict=True)
        return sum(m.calls * (y if self.takes_echo(m) else x) for m, x, y in times)

    def gain(self, *, compute_seconds: float) -> float:
        """How many times faster everything is, beside so much other work.

        Args:
          compute_seconds: that take no sums: of a first token, or a training step.

        Raises:
          ValueError: for a negative time.
        """
        if compute_seconds < 0:
            raise ValueError(f"compute_seconds={compute_seconds} must be at least 0.")
        if not self.all_exact_seconds:
            return 1.0
        return (compute_seconds + self.all_exact_seconds) / (
            compute_seconds + self.advised_seconds
        )

    def gain_of_share(self, share: float) -> float:
        """How many times faster everything is, where exact sums take so much of it.

        Args:
          share: part of the time that exact sums take, 0 to 1.

        Raises:
          ValueError: for a share outside 0 to 1.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"share={share} must lie in 0 to 1.")
        if not self.all_exact_seconds:
            return 1.0
        return 1 / (1 - share + share * self.advised_seconds / self.all_exact_seconds)


def advise(
    times: SumTimes,
    messages: Sequence[Message],
    *,
    chunks: Sequence[int] = CHUNKS,
    margin: float = MARGIN,
) -> Advice:
    """Settings for a set of sums; the exact path where few bits would not pay.

    Args:
      times: a cost model.
      messages: what is summed.
      chunks: numbers of pieces to choose from.
      margin: by how much echo must be predicted to be faster; 0.1: by a tenth.

    Returns:
      The number of pieces with which all sums together take least, its break-even as
      ``min_bytes``, and the predicted times.

    Raises:
      ValueError: without messages or pieces, or for a negative margin.

    Example:
        >>> advice = advise(model, [Message(message_bytes=1 << 24, calls=64)])
        >>> config = advice.configure(EchoConfig())
    """
    if not messages:
        raise ValueError("messages must not be empty: say what is summed.")
    if min(chunks, default=0) < 1:
        raise ValueError(f"chunks={chunks!r} must hold numbers of at least 1.")
    if margin < 0:
        raise ValueError(f"margin={margin} must be at least 0.")
    advices = [_with_pieces(times, messages, count, margin) for count in sorted(chunks)]
    return min(advices, key=lambda advice: advice.advised_seconds)


def break_even(
    times: SumTimes, *, num_chunks: int = 1, margin: float = 0.0, largest: int = 1 << 34
) -> int | None:
    """The message from which on echo is the faster.

    Args:
      times: a cost model.
      num_chunks: pieces.
      margin: by how much it must be faster.
      largest: bytes of the largest message that is looked at.

    Returns:
      Bytes at which the two times cross; 1 if echo is always faster, None if it is not
      even with the largest message. On a link with a burst they may cross more than
      once, and this is one of the crossings.
    """

    def pays(size: int) -> bool:
        return _pays(times, size, num_chunks, margin)

    if not pays(largest):
        return None
    # Echo wins with the largest message and not with none at all: they cross between.
    low, high = 0, largest
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def decoder_messages(
    config: DecoderConfig,
    *,
    tokens: int,
    what: Literal["first token", "step"] = "first token",
) -> tuple[Message, ...]:
    """The sums of a decoder's layers in one pass.

    The two of the vocabulary travel in more bits and are left out.

    Args:
      config: the decoder.
      tokens: of all sequences of a batch on one tensor-parallel group.
      what: the forward pass of a prompt, or a training step, which sums as much again
        backward.
    """
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


def _with_pieces(
    times: SumTimes, messages: Sequence[Message], num_chunks: int, margin: float
) -> Advice:
    """The advice for a number of pieces."""
    sizes = sorted({message.message_bytes for message in messages})
    least = break_even(times, num_chunks=num_chunks, margin=margin, largest=max(sizes))
    for size in sizes:
        # Padding of a few blocks can cost a message just above more than it gains, and
        # bends of the times can cost one further up.
        lost = least is not None and size >= least
        if lost and not _pays(times, size, num_chunks, margin):
            least = size + 1
    if least is not None and least > sizes[-1]:
        least = None
    return Advice(
        min_bytes=least,
        num_chunks=num_chunks,
        messages=tuple(messages),
        exact_seconds=tuple(times.exact_seconds(m.message_bytes) for m in messages),
        echo_seconds=tuple(
            times.echo_seconds(m.message_bytes, num_chunks) for m in messages
        ),
    )
