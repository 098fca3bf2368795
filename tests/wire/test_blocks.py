import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax.wire import blocks
from tests import oracle

SHAPES = [(), (1,), (16,), (17,), (100,), (3, 15), (2, 3, 33), (2880,), (7, 1), (5, 16)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunks", [1, 3, 8])
def test_cutting_is_that_of_the_oracle_and_is_undone(shape, chunks):
    x = np.arange(1, 1 + int(np.prod(shape)), dtype=np.float32).reshape(shape)
    expected = oracle.to_blocks(x, 16, chunks)
    rows = jnp.asarray(x).reshape(blocks.row_shape(shape))
    cut = blocks.to_blocks(rows, 16, chunks)
    np.testing.assert_array_equal(cut, expected)
    assert cut.shape == (chunks, blocks.blocks_per_chunk(shape, 16, chunks), 16)
    np.testing.assert_array_equal(
        blocks.from_blocks(cut, blocks.row_shape(shape)), rows
    )


def test_a_token_never_depends_on_another():
    """Rows start a block of their own, however narrow."""
    assert blocks.num_blocks((5, 17), 16) == 10
    assert blocks.num_blocks((5, 1), 16) == 5
    assert blocks.num_blocks((85,), 16) == 6
    assert blocks.num_blocks((), 16) == 1
    assert blocks.num_blocks((0, 5), 16) == 0
    assert blocks.num_blocks((5, 0), 16) == 0
