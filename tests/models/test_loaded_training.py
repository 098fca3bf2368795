"""Gradients of loaded models: those of the model, whatever pads it for its ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import echo_jax as echo
from echo_jax import models
from echo_jax.models.layout import param_layouts
from tests.models.checkpoints import (
    EXACT,
    FIXTURES,
    FOUR_BITS,
    loaded,
    reference,
    tensor_mesh,
)

STEPS = 3


def loss_of(model: models.LoadedModel, name: str, plan: echo.DepthPlan):
    """Mean cross entropy over the reference's tokens, a function of the parameters."""
    tokens = jnp.asarray(reference(name)["tokens"])
    forward = model.on_ranks(
        lambda decoder, x, y: decoder.loss(x, y, plan=plan)[0],
        (PartitionSpec(), PartitionSpec()),
        PartitionSpec(),
    )
    return lambda params: forward(params, tokens[:, :-1], tokens[:, 1:])


def tensors_of(model: models.LoadedModel, params) -> tuple[dict, list]:
    """Values as a checkpoint has them, and what stands in places of padding."""
    tensors, padding = {}, []
    for path, layout in param_layouts(model.placement).items():
        leaf = params
        for key in path:
            leaf = leaf[key]
        layers = np.asarray(leaf) if layout.is_stacked else np.asarray(leaf)[None]
        tensors[path] = np.stack([layout.write(layer) for layer in layers])
        if layout.places is not None:
            padding.append(np.compress(layout.places < 0, layers, layout.cut + 1))
    return tensors, padding


def trained(model: models.LoadedModel, name: str, plan: echo.DepthPlan):
    """Parameters after a few steps with everything that could wake padding up."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(0.1), optax.adamw(1e-2, weight_decay=0.1)
    )
    gradient = jax.jit(jax.grad(loss_of(model, name, plan)))
    params, state = model.params, optimizer.init(model.params)
    for _ in range(STEPS):
        updates, state = optimizer.update(gradient(params), state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize(("name", "ranks"), [("llama", 2), ("llama", 8), ("qwen3", 8)])
def test_a_padded_model_has_the_gradients_of_the_model(name, ranks):
    """Nine query heads of three key-value heads on 2 and 8 ranks, among others."""
    model = models.load(FIXTURES / name, tensor_mesh(ranks), trainable=True)
    assert model.placement.copies == 1
    whole = loaded(name, 1)
    found, wanted = (
        jax.jit(jax.grad(loss_of(m, name, EXACT)))(m.params) for m in (model, whole)
    )
    found, padding = tensors_of(model, found)
    wanted, _ = tensors_of(whole, wanted)
    assert not any(values.any() for values in padding)
    for path, values in wanted.items():
        scale = np.abs(values).max()
        assert scale > 0, path
        # Float32 sums in another order; measured: 2e-6.
        np.testing.assert_allclose(found[path], values, rtol=0, atol=2e-5 * scale)


def test_padding_stays_zero_in_training_in_few_bits():
    model = models.load(FIXTURES / "llama", tensor_mesh(8), trainable=True)
    params = trained(model, "llama", FOUR_BITS)
    tensors, padding = tensors_of(model, params)
    before, _ = tensors_of(model, model.params)
    assert sum(values.size for values in padding) > 1000
    assert not any(values.any() for values in padding)
    assert all((tensors[path] != before[path]).any() for path in tensors)


def test_gradients_of_copied_heads_are_refused():
    model = loaded("llama", 8)
    assert model.placement.copies == 2
    loss = loss_of(model, "llama", FOUR_BITS)
    with pytest.raises(ValueError, match=r"drift apart.*trainable=True"):
        jax.make_jaxpr(jax.grad(loss))(model.params)


def test_other_gradients_of_copied_heads_are_right():
    """Those of the norms, with attention as it is."""
    model, whole = loaded("llama", 8), loaded("llama", 1)

    def gradient(model):
        loss = loss_of(model, "llama", EXACT)
        scale = model.params["final_norm"]["scale"]
        norm = lambda scale: {**model.params, "final_norm": {"scale": scale}}  # noqa: E731
        return np.asarray(jax.jit(jax.grad(lambda scale: loss(norm(scale))))(scale))

    wanted = gradient(whole)
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(gradient(model), wanted, rtol=0, atol=2e-5 * scale)


def test_simulated_ranks_refuse_as_others_do():
    mesh = tensor_mesh(1)
    model = models.load(FIXTURES / "llama", mesh, simulate=8)
    with pytest.raises(ValueError, match="trainable=True"):
        jax.make_jaxpr(jax.grad(loss_of(model, "llama", EXACT)))(model.params)
