import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_jax.models import DecoderConfig
from echo_jax.models.placement import NOTHING, fit_to_ranks


def config(heads, kv_heads, **changes):
    return DecoderConfig(num_heads=heads, num_kv_heads=kv_heads, **changes)


@given(kv_heads=st.integers(1, 12), group=st.integers(1, 9), ranks=st.integers(1, 17))
def test_every_query_head_stands_once_beside_its_key_value_head(kv_heads, group, ranks):
    fitted = fit_to_ranks(config(kv_heads * group, kv_heads), ranks)
    padded = fitted.padded
    padded.check_ranks(ranks)
    query, kv = fitted.query_heads(), fitted.kv_heads()
    assert query.shape == (padded.num_heads,)
    assert kv.shape == (padded.num_kv_heads,)
    assert sorted(query[query != NOTHING]) == list(range(kv_heads * group))
    assert set(kv[kv != NOTHING]) == set(range(kv_heads))
    served_by = np.repeat(kv, padded.num_heads // padded.num_kv_heads)
    real = query != NOTHING
    np.testing.assert_array_equal(query[real] // group, served_by[real])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "on_a_rank"),
    [
        (9, 3, 1, (9, 3)),
        (9, 3, 2, (6, 2)),
        (9, 3, 3, (3, 1)),
        (9, 3, 4, (3, 1)),
        (9, 3, 8, (2, 1)),
        (32, 8, 8, (4, 1)),
        (32, 8, 16, (2, 1)),  # each key-value head on two ranks
        (32, 8, 32, (1, 1)),
    ],
)
def test_heads_of_known_models(heads, kv_heads, ranks, on_a_rank):
    padded = fit_to_ranks(config(heads, kv_heads), ranks).padded
    found = (padded.num_heads // ranks, padded.num_kv_heads // ranks)
    assert found == on_a_rank


@pytest.mark.parametrize("ranks", range(1, 10))
def test_without_copies_each_head_stands_once(ranks):
    fitted = fit_to_ranks(config(9, 3), ranks, allow_copies=False)
    fitted.padded.check_ranks(ranks)
    for heads, count in ((fitted.kv_heads(), 3), (fitted.query_heads(), 9)):
        assert sorted(heads[heads != NOTHING]) == list(range(count))
    # No padding is served by a real key-value head.
    served = np.repeat(fitted.kv_heads(), 3)
    np.testing.assert_array_equal(served == NOTHING, fitted.query_heads() == NOTHING)


def test_a_model_that_fits_stays_as_it_is():
    model = config(8, 4, vocab_size=300, mlp_width=96)
    assert fit_to_ranks(model, 4).padded == model


def test_vocabulary_and_features_are_padded():
    model = config(3, 3, vocab_size=300, mlp_width=100)
    fitted = fit_to_ranks(model, 3)
    assert fitted.padded == dataclasses.replace(
        model, vocab_multiple=192, mlp_width=102
    )
    assert list(fitted.tokens()[298:302]) == [298, 299, NOTHING, NOTHING]
    assert fitted.tokens().size == 384
    assert list(fitted.mlp_features()[98:]) == [98, 99, NOTHING, NOTHING]


def test_no_ranks():
    with pytest.raises(ValueError, match="ranks=0"):
        fit_to_ranks(config(4, 4), 0)
