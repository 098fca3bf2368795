"""Which variants there are: a form, and two roundings for each call."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from variants.call import Form, Rounding

Calls = Sequence[Sequence[Rounding]]
BASELINE = "edges 2 1"
LIBRARY_WIDTHS = (3, 4, 6, 8)
WIDTHS = (3, 4, 5, 6, 8)
BYTE = 3  # fraction bits of a scale in one byte; 2 cost a tenth more error

# Edges in 6 bits, and 8 where one call does the most harm: name, first calls, last.
GRADED = (
    ("graded 2 1", (6, 6, 6, 6), (6, 8)),
    ("graded 3 1", (6, 6, 6, 6, 6, 6), (6, 8)),
    ("graded 3 1, 8 first", (8, 6, 6, 6, 6, 6), (6, 8)),
    ("graded 3 1, 8 last", (6, 6, 6, 6, 6, 6), (8, 8)),
    ("graded 4 1", (6, 6, 6, 6, 6, 6, 6, 6), (6, 8)),
    ("graded 4 1, 8 first", (8, 6, 6, 6, 6, 6, 6, 6), (6, 8)),
)
# Under 4.5 bits with a value of each token kept.
KEEPING = (
    ("six of 6 bits", (6, 6, 6, 6), (6, 6)),
    ("four of 6 bits, 8 last", (6, 6, 6), (6, 8)),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """A plan of one form."""

    name: str
    form: Form = Form()
    calls: Calls
    calibrated: bool = False

    @property
    def bits_per_value(self) -> float:
        """On average over calls and roundings; both send the same number of values."""
        costs = [[self.form.cost(rounding) for rounding in call] for call in self.calls]
        return float(np.mean(costs))


def bits_of_edges(calls: int, edge=(8, 8), body=(4, 4), first: int = 4, last: int = 2):
    """Bits ``(calls, 2)``: those of the edges for so many calls at the ends."""
    bits = np.tile(body, (calls, 1))
    bits[:first] = bits[calls - last :] = edge
    return bits


def graded(calls: int, head: Sequence[int], tail: Sequence[int]):
    """Bits ``(calls, 2)`` with these at the ends and 4 between."""
    bits = np.full((calls, 2), 4)
    bits[: len(head)] = np.array(head)[:calls, None]
    bits[calls - len(tail) :] = np.array(tail)[:, None]
    return bits


def calls_of(bits, **kinds) -> Calls:
    return [[Rounding(bits=int(b), **kinds) for b in call] for call in bits]


def fixed_variants(calls: int, width: int) -> Iterator[tuple[str, Callable]]:
    """Name and maker of every variant that needs no measurement, the default first."""
    edges = functools.partial(bits_of_edges, calls)
    uniform = functools.partial(bits_of_edges, calls, first=0, last=0)

    def variant(name, bits, form=Form(), **kinds):
        def make():
            return Variant(name=name, form=form, calls=calls_of(bits, **kinds))

        return name, make

    yield variant(BASELINE, edges())
    yield variant("uniform", uniform())
    for size in (128, 32):
        form = Form(block_size=size, span=size)
        yield variant(f"{BASELINE}, block {size}", edges(), form)
    for first, second in ((4, 5), (5, 4), (3, 5), (5, 3), (4, 6), (6, 4), (5, 5)):
        body = (first, second)
        yield variant(f"{BASELINE}, {first} and {second} bits", edges(body=body))
    for first, second in ((4, 5), (5, 4)):
        body = (first, second)
        yield variant(f"uniform, {first} and {second} bits", uniform(body=body))
    small = Form(block_size=32, span=32)
    for name, head, tail in GRADED:
        bits = graded(calls, head, tail)
        yield variant(name, bits)
        yield variant(f"{name}, block 32, scale in a byte", bits, small, fraction=BYTE)
    for size in (64, 32, 16):
        form = Form(block_size=size, span=size)
        for fraction in (2, 3):
            name = f"{BASELINE}, block {size}, scale in a byte ({fraction} of fraction)"
            yield variant(name, edges(), form, fraction=fraction)
    for name, form, kinds in codes():
        yield variant(f"{BASELINE}, {name}", edges(), form, **kinds)
        bits = graded(calls, *GRADED[1][1:])
        yield variant(f"{GRADED[1][0]}, {name}", bits, form, **kinds)
    for kept, place in ((1, "model"), (1, "rotated"), (2, "model")):
        name = f"{BASELINE}, {kept} of a block kept, {place}"
        yield variant(name, edges(), Form(coordinates=place), kept=kept)
    for kept in (1, 2):
        name = f"{BASELINE}, {kept} of a block kept, not rotated"
        yield variant(name, edges(), Form(rotate=False), kept=kept)
    row = Form(span=-(-width // 64) * 64)
    for kept in (1, 2, 4):
        yield variant(f"{BASELINE}, {kept} of a token kept", edges(), row, kept=kept)
    name, *ends = GRADED[1]
    for kept in (1, 2):
        kinds = {"kept": kept, "uneven": 1, "scales": 2}
        words = f"{name}, {kept} of a token kept"
        yield variant(words, graded(calls, *ends), row, kept=kept)
        words = f"{words}, uneven levels, best of 2 scales"
        yield variant(words, graded(calls, *ends), row, **kinds)
    yield variant("uniform, 2 of a token kept", uniform(), row, kept=2)
    small = Form(block_size=32, span=row.span)
    for name, head, tail in KEEPING:
        bits, kinds = graded(calls, head, tail), {"kept": 1, "uneven": 1}
        words = f"{name}, 1 of a token kept, uneven levels, best of"
        yield variant(f"{words} 2 scales", bits, row, scales=2, **kinds)
        words = f"{words} 3, block 32, scale in a byte"
        yield variant(words, bits, small, scales=3, fraction=BYTE, **kinds)


def codes() -> Iterator[tuple[str, Form, dict]]:
    """Other levels, other ways to find a scale: name, form, fields of a rounding."""
    wide, small, large = (Form(block_size=b, span=b) for b in (64, 32, 128))
    best, uneven = {"scales": 2}, {"uneven": 1}
    byte = {"fraction": BYTE, "scales": 3}
    yield "best of 2 scales", wide, best
    yield "best of 3 scales", wide, {"scales": 3}
    yield "uneven levels", wide, uneven
    yield "uneven levels, best of 2 scales", wide, best | uneven
    yield "block 128, uneven levels, best of 2 scales", large, best | uneven
    yield "block 32, scale in a byte, best of 3", small, byte
    yield "block 32, scale in a byte, best of 3, uneven levels", small, byte | uneven


def measured_variants(
    effects: Callable, budgets: Sequence[float], width: int
) -> Iterator[tuple[str, Callable]]:
    """Plans by the effect of each rounding, with more and more to choose from.

    The effects are those of even levels in blocks of 64: which calls matter is the
    model's, not the code's.
    """

    def make(name, form, widths, apart, kinds, budget):
        spare = budget - form.cost(Rounding(bits=0, **kinds))
        bits = spend(effects(Form()), widths, spare, apart=apart)
        calls = calls_of(bits, **kinds)
        return Variant(name=name, form=form, calls=calls, calibrated=True)

    for budget in budgets:
        for name, *kinds in spendings(width):
            name = f"by sensitivity, {name}, {budget} bits"
            yield name, functools.partial(make, name, *kinds, budget)


def spendings(width: int) -> Iterator[tuple[str, Form, Sequence[int], bool, dict]]:
    """Name, form, widths, whether roundings have widths apart, fields of a rounding."""
    library, span = LIBRARY_WIDTHS, -(-width // 64) * 64
    wide, small = Form(), Form(block_size=32, span=32)
    row, small_row = Form(span=span), Form(block_size=32, span=span)
    best, uneven = {"scales": 2}, {"uneven": 1}
    byte = {"fraction": BYTE, "scales": 3}
    yield "as in the library", wide, library, False, {}
    yield "5 bits too", wide, WIDTHS, False, {}
    yield "roundings apart", wide, library, True, {}
    yield "roundings apart, 5 bits too", wide, WIDTHS, True, {}
    yield "best of 2 scales", wide, library, False, best
    yield "best of 2 scales, apart, 5 bits too", wide, WIDTHS, True, best
    yield "uneven, best of 2 scales", wide, library, False, best | uneven
    yield "block 32, byte, best of 3", small, library, False, byte
    name = "block 32, byte, best of 3, uneven"
    yield name, small, library, False, byte | uneven
    yield f"{name}, apart, 5 bits too", small, WIDTHS, True, byte | uneven
    kept = {"kept": 1}
    yield "1 of a token kept", row, library, False, kept
    name = "1 of a token kept, uneven, best of 2 scales, 5 bits too"
    yield name, row, WIDTHS, False, kept | best | uneven
    name = "1 of a token kept, block 32, byte, best of 3, uneven, 5 bits too"
    yield name, small_row, WIDTHS, False, kept | byte | uneven


def spend(effects: np.ndarray, widths: Sequence[int], budget: float, *, apart: bool):
    """Bits ``(calls, 2)`` that average at most ``budget``, where they help most.

    As ``DepthPlan.from_sensitivity`` does, which takes harm for proportional to the
    square of the code's step; with ``apart`` each rounding has a width of its own.
    """
    harm = effects if apart else effects.sum(axis=1, keepdims=True)
    steps = np.array([(2.0**width - 1) ** -2 for width in widths]) * 15.0**2
    chosen = np.zeros(harm.shape, int)
    spare = (budget - widths[0]) * harm.size + 1e-6
    while True:
        following = np.minimum(chosen + 1, len(widths) - 1)
        cost = np.take(widths, following) - np.take(widths, chosen)
        gain = harm * (steps[chosen] - steps[following])
        fits = (cost > 0) & (cost <= spare)
        if not fits.any():
            return np.broadcast_to(np.take(widths, chosen), effects.shape)
        rate = np.where(fits, gain / np.maximum(cost, 1), -1.0)
        best = np.unravel_index(np.argmax(rate), rate.shape)
        spare -= cost[best]
        chosen[best] += 1
