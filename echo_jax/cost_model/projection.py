"""Predictions for machines that were not measured, with their assumptions stated.

Measured: two H200s over NVLink (``experiments/results/bench_nvlink.jsonl``, fitted by
``experiments/check_cost_model.py``). Assumed:

- the codec is bound by memory: its time for a value is inversely proportional to the
  nominal bandwidth of the memory;
- NVLink reaches the same fraction of its nominal bandwidth on every machine, with 8
  ranks as with 2, and switches do not reduce data (no NVLink SHARP);
- each accelerator has its own network card of the given rate, nine tenths of which
  messages reach; a step from node to node takes 10 microseconds;
- an exact sum uses the faster of a ring and a tree; over two levels it is a
  reduce-scatter inside each node, a sum of each rank's part between the nodes, and an
  all-gather inside each node;
- the codec takes as long as in two shots, also in one, where it decodes what all ranks
  have sent: with more than two ranks that underestimates its time;
- echo's exchanges take one step for each other rank, one after the other, which
  overestimates their time where there are many ranks.
"""

import dataclasses
from typing import Literal

from echo_jax.config import EchoConfig
from echo_jax.cost_model.model import CodecSpeed, CostModel, ExactSpeed, Link

Placement = Literal["between", "everywhere"]

_ETHERNET_LATENCY = 1e-5  # seconds of a step
_ETHERNET_EFFICIENCY = 0.9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Data-sheet figures of an accelerator."""

    memory_bytes_per_second: float  # of its memory
    nvlink_bytes_per_second: float  # that it can send over NVLink


MACHINES = {
    "a100": Machine(memory_bytes_per_second=2.039e12, nvlink_bytes_per_second=300e9),
    "h200": Machine(memory_bytes_per_second=4.8e12, nvlink_bytes_per_second=450e9),
}

# The fit to two H200s with the default settings; a test compares it with the fit. How
# far pieces overlap was measured with the residual in int8, on these machines alone.
MEASURED = CostModel(
    ranks=2,
    link=Link(latency_seconds=1.23e-5, bytes_per_second=450e9, efficiency=0.610),
    exact=ExactSpeed(tree=True),
    codec=CodecSpeed(piece_seconds=9.04e-5, value_seconds=2.96e-12, overlap=0.83),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoLevels:
    """Nodes of several ranks: one link inside a node, a slower one between nodes.

    A sum is a reduce-scatter inside each node, a sum of each rank's part between the
    nodes, and an all-gather inside each node. Echo quantizes the sum between the nodes
    (``echo_psum`` over the axis of nodes) and, where that is faster, also the two steps
    inside (``echo_psum_scatter`` and ``echo_all_gather``), with two more roundings. A
    single node has one level only.
    """

    inside: CostModel  # its ranks are those of a node
    between: CostModel  # its ranks are the nodes

    @property
    def ranks(self) -> int:
        """Number of ranks of all nodes."""
        return self.inside.ranks * self.between.ranks

    def exact_seconds(self, message_bytes: int) -> float:
        """Time of an exact sum."""
        part = self._part(message_bytes)
        return self.inside.exact_seconds(message_bytes) + (
            self.between.exact_seconds(part)
        )

    def echo_seconds(self, message_bytes: int, num_chunks: int = 1) -> float:
        """Time of a sum, quantized at the faster of the two placements."""
        place = self.placement(message_bytes, num_chunks)
        return self._placed(message_bytes, num_chunks, place)

    def placement(self, message_bytes: int, num_chunks: int = 1) -> Placement:
        """Where quantizing is fastest: only between the nodes, or everywhere."""
        if self.between.ranks == 1:
            return "everywhere"
        places: tuple[Placement, ...] = ("between", "everywhere")
        return min(places, key=lambda p: self._placed(message_bytes, num_chunks, p))

    def _placed(self, size: int, num_chunks: int, placement: Placement) -> float:
        if placement == "everywhere":
            seconds = self.inside.echo_seconds(size, num_chunks)
        else:
            seconds = self.inside.exact_seconds(size)
        if self.between.ranks > 1:
            seconds += self.between.echo_seconds(self._part(size), num_chunks)
        return seconds

    def _part(self, size: int) -> int:
        return -(-size // self.inside.ranks)


def project(
    machine: str,
    ranks: int,
    *,
    ranks_per_node: int = 8,
    ethernet_gbit: float = 400.0,
    dtype: str = "bfloat16",
    config: EchoConfig = EchoConfig(),
) -> TwoLevels:
    """A cost model of nodes with NVLink inside and Ethernet between them.

    It rests on one measurement, of two H200s over NVLink. For other machines, codec
    times are scaled by nominal memory bandwidth and NVLink by its nominal rate; network
    cards are assumed to reach nine tenths of their rate, with 10 microseconds a step.

    Args:
      machine: a name in ``MACHINES``.
      ranks: number of ranks of all nodes; a single node if it has room for them.
      ranks_per_node: accelerators in a node.
      ethernet_gbit: rate of each accelerator's network card, in Gbit/s.
      dtype: of the messages.
      config: of the echo calls.

    Raises:
      ValueError: for an unknown machine, or ranks that do not fill their nodes.

    Example:
        >>> project("h200", 64, ethernet_gbit=400).ranks
        64
    """
    if machine not in MACHINES:
        raise ValueError(f"machine={machine!r} must be one of {tuple(MACHINES)}.")
    inside = min(ranks, ranks_per_node)
    if inside < 1 or ranks % inside:
        raise ValueError(
            f"ranks={ranks} must fill nodes of ranks_per_node={ranks_per_node}: "
            "use fewer ranks than a node has, or a multiple of that."
        )
    if not ethernet_gbit > 0:
        raise ValueError(f"ethernet_gbit={ethernet_gbit} must be above 0.")
    here, measured = MACHINES[machine], MACHINES["h200"]
    slower = measured.memory_bytes_per_second / here.memory_bytes_per_second
    codec, link = MEASURED.codec, MEASURED.link
    codec = dataclasses.replace(codec, value_seconds=slower * codec.value_seconds)
    nvlink = dataclasses.replace(link, bytes_per_second=here.nvlink_bytes_per_second)
    ethernet = Link(
        latency_seconds=_ETHERNET_LATENCY,
        bytes_per_second=1e9 / 8 * ethernet_gbit,
        efficiency=_ETHERNET_EFFICIENCY,
    )
    node = dataclasses.replace(
        MEASURED, ranks=inside, link=nvlink, codec=codec, dtype=dtype, config=config
    )
    between = dataclasses.replace(node, ranks=ranks // inside, link=ethernet)
    if between.ranks > 1:  # the two steps inside a node know no other algorithm
        two_shots = dataclasses.replace(config, algorithm="two-shot")
        node = dataclasses.replace(node, config=two_shots)
    return TwoLevels(inside=node, between=between)
