import math

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from echo_jax.training.buckets import make_buckets
from tests.ranks import draw

SHAPES = st.lists(
    st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple),
    min_size=1,
    max_size=8,
)


@given(shapes=SHAPES, limit=st.integers(4, 2000), block=st.sampled_from([16, 64]))
def test_leaves_come_out_of_their_buckets_as_they_went_in(shapes, limit, block):
    leaves = [jnp.asarray(draw(i, *shape)) for i, shape in enumerate(shapes)]
    buckets = make_buckets(
        list(enumerate(shapes)), bucket_bytes=limit, block_size=block
    )
    # Each leaf once, in order.
    places = [place for bucket in buckets for place in bucket.leaves]
    assert places == list(range(len(shapes)))
    for bucket in buckets:
        message = bucket.join(leaves)
        assert message.shape == bucket.shape
        assert message.shape[1] == block
        for place, values in bucket.cut(message):
            np.testing.assert_array_equal(values, leaves[place])
        size = sum(4 * math.prod(shape) for shape in bucket.shapes)
        assert size <= limit or len(bucket.leaves) == 1
    # No two neighbours would have fitted in one.
    sizes = [sum(4 * math.prod(shape) for shape in b.shapes) for b in buckets]
    first = [4 * math.prod(b.shapes[0]) for b in buckets]
    assert all(a + b > limit for a, b in zip(sizes[:-1], first[1:], strict=True))


def test_every_leaf_begins_with_a_block_of_its_own():
    (bucket,) = make_buckets(
        [(0, (3,)), (1, (5, 20))], bucket_bytes=1 << 20, block_size=64
    )
    message = np.asarray(bucket.join([jnp.ones(3), 2.0 * jnp.ones((5, 20))]))
    assert message.shape == (3, 64)
    assert set(np.unique(message[0])) == {0.0, 1.0}
    assert set(np.unique(message[1:])) == {0.0, 2.0}


def test_messages_are_in_float32():
    (bucket,) = make_buckets([(0, (64,))], bucket_bytes=1024, block_size=64)
    assert bucket.join([jnp.ones(64, jnp.bfloat16)]).dtype == jnp.float32
