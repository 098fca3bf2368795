"""Reads the collectives out of compiled HLO."""

import collections
import dataclasses
import math
import re

import numpy as np

_COLLECTIVE = re.compile(
    r"= (?P<shape>\(.*?\)|\S+) "
    r"(?P<op>(?:ragged-)?all-to-all|all-gather|all-reduce|reduce-scatter"
    r"|collective-permute|collective-broadcast)(?P<start>-start)?\("
)
# Which devices exchange: written out; as a grid of them, transposed or not; or, from
# JAX 0.11, as axes of a mesh.
_GROUPS = re.compile(
    r"replica_groups=(?:\{\{(?P<first>[\d,]+)\}"
    r"|\[(?P<grid>[\d,]+)\]<=\[(?P<shape>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?"
    r"|mesh\[(?P<mesh>[^\]]+)\] \{(?P<axes>[^}]*)\})"
)
_ARRAY = re.compile(r"\b(?P<dtype>[a-z]+\d+\w*|pred)\[(?P<dims>[\d,]*)\]")
_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One instruction, as often as it stands in the program (not as it runs)."""

    op: str
    dtype: str
    buffer_bytes: int  # of the results
    group: tuple[int, ...]  # devices that exchange, the first group of them


def collectives(compiled) -> list[Collective]:
    """Every collective of a program compiled without start/done pairs."""
    found = []
    for line in compiled.as_text().splitlines():
        match = _COLLECTIVE.search(line)
        if match is None:
            continue
        assert match["start"] is None, line
        arrays = list(_ARRAY.finditer(match["shape"]))
        dtypes = {array["dtype"] for array in arrays}
        size = 0
        for array in arrays:
            dims = [int(dim) for dim in array["dims"].split(",") if dim]
            width = _BYTES[re.sub(r"\D", "", array["dtype"]) or "8"]
            size += math.prod(dims) * width
        found.append(
            Collective(match["op"], "+".join(sorted(dtypes)), size, _group(line))
        )
    return found


def _group(line: str) -> tuple[int, ...]:
    match = _GROUPS.search(line)
    if match is None:
        return ()
    if match["first"]:
        return _ints(match["first"])
    if match["mesh"]:
        sizes = {
            name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", match["mesh"])
        }
        axes = re.findall(r"'(\w+)'", match["axes"])
        devices = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        whole = tuple(slice(None) if name in axes else 0 for name in sizes)
        return tuple(int(device) for device in devices[whole].ravel())
    shape = _ints(match["shape"])
    devices = np.arange(math.prod(shape)).reshape(shape)
    if match["order"]:
        devices = devices.transpose(_ints(match["order"]))
    return tuple(int(device) for device in devices.reshape(_ints(match["grid"]))[0])


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def counts(compiled) -> dict[tuple[str, str], int]:
    """How often each kind of collective stands in the program, with its dtype."""
    return dict(collections.Counter((c.op, c.dtype) for c in collectives(compiled)))
