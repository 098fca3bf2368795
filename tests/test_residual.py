import jax
import jax.numpy as jnp
import numpy as np
import pytest

import echo_jax as echo
from echo_jax import residual as residuals
from tests.ranks import MODES, draw, on_ranks

CONFIG = echo.EchoConfig(min_bytes=0)


def _owing(x):
    residual = echo.init_residual(x, "tp", config=CONFIG)
    return echo.echo_psum(x, residual, "tp", config=CONFIG)[1]


@pytest.mark.parametrize("mode", MODES)
def test_residual_is_zeros_of_one_and_one_nth_times_the_size(mode):
    x = draw(0, 4, 8, 128)
    residual = on_ranks(
        lambda x: echo.init_residual(x, "tp", config=CONFIG), mode=mode
    )(x)
    assert residual.send.dtype == residual.reduce.dtype == jnp.bfloat16
    assert residual.send[0].size == 8 * 128
    assert residual.reduce[0].size == 8 * 128 / 4
    assert not np.asarray(residual.send).any()
    assert not np.asarray(residual.reduce).any()


def test_residual_is_a_pytree_whose_layout_is_structure():
    residual = on_ranks(_owing)(draw(0, 4, 8, 128))
    leaves, structure = jax.tree.flatten(residual)
    assert [leaf.ndim for leaf in leaves] == [4, 3]
    assert jax.tree.unflatten(structure, leaves).layout == residual.layout
    paths = jax.tree_util.tree_flatten_with_path(residual)[0]
    assert [jax.tree_util.keystr(path) for path, _ in paths] == [".send", ".reduce"]


def test_norms_and_zeros():
    residual = on_ranks(_owing)(draw(0, 4, 8, 128))
    norms = residuals.norms(residual)
    for name in ("send", "reduce"):
        leaf = np.asarray(getattr(residual, name), np.float64)
        np.testing.assert_allclose(norms[name], np.sqrt((leaf**2).mean()), rtol=1e-5)
    assert not any(
        np.asarray(leaf).any()
        for leaf in jax.tree.leaves(residuals.zeros_like(residual))
    )


def test_a_tensor_of_nothing_and_a_single_number_have_residuals(as_shipped):
    def body(x):
        empty = echo.init_residual(x[:, :0], "tp", config=CONFIG)
        number = echo.init_residual(1.5, "tp", config=CONFIG)
        y, _ = echo.echo_psum(1.5, number, "tp", config=CONFIG)
        return residuals.norms(empty), y

    norms, y = on_ranks(body)(draw(0, 4, 8, 128))
    assert not any(np.asarray(norm).any() for norm in norms.values())
    # Within half a code's step, of each rank and of the sum.
    np.testing.assert_allclose(y, np.full(4, 6.0), rtol=2 / 15)
