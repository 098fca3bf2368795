"""``DepthPlan``: which configuration each all-reduce of a model uses."""

import dataclasses
import itertools
from collections.abc import Iterator

from echo_jax.collectives.traffic import takes_exact_path
from echo_jax.config import EchoConfig
from echo_jax.typing import Shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class DepthPlan:
    """One :class:`EchoConfig` for each all-reduce of the layers, in order of depth.

    A few calls at either end, where a rounding error does the most harm, may differ
    from the bulk in between. Built by :meth:`uniform` or :meth:`edges`; indexed by the
    call, once the number of calls is known (:meth:`bind`, which our models call).

    Example:
        >>> plan = DepthPlan.edges(EchoConfig(), num_calls=24)
        >>> [plan[i].format.bits for i in (0, 3, 4, 21, 22, 23)]
        [8, 8, 4, 4, 8, 8]
        >>> plan.backward[0].format.bits, plan.backward[23].format.bits
        (8, 8)
    """

    head: tuple[EchoConfig, ...] = ()  # the first calls
    body: EchoConfig  # every call in between
    tail: tuple[EchoConfig, ...] = ()  # the last calls
    num_calls: int | None = None  # all-reduces of the layers, in one direction
    # Bits of the vocabulary's two sums, which are not among the calls of the layers:
    # the embedding's, and the readout's going backward. In the latter each rank's part
    # is nearly the same for every token, so that 4 bits round it the same way every
    # time: a bias that training follows, and no noise that averages out.
    vocab_bits: int = 8
    # The backward sums, where they are not to mirror the forward ones.
    mirror: "DepthPlan | None" = None

    def __post_init__(self):
        for config in self._configs():
            same = (
                config.format.block_size == self.body.format.block_size
                and config.format.rotate == self.body.format.rotate
                and config.residual_dtype == self.body.residual_dtype
            )
            if not same:
                raise ValueError(
                    "All calls of a DepthPlan share one residual, so block_size, "
                    "rotate and residual_dtype must agree; got "
                    f"{config} beside {self.body}."
                )
        calls = self.num_calls
        if calls is not None and (not isinstance(calls, int) or calls < 0):
            raise ValueError(f"num_calls={calls!r} must be an int of at least 0.")

    @classmethod
    def uniform(
        cls,
        config: EchoConfig = EchoConfig(),
        *,
        exact_final: bool = False,
        vocab_bits: int = 8,
        num_calls: int | None = None,
    ) -> "DepthPlan":
        """The same configuration for every call of the layers.

        Args:
          config: that of every call.
          exact_final: make the last call exact; it then pays everything owed.
          vocab_bits: bits of the vocabulary's two sums.
          num_calls: all-reduces of the layers, if known already.
        """
        tail = (config.exact(),) if exact_final else ()
        return cls(body=config, tail=tail, vocab_bits=vocab_bits, num_calls=num_calls)

    @classmethod
    def edges(
        cls,
        config: EchoConfig = EchoConfig(),
        *,
        edge_bits: int = 8,
        first: int = 2,
        last: int = 1,
        exact_final: bool = False,
        calls_per_layer: int = 2,
        vocab_bits: int = 8,
        num_calls: int | None = None,
    ) -> "DepthPlan":
        """More bits for the layers at the ends, whose errors weigh most.

        The stream is small in the first layers, so an error there is large beside it;
        nothing repays the error of the last.

        Args:
          config: that of the layers in between.
          edge_bits: bits of the layers at the ends.
          first: layers at the start that get them.
          last: layers at the end that get them.
          exact_final: make the last call exact; it then pays everything owed.
          calls_per_layer: all-reduces of a layer.
          vocab_bits: bits of the vocabulary's two sums.
          num_calls: all-reduces of the layers, if known already.

        Raises:
          ValueError: for a negative count, or bits that no format has.
        """
        if min(first, last) < 0 or calls_per_layer < 1:
            raise ValueError(
                f"first={first} and last={last} must be at least 0 and "
                f"calls_per_layer={calls_per_layer} at least 1."
            )
        edge = _with_bits(config, edge_bits)
        tail = (edge,) * (last * calls_per_layer)
        if exact_final:
            tail = (*tail[:-1], config.exact())
        head = (edge,) * (first * calls_per_layer)
        return cls(
            head=head,
            body=config,
            tail=tail,
            vocab_bits=vocab_bits,
            num_calls=num_calls,
        )

    def bind(self, num_calls: int) -> "DepthPlan":
        """The plan for a model with this many all-reduces in each direction.

        Raises:
          ValueError: if the plan is bound to another number already.
        """
        if self.num_calls not in (None, num_calls):
            raise ValueError(
                f"This plan is made for {self.num_calls} calls, the model has "
                f"{num_calls}: build the plan with num_calls={num_calls}, or without."
            )
        mirror = None if self.mirror is None else self.mirror.bind(num_calls)
        return dataclasses.replace(self, num_calls=num_calls, mirror=mirror)

    def with_backward(self, plan: "DepthPlan") -> "DepthPlan":
        """This plan forward and another one backward.

        Args:
          plan: of the backward sums, in the order in which they run: its first call is
            the mirror of the model's last.

        Raises:
          ValueError: if the two could not share a residual, or differ in ``num_calls``.
        """
        calls = plan.num_calls if self.num_calls is None else self.num_calls
        joined = dataclasses.replace(self, mirror=plan)
        return joined if calls is None else joined.bind(calls)

    @property
    def backward(self) -> "DepthPlan":
        """The plan of the mirror calls: entry ``i`` is for the mirror of call ``i``.

        Going backward the last call is that of layer 0, so the ends change places.
        """
        plan = self if self.mirror is None else self.mirror
        return dataclasses.replace(
            plan, head=plan.tail[::-1], tail=plan.head[::-1], mirror=None
        )

    @property
    def vocab(self) -> EchoConfig:
        """The configuration of the vocabulary's sum in this direction."""
        return _with_bits(self.body, self.vocab_bits)

    def residual_config(self, shape: Shape, dtype) -> EchoConfig:
        """The configuration to make the residual of calls on such a tensor with.

        Without feedback where no call can owe anything: each is exact, or small, or
        does not feed back. ``init_residual`` then makes none.
        """
        owes = any(
            config.feedback and not takes_exact_path(shape, dtype, config)
            for config in self._configs()
        )
        return dataclasses.replace(self.body, feedback=owes)

    def settled(self, shape: Shape, dtype) -> "DepthPlan":
        """The exact plan if every call on such a tensor takes the exact path.

        The plan itself otherwise. Models that ask run the very program of the exact
        plan then, so that results agree in every bit.
        """
        configs = self._configs()
        if all(takes_exact_path(shape, dtype, config) for config in configs):
            return DepthPlan.uniform(EchoConfig().exact(), num_calls=self.num_calls)
        return self

    def __len__(self) -> int:
        return self._bound_calls()

    def __iter__(self) -> Iterator[EchoConfig]:
        return (self[call] for call in range(len(self)))

    def __getitem__(self, call_index: int) -> EchoConfig:
        """The configuration of one call; negative indices count from the last."""
        if not self.head and not self.tail and self.num_calls is None:
            return self.body
        calls = self._bound_calls()
        if not -calls <= call_index < calls:
            raise IndexError(
                f"call {call_index} of a plan for {calls} calls: indices run from 0."
            )
        index = call_index % calls
        if index >= calls - len(self.tail):
            return self.tail[index - calls]
        return self.head[index] if index < len(self.head) else self.body

    def _configs(self) -> tuple[EchoConfig, ...]:
        """Every configuration that a call of either direction has."""
        own = (*self.head, self.body, *self.tail, self.vocab)
        return own if self.mirror is None else own + self.mirror._configs()

    def _bound_calls(self) -> int:
        if self.num_calls is None:
            raise ValueError(
                "This plan does not know the number of calls yet, and with it which "
                "are the last: use plan.bind(num_calls), two for each decoder layer."
            )
        return self.num_calls


def _with_bits(config: EchoConfig, bits: int) -> EchoConfig:
    """The same configuration at another width."""
    return dataclasses.replace(
        config, format=dataclasses.replace(config.format, bits=bits)
    )


def group_by_config(keys: list) -> list[tuple[int, int]]:
    """Runs ``(start, stop)`` of equal neighbours: what one ``lax.scan`` can cover."""
    runs, start = [], 0
    for _, run in itertools.groupby(keys):
        stop = start + len(list(run))
        runs.append((start, stop))
        start = stop
    return runs
