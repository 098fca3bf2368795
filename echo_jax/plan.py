"""``DepthPlan``: which configuration each all-reduce of a model uses."""

import dataclasses
import itertools
import json
import operator
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from echo_jax.bit_budget import Sensitivity as Sensitivity
from echo_jax.bit_budget import spend
from echo_jax.collectives.traffic import takes_exact_path
from echo_jax.config import EchoConfig
from echo_jax.files import write_text
from echo_jax.kernels.api import get_codec
from echo_jax.typing import Shape
from echo_jax.wire.format import WireFormat


@dataclasses.dataclass(frozen=True, kw_only=True)
class DepthPlan:
    """One :class:`EchoConfig` for each all-reduce of the layers, in order of depth.

    The first and the last calls, where a rounding error does the most harm, may differ
    from those in between. Build a plan with :meth:`uniform`, :meth:`edges` or
    :meth:`from_sensitivity`. It can be indexed by the call once the number of calls is
    known (:meth:`bind`, which our models do).

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
    # Bits of the two sums over the vocabulary, which are not among the calls of the
    # layers: that of the embedding, and that of the readout in the backward pass. In
    # the latter each rank's part is nearly the same for every token, so that 4 bits
    # round it in the same direction every time: not noise, which would average out,
    # but a bias that training follows.
    vocab_bits: int = 8
    # A plan of its own for the backward sums; None: the forward plan, mirrored.
    mirror: "DepthPlan | None" = None

    def __post_init__(self):
        for name in ("head", "tail"):
            configs = getattr(self, name)
            if not isinstance(configs, list | tuple):
                raise TypeError(
                    f"{name} of a DepthPlan must be a tuple of EchoConfig, got "
                    f"{type(configs).__name__}."
                )
            object.__setattr__(self, name, tuple(configs))  # a plan can be hashed
        if not isinstance(self.body, EchoConfig):
            raise TypeError(
                "A DepthPlan is made of EchoConfig, got "
                f"{type(self.body).__name__}: write EchoConfig(format=...)."
            )
        for config in (*self.head, *self.tail):
            if not isinstance(config, EchoConfig):
                raise TypeError(
                    "head and tail of a DepthPlan hold EchoConfigs, got "
                    f"{type(config).__name__}."
                )
        if not isinstance(self.mirror, DepthPlan | None):
            raise TypeError(
                "the backward plan of a DepthPlan must be a DepthPlan, got "
                f"{type(self.mirror).__name__}: write DepthPlan.uniform(config)."
            )
        for config in self._configs():
            same = (
                config.format.block_size == self.body.format.block_size
                and config.format.rotate == self.body.format.rotate
                and config.residual_dtype == self.body.residual_dtype
                # A call that is small for itself leaves what others owe where it is.
                and (config.is_exact or config.least_bytes == self.body.least_bytes)
            )
            if not same:
                raise ValueError(
                    "All calls of a DepthPlan share one residual, so block_size, "
                    "rotate, residual_dtype and min_bytes must agree; got "
                    f"{config} beside {self.body}."
                )
        calls = self.num_calls
        if calls is not None and (type(calls) is not int or calls < 0):
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
          exact_final: make the last call exact; it then repays the whole residual.
          vocab_bits: bits of the embedding's and the readout's sums.
          num_calls: all-reduces of the layers in one direction, if known already.
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

        In the first layers the residual stream is still small, so that an error is
        large beside it; no later call repays the error of the last one.

        Args:
          config: that of the layers in between.
          edge_bits: bits of the layers at the ends.
          first: layers at the start that get them.
          last: layers at the end that get them.
          exact_final: make the last call exact; it then repays the whole residual.
          calls_per_layer: all-reduces of a layer in one direction.
          vocab_bits: bits of the embedding's and the readout's sums.
          num_calls: all-reduces of the layers in one direction, if known already.

        Raises:
          ValueError: for a negative count, or bits that no format has.
        """
        counts = (first, last, calls_per_layer)
        least = (0, 0, 1)
        if any(type(n) is not int or n < m for n, m in zip(counts, least, strict=True)):
            raise ValueError(
                f"first={first}, last={last} and calls_per_layer={calls_per_layer} "
                "must be integers of at least 0, 0 and 1."
            )
        edge = config.with_bits(edge_bits)
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

    @classmethod
    def from_sensitivity(
        cls,
        sensitivity: Sensitivity,
        config: EchoConfig = EchoConfig(),
        *,
        bits: float = 4.5,
        widths: tuple[int, ...] = (3, 4, 6, 8),
        vocab_bits: int = 8,
    ) -> "DepthPlan":
        r"""Spends a budget of bits on the calls whose rounding does the most harm.

        The harm of call :math:`i` at :math:`b` bits is taken as
        :math:`e_i ((2^m - 1) / (2^b - 1))^2`, with :math:`e_i` what was measured at
        :math:`m` bits: proportional to the square of the code's step. Every call
        starts at the smallest width; the one that gains the most for a bit is widened,
        until no more fits. Harms are measured without feedback, one call at a time:
        what feedback repays later is not known to the plan. Made for the forward pass:
        for training give the backward sums a plan of their own (:meth:`with_backward`).

        Args:
          sensitivity: from :func:`echo_jax.models.measure_sensitivity`.
          config: everything but the bits.
          bits: what a value may cost on average over the layers' calls, scales
            included: 4 bits at block 64 cost 4.25.
          widths: the bits to choose from.
          vocab_bits: bits of the vocabulary's two sums, outside the budget.

        Raises:
          ValueError: if the smallest width costs more than the budget, or is no width,
            or for an exact configuration.
          TypeError: if ``sensitivity`` is not a Sensitivity.
        """
        if not isinstance(sensitivity, Sensitivity):
            raise TypeError(
                f"sensitivity must be a Sensitivity, got {type(sensitivity).__name__}: "
                "measure it with echo_jax.models.measure_sensitivity, or write "
                "Sensitivity(effects=(...), bits=4)."
            )
        if config.is_exact:
            raise ValueError(
                "an exact configuration has no bits to spend: leave out exact()."
            )
        options = [config.with_bits(width) for width in sorted(set(widths))]
        costs = [option.bits_per_value for option in options]
        if not options or not costs[0] <= bits:
            raise ValueError(
                f"bits={bits} is less than the smallest of widths={widths} costs, "
                f"scales included: allow at least {costs[0] if costs else 'one width'}."
            )
        chosen = spend(sensitivity, options, costs, bits * len(sensitivity.effects))
        return cls(
            head=tuple(options[i] for i in chosen),
            body=config,
            vocab_bits=vocab_bits,
            num_calls=len(chosen),
        )

    def save(self, path: str | os.PathLike, *, model: str, axis_size: int) -> None:
        """Writes the plan as JSON with what it was made for.

        Args:
          path: the file; its folder is made if it is not there.
          model: name of the model.
          axis_size: ranks on the tensor axis.

        Raises:
          OSError: if the file cannot be written, or its folder not made.
          ValueError: if the plan is not bound to a number of calls, or has a backward
            plan of its own, which the file has no place for.
        """
        if self.mirror is not None:
            raise ValueError(
                "a plan with_backward is two plans: save each in a file of its own."
            )
        content = {
            "model": model,
            "axis_size": axis_size,
            "vocab_bits": self.vocab_bits,
            "body": dataclasses.asdict(self.body),
            "calls": [dataclasses.asdict(config) for config in self],
        }
        path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(
        cls,
        path: str | os.PathLike,
        *,
        model: str | None = None,
        axis_size: int | None = None,
    ) -> "DepthPlan":
        """Reads a plan that :meth:`save` wrote.

        Args:
          path: the file.
          model: name of the model that it will be used for; None to skip the check.
          axis_size: ranks on the tensor axis; None to skip the check.

        Raises:
          ValueError: if the file is no plan, or one for another model or axis.
        """
        try:
            content = json.loads(pathlib.Path(path).read_text())
            if not isinstance(content["calls"], list):
                raise TypeError("its calls are no list")
            calls = tuple(_config_from_dict(entry) for entry in content["calls"])
            body = _config_from_dict(content["body"])
            found = {name: content[name] for name in ("model", "axis_size")}
            plan = cls(
                head=calls,
                body=body,
                vocab_bits=content["vocab_bits"],
                num_calls=len(calls),
            )
        except OSError as error:
            raise ValueError(
                f"{path} cannot be read ({error.strerror}): give the file that "
                "DepthPlan.save wrote."
            ) from error
        except (TypeError, KeyError, ValueError, RecursionError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(
                f"{path} is not a plan that DepthPlan.save wrote: {reason.rstrip('.')}."
            ) from error
        for name, wanted in (("model", model), ("axis_size", axis_size)):
            if wanted not in (None, found[name]):
                raise ValueError(
                    f"{path} is a plan for {name}={found[name]!r}, not {wanted!r}: "
                    "measure the sensitivity anew, or use DepthPlan.edges."
                )
        return plan

    @property
    def average_bits(self) -> float:
        """What a value costs on average over the layers' calls, scales included.

        An exact call counts 16 bits, those of bfloat16; a plan of no calls costs 0.
        """
        costs = [config.bits_per_value for config in self]
        return sum(costs) / len(costs) if costs else 0.0

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
        joined = dataclasses.replace(self, mirror=plan)
        if joined.mirror is None:
            return joined
        calls = plan.num_calls if self.num_calls is None else self.num_calls
        return joined if calls is None else joined.bind(calls)

    @property
    def backward(self) -> "DepthPlan":
        """The plan of the backward sums: entry ``i`` is for the mirror of call ``i``.

        The backward pass starts at the last layer and ends at layer 0. What the forward
        plan says of its first calls therefore holds for the mirrors of the last ones,
        and the other way round. Take it of a plan that is bound (:meth:`bind`): only
        then is it known whether the ends overlap.
        """
        plan = self if self.mirror is None else self.mirror
        head = plan.head
        if plan.num_calls is not None:
            # Where the ends of a shallow model overlap, the tail takes precedence. It
            # would not, once the two have changed places.
            head = head[: max(0, plan.num_calls - len(plan.tail))]
        return dataclasses.replace(
            plan, head=plan.tail[::-1], tail=head[::-1], mirror=None
        )

    @property
    def vocab(self) -> EchoConfig:
        """The configuration of the vocabulary's sum in this direction."""
        return self.body.with_bits(self.vocab_bits)

    def residual_config(self, shape: Shape, dtype) -> EchoConfig:
        """The configuration to make the residual of calls on such a tensor with.

        Has ``feedback=False`` if no call can leave a rounding error to be repaid: each
        is exact, under ``min_bytes``, or without feedback. ``init_residual`` then
        returns None.

        Args:
          shape: of the tensor that is summed, on one rank.
          dtype: of that tensor.
        """
        owes = any(
            config.feedback and not takes_exact_path(shape, dtype, config)
            for config in self._configs()
        )
        return dataclasses.replace(self.body, feedback=owes)

    def settled(self, shape: Shape, dtype) -> "DepthPlan":
        """The exact plan if every call on such a tensor takes the exact path anyway.

        Otherwise the plan itself. A model that asks runs, for messages under
        ``min_bytes``, the same program as with the exact plan, so that results agree
        bit for bit.

        Args:
          shape: of the tensor that is summed, on one rank.
          dtype: of that tensor.
        """
        configs = self._configs()
        if all(takes_exact_path(shape, dtype, config) for config in configs):
            return DepthPlan.uniform(EchoConfig().exact(), num_calls=self.num_calls)
        return self

    def check_backends(self) -> None:
        """Asks for every backend that is named, before anything is computed.

        Raises:
          ValueError: if one of them cannot run here.
        """
        for config in self._configs():
            if not config.is_exact:
                get_codec(config.backend, config.format)

    def __len__(self) -> int:
        return self._bound_calls()

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[EchoConfig]:
        return (self[call] for call in range(len(self)))

    def __getitem__(self, call_index: int) -> EchoConfig:
        """The configuration of one call; negative indices count from the last."""
        call_index = operator.index(call_index)
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


def _config_from_dict(entry: dict[str, Any]) -> EchoConfig:
    fields: dict[str, Any] = {**entry, "format": WireFormat(**entry["format"])}
    return EchoConfig(**fields)


def group_by_config(keys: list) -> list[tuple[int, int]]:
    """Runs ``(start, stop)`` of equal neighbours: what one ``lax.scan`` can cover."""
    runs, start = [], 0
    for _, run in itertools.groupby(keys):
        stop = start + len(list(run))
        runs.append((start, stop))
        start = stop
    return runs
