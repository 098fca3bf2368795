"""Cost models of made-up meshes."""

from hypothesis import strategies as st

import echo_jax as echo
from echo_jax.cost_model import CodecSpeed, CostModel, ExactSpeed, Link

LAN = CostModel(
    ranks=4,
    link=Link(latency_seconds=1e-4, bytes_per_second=5e7, efficiency=0.9, stall=0.8),
    exact=ExactSpeed(byte_seconds=3e-9, overlap=0.7),
    codec=CodecSpeed(piece_seconds=2e-3, value_seconds=8e-9, overlap=0.5),
    dtype="float16",
)


@st.composite
def models(draw) -> CostModel:
    """Slow and fast links, small and large codecs, rings and trees."""

    def power(low: int, high: int) -> float:
        return 10.0 ** draw(st.floats(low, high))

    return CostModel(
        ranks=draw(st.integers(2, 64)),
        link=Link(
            latency_seconds=power(-6, -2),
            bytes_per_second=power(6, 12),
            efficiency=draw(st.floats(0.1, 1)),
            stall=draw(st.floats(0, 1)),
            burst_bytes=draw(st.sampled_from([0, 10**5, 10**7])),
            at_once=draw(st.booleans()),
        ),
        exact=ExactSpeed(
            byte_seconds=power(-12, -8),
            overlap=draw(st.floats(0, 1)),
            tree=draw(st.booleans()),
        ),
        codec=CodecSpeed(
            piece_seconds=power(-6, -2),
            value_seconds=power(-13, -8),
            overlap=draw(st.floats(0, 1)),
        ),
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        config=echo.EchoConfig(format=echo.WireFormat(bits=draw(st.integers(2, 4)))),
    )
