"""Odd calls: the message says what was given, what is needed and the way out."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import echo_jax as echo
from echo_jax.collectives import exact
from tests.ranks import draw, on_ranks

CONFIG = echo.EchoConfig(min_bytes=0)
X = draw(0, 4, 8, 64)

pytestmark = pytest.mark.usefixtures("as_shipped")


def _refused(call, error, match, *, mode="vmap"):
    with pytest.raises(error, match=f"(?s){match}"):
        on_ranks(call, mode=mode)(X)


def _psum(x, residual, axis_name="tp", config=CONFIG):
    return echo.echo_psum(x, residual, axis_name, config=config)[0]


def _of_axis(residual, axis_name):
    layout = dataclasses.replace(residual.layout, axis_names=(axis_name,))
    return dataclasses.replace(residual, layout=layout)


def _residual(x, axis_name="tp", config=CONFIG, **options):
    return echo.init_residual(x, axis_name, config=config, **options)


WRONG = {
    "width": (lambda x: _residual(x[:, :16]), r"\(rows, width\).*\(8, 16\).*\(8, 64\)"),
    "rows": (lambda x: _residual(x[:5]), r"\(rows, width\).*\(5, 64\).*\(8, 64\)"),
    "dtype": (
        lambda x: jax.tree.map(lambda leaf: leaf.astype(jnp.float32), _residual(x)),
        "send dtype.*float32.*bfloat16",
    ),
    "rotation": (
        lambda x: _residual(
            x,
            config=echo.EchoConfig(format=echo.WireFormat(rotate=False)),
        ),
        "rotate.*False.*True",
    ),
    "block size": (
        lambda x: _residual(
            x, config=echo.EchoConfig(format=echo.WireFormat(block_size=32))
        ),
        "block_size.*32.*64",
    ),
    "axis": (lambda x: _of_axis(_residual(x), "dp"), r"axis names.*'dp',.*'tp'"),
    "leaves": (
        lambda x: jax.tree.map(lambda leaf: leaf[:1], _residual(x)),
        r"send shape.*\(1, 2, 64\).*\(4, 2, 64\)",
    ),
}


@pytest.mark.parametrize("verb", ["psum", "pvary", "flush", "psum_scatter", "gather"])
@pytest.mark.parametrize("wrong", WRONG)
def test_c15_a_residual_of_another_call_is_refused_by_every_verb(wrong, verb):
    make, message = WRONG[wrong]
    verbs = {
        "psum": echo.echo_psum,
        "pvary": echo.echo_pvary,
        "flush": echo.flush,
        "psum_scatter": echo.echo_psum_scatter,
        "gather": echo.echo_all_gather,
    }

    def call(x):
        return verbs[verb](x, make(x), "tp", config=CONFIG)[0]

    with pytest.raises(ValueError, match="does not belong to this call") as error:
        on_ranks(call)(X)
    text = str(error.value)
    assert "right:  residual = init_residual(x, axis_name, config=config)" in text
    if verb != "psum_scatter":  # which cuts x into parts, and so has other shapes
        error.match(message)


def test_c15_the_same_blocks_of_another_shape_are_refused():
    """One row of one block pads to as many as four rows: the padding would owe."""
    _refused(
        lambda x: _psum(x[0], _residual(x[:4])), ValueError, r"\(4, 64\).*\(1, 64\)"
    )
    # Leading dimensions may be folded: blocks run along the last axis only.
    folded = on_ranks(lambda x: _psum(x.reshape(2, 4, 64), _residual(x)))(X)
    assert folded.shape == (4, 2, 4, 64)


def test_bits_may_change_from_call_to_call():
    def body(x):
        residual = _residual(x)
        for bits in (2, 8, 3):
            config = echo.EchoConfig(min_bytes=0, format=echo.WireFormat(bits=bits))
            y, residual = echo.echo_psum(x, residual, "tp", config=config)
        return y

    assert on_ranks(body)(X).shape == X.shape


def test_scatter_along_the_last_dimension_names_its_residual():
    def call(x):
        return echo.echo_psum_scatter(
            x, _residual(x), "tp", scatter_dimension=-1, config=CONFIG
        )[0]

    _refused(call, ValueError, "give init_residual the scatter_dimension too")


def test_no_feedback_passes_the_residual_by_unpaid():
    silent = echo.EchoConfig(min_bytes=0, feedback=False)

    def body(x):
        _, owed = echo.echo_psum(x, _residual(x), "tp", config=CONFIG)
        y, passed = echo.echo_psum(x, owed, "tp", config=silent)
        z, _ = echo.echo_psum(x, None, "tp", config=CONFIG)
        return owed, passed, y, z

    owed, passed, y, z = on_ranks(body)(X)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: (a == b).all(), owed, passed)))
    assert (y == z).all()
    assert owed.send.any()
    none = on_ranks(lambda x: (x, _residual(x, config=silent)))(X)[1]
    assert none is None


def test_one_axis_may_be_written_as_a_tuple():
    on_ranks(lambda x: _psum(x, _residual(x, ("tp",))))(X)


@pytest.mark.parametrize("axis_name", ["model", None, ("tp", "model")])
def test_an_axis_that_is_not_bound(axis_name):
    message = "not bound here.*jax.shard_map.*jax.vmap"
    _refused(lambda x: _psum(x, None, axis_name), ValueError, message)
    _refused(lambda x: _residual(x, axis_name).send, ValueError, message)
    with pytest.raises(ValueError, match=message):
        echo.echo_psum(X, None, "tp", config=CONFIG)
    for verb in (exact.psum, exact.pvary):
        with pytest.raises(ValueError, match=message):
            verb(X, "tp")


def test_axis_names_that_are_none():
    _refused(lambda x: _psum(x, None, ["tp"]), TypeError, "tuple of them, got list")
    _refused(lambda x: _psum(x, None, 0), TypeError, "tuple of them, got int")
    _refused(lambda x: _psum(x, None, ()), ValueError, "at least one axis")
    _refused(lambda x: _psum(x, None, ("tp", "tp")), ValueError, "none twice")
    _refused(
        lambda x: echo.echo_psum(x, "tp", _residual(x))[0],
        TypeError,
        r"residual must be.*got str.*the arguments are \(x, residual, axis_name\)",
    )


def test_arguments_of_the_wrong_kind():
    _refused(lambda x: _psum([x, x], None), TypeError, "one array, got list.*each leaf")
    _refused(lambda x: _psum({"a": x}, None), TypeError, "one array, got dict")
    _refused(lambda x: _psum(None, None), TypeError, "one array, got NoneType")
    _refused(
        lambda x: _psum(x, (x, x)), TypeError, "Residual or None, got tuple.*Make one"
    )
    _refused(
        lambda x: _psum(x, None, config=echo.WireFormat()),
        TypeError,
        "EchoConfig, got WireFormat",
    )
    _refused(
        lambda x: _psum(x, None, config=echo.DepthPlan.uniform()),
        TypeError,
        r"got DepthPlan.*plan\[call_index\]",
    )


@pytest.mark.parametrize("dtype", ["int32", "complex64", "bool", "uint8"])
def test_dtypes_that_are_not_carried(dtype):
    _refused(
        lambda x: _psum(x.astype(dtype), None),
        ValueError,
        f"dtype {dtype} is not supported.*Cast x first",
    )


def test_init_residual_is_as_strict_as_the_calls():
    _refused(lambda x: _residual(5).send, TypeError, "array or its shape, got int")
    _refused(lambda x: _residual({"a": x}).send, TypeError, "got dict.*each leaf")
    _refused(lambda x: _residual((-1, 4)).send, TypeError, "array or its shape")
    _refused(lambda x: _residual((x, x)).send, TypeError, "array or its shape")
    _refused(
        lambda x: _residual(x, config=echo.WireFormat()).send, TypeError, "EchoConfig"
    )
    _refused(
        lambda x: _residual(x, scatter_dimension=2).send, ValueError, "out of range"
    )
    _refused(
        lambda x: _residual(x[:6], scatter_dimension=0).send, ValueError, "pad it to 8"
    )
    shapes = on_ranks(
        lambda x: [
            _residual(like)
            for like in (x, x.shape, list(x.shape), jax.ShapeDtypeStruct(x.shape, "f4"))
        ]
    )(X)
    for residual in shapes:
        assert residual.layout == shapes[0].layout
        assert residual.send.shape == shapes[0].send.shape


def test_scatter_and_gather_dimensions():
    def scatter(x, **options):
        return echo.echo_psum_scatter(x, None, "tp", config=CONFIG, **options)[0]

    def gather(x, **options):
        return echo.echo_all_gather(x, None, "tp", config=CONFIG, **options)[0]

    _refused(lambda x: scatter(x[:6]), ValueError, "6 entries.*4 ranks.*pad it to 8")
    _refused(
        lambda x: scatter(x, tiled=False), ValueError, "8 entries.*Did you mean tiled="
    )
    _refused(lambda x: scatter(x, scatter_dimension=2), ValueError, "out of range")
    _refused(lambda x: scatter(x[0, 0]), ValueError, "out of range")
    _refused(lambda x: gather(x, axis=2), ValueError, r"axis=2 is out of range")
    _refused(lambda x: gather(x, axis=-4, tiled=False), ValueError, "out of range")
    _refused(lambda x: gather(x[0, 0]), ValueError, "out of range")


def test_pvary_of_a_value_that_varies_already():
    _refused(
        lambda x: echo.echo_pvary(x, None, "tp", config=CONFIG)[0],
        ValueError,
        r"already varies along \['tp'\].*right:  echo_pvary\(stream",
        mode="vma",
    )


def test_forward_mode_is_refused_by_jax():
    def call(x):
        return jax.jvp(lambda x: _psum(x, None), (x,), (x,))[1]

    _refused(call, TypeError, "forward-mode")
