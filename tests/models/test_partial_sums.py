"""What ranks put into their sums is what the model's stream is made of."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from echo_jax.models.partial_sums import partial_sums
from tests.models.checkpoints import EXACT, loaded, reference

WHOLE = PartitionSpec()


@pytest.mark.parametrize(("name", "ranks"), [("llama", 2), ("qwen3", 4)])
def test_the_stream_is_the_embedding_and_every_sum(name, ranks):
    """Read out, it gives the model's own logits."""
    model, tokens = loaded(name, ranks), reference(name)["tokens"]
    sums = partial_sums(model, tokens)
    calls = model.config.num_calls
    assert sums.shape == (calls, ranks, *tokens.shape, model.config.width)

    one = loaded(name, 1)
    stream = one.on_ranks(
        lambda decoder, tokens: decoder.embed(tokens), (WHOLE,), PartitionSpec("tensor")
    )(one.params, jnp.asarray(tokens))
    stream = stream + np.asarray(sums).sum(axis=(0, 1))
    logits = one.on_ranks(
        lambda decoder, stream: decoder.read_out(stream),
        (WHOLE,),
        PartitionSpec(None, None, "tensor"),
    )(one.params, stream)[..., : model.config.vocab_size]
    wanted = model.logits(tokens, plan=EXACT)
    # Sums of float32 numbers in another order, through one norm and one product.
    scale = float(jnp.max(jnp.abs(wanted)))
    np.testing.assert_allclose(logits, wanted, atol=2.0**-15 * scale)


def test_ranks_add_different_parts():
    sums = np.asarray(partial_sums(loaded("llama", 2), reference("llama")["tokens"]))
    assert np.abs(sums[:, 0] - sums[:, 1]).mean() > 0.5 * np.abs(sums).mean()
