import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from echo_jax.layers import join_ranks, simulate_ranks, split_ranks

PARAMS = {"a": np.arange(24.0).reshape(4, 6), "b": np.arange(3.0)}
SPECS = {"a": P(None, ("tensor",)), "b": P()}


def test_shards_are_put_together_as_they_were_cut():
    cut, in_axes = split_ranks(PARAMS, SPECS, "tensor", 3)
    assert in_axes == {"a": 0, "b": None}
    np.testing.assert_array_equal(cut["a"][1], PARAMS["a"][:, 2:4])
    every = {**cut, "b": np.stack([cut["b"]] * 3)}
    for name, whole in join_ranks(every, SPECS, "tensor").items():
        np.testing.assert_array_equal(whole, PARAMS[name])


def test_simulated_ranks_have_shards_and_a_sum():
    run = simulate_ranks(
        lambda params, x: (params["a"] * x, lax.psum(params["a"].sum(), "tensor")),
        ranks=2,
        axis_name="tensor",
        in_specs=(SPECS, P()),
        out_specs=(P(None, "tensor"), P()),
    )
    scaled, total = run(PARAMS, np.float32(2.0))
    np.testing.assert_array_equal(scaled, 2 * PARAMS["a"])
    assert total == PARAMS["a"].sum()


@pytest.mark.parametrize(
    ("spec", "ranks", "words"),
    [
        (P("tensor"), 3, r"size=4 cannot be sharded over 3 ranks.*such as 6"),
        (P(("data", "tensor")), 2, r"dimension 0 over \('data', 'tensor'\).*alone"),
    ],
)
def test_shards_that_cannot_be_simulated(spec, ranks, words):
    with pytest.raises(ValueError, match=words):
        split_ranks(PARAMS["a"], spec, "tensor", ranks)
