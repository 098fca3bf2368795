import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import echo_jax as echo
from echo_jax.models import GenerationConfig, generate, sampling
from echo_jax.models.generation import bucket, cache_specs, left_padded
from tests import hlo
from tests.models.checkpoints import (
    EXACT,
    FOUR_BITS,
    greedy,
    loaded,
    prompts,
    reference,
    tensor_mesh,
)
from tests.ranks import bits_of

TO_THE_END = GenerationConfig(stop_ids=())
SHORT = dataclasses.replace(TO_THE_END, max_new_tokens=6)


@pytest.mark.parametrize(
    ("name", "ranks"), [("qwen3", 1), ("qwen3", 4), ("llama", 2), ("llama_linear", 1)]
)
def test_greedy_tokens_are_those_of_transformers(name, ranks):
    """Five prompts of 1 to 33 tokens in one batch, 64 new tokens each."""
    assert generate(loaded(name, ranks), prompts(name), config=TO_THE_END) == greedy(
        name
    )


def test_a_prompt_alone_is_continued_as_in_a_batch():
    model = loaded("qwen3", 2)
    for prompt, wanted in zip(prompts("qwen3"), greedy("qwen3"), strict=True):
        assert generate(model, [prompt], config=SHORT) == [wanted[:6]]


def test_no_step_compiles_anew():
    model = loaded("qwen3", 2)
    generate(model, prompts("qwen3"), config=SHORT)
    before = {name: f._cache_size() for name, f in model.programs.items()}
    # Another prompt of the same bucket, another number of new tokens.
    generate(model, prompts("qwen3")[::-1], config=dataclasses.replace(SHORT, seed=1))
    assert before == {name: f._cache_size() for name, f in model.programs.items()}


@pytest.mark.parametrize("drawn", [False, True])
def test_ranks_choose_the_same_tokens_c13(drawn):
    """Also when their sums travel in 4 bits and the logits are nearly equal."""
    model, size = loaded("llama", 4), 4
    tokens, padding = left_padded(prompts("llama"))

    def local(decoder, tokens, padding):
        cache = decoder.empty_cache(padding, 64 + 8)
        rounds = []
        for step in range(8):
            logits, cache = decoder.extend(tokens, cache, plan=FOUR_BITS)
            chosen = (
                sampling.sample(
                    logits * 1e-3,
                    jax.random.fold_in(jax.random.key(0), step),
                    temperature=jnp.float32(1.0),
                    top_p=jnp.float32(0.9),
                    axis_name="tensor",
                )
                if drawn
                else sampling.greedy(logits * 0, "tensor")
                if step == 0
                else sampling.greedy(logits, "tensor")
            )
            rounds.append(chosen)
            tokens = chosen[:, None]
        return jnp.stack(rounds)[None]

    whole = PartitionSpec()
    run = model.on_ranks(local, (whole, whole), PartitionSpec("tensor"))
    chosen = np.asarray(jax.jit(run)(model.params, tokens, padding))
    assert chosen.shape == (size, 8, 5)
    assert (chosen == chosen[0]).all()
    assert len(np.unique(chosen)) > 8
    if not drawn:  # of equal logits the lowest id
        assert (chosen[:, 0] == 0).all()


def steps(model, plan):
    """Jitted prefill and decode that return whole logits and the cache."""
    whole, cache = PartitionSpec(), cache_specs("tensor")
    out = (PartitionSpec(None, "tensor"), cache)

    def prefill(decoder, tokens, padding):
        return decoder.extend(tokens, decoder.empty_cache(padding, 128), plan=plan)

    def decode(decoder, tokens, cache):
        return decoder.extend(tokens, cache, plan=plan)

    return (
        jax.jit(model.on_ranks(prefill, (whole, whole), out)),
        jax.jit(model.on_ranks(decode, (whole, cache), out)),
    )


def test_a_decode_step_is_the_exact_model_bit_for_bit_c08():
    """Messages below min_bytes; those of the prefill are above it, and quantized."""
    model = loaded("qwen3", 4)
    tokens, padding = left_padded(prompts("qwen3"))
    one = tokens[:, -1:]
    largest = one.size * model.config.width * 4
    plan = echo.DepthPlan.edges(echo.EchoConfig(min_bytes=largest + 1), first=1, last=1)
    (prefill, decode), (exact_prefill, exact_decode) = (
        steps(model, plan),
        steps(model, EXACT),
    )
    logits, cache = prefill(model.params, tokens, padding)
    exact_logits, _ = exact_prefill(model.params, tokens, padding)
    assert not (logits == exact_logits).all()
    for _ in range(3):
        logits, after = decode(model.params, one, cache)
        exact_logits, exact_after = exact_decode(model.params, one, cache)
        for found, wanted in zip(
            jax.tree.leaves((logits, after)),
            jax.tree.leaves((exact_logits, exact_after)),
            strict=True,
        ):
            np.testing.assert_array_equal(bits_of(found), bits_of(wanted))
        cache = after
    compiled = decode.lower(model.params, one, cache).compile()
    assert {c.dtype for c in hlo.collectives(compiled)} == {"f32"}
    compiled = prefill.lower(model.params, tokens, padding).compile()
    assert "u8" in {c.dtype for c in hlo.collectives(compiled)}


def test_a_long_prompt_agrees_with_the_whole_pass():
    model = loaded("llama", 2)
    tokens = np.random.default_rng(0).integers(0, 300, (1, 250))
    logits = np.asarray(model.logits(tokens, plan=EXACT))[0]
    found = generate(
        model,
        [tokens[0].tolist()],
        config=dataclasses.replace(SHORT, max_new_tokens=1),
        plan=EXACT,
    )
    assert found == [[int(logits[-1].argmax())]]


def test_an_empty_prompt_starts_with_the_first_token():
    model = loaded("llama", 2)  # bos 0
    assert generate(model, [[]], config=SHORT) == generate(model, [[0]], config=SHORT)
    model = loaded("qwen3", 2)  # no bos, eos 0
    assert generate(model, [[]], config=SHORT) == generate(model, [[0]], config=SHORT)
    assert generate(model, []) == []


def test_a_stop_token_ends_its_sequence_alone():
    model, wanted = loaded("qwen3", 2), greedy("qwen3")
    stop = wanted[1][3]
    ends = [
        tokens[: tokens.index(stop)] if stop in tokens else tokens for tokens in wanted
    ]
    shown = []
    found = generate(
        model,
        prompts("qwen3"),
        config=dataclasses.replace(TO_THE_END, stop_ids=(stop,)),
        on_tokens=shown.append,
    )
    assert found == ends
    assert len(shown) == max(map(len, ends)) + (max(map(len, ends)) < 64)
    streamed = [[t for t in row if t is not None] for row in zip(*shown, strict=True)]
    assert streamed == found


def test_all_sequences_ended_stops_early():
    model, wanted = loaded("qwen3", 2), greedy("qwen3")
    shown = []
    config = dataclasses.replace(TO_THE_END, stop_ids=(wanted[0][0],))
    assert generate(
        model, prompts("qwen3")[:1], config=config, on_tokens=shown.append
    ) == [[]]
    assert shown == [[None]]


def test_draws_repeat_with_their_seed_and_differ_without():
    model = loaded("qwen3", 2)
    config = dataclasses.replace(SHORT, temperature=1.0, top_p=0.95, max_new_tokens=12)
    draw = lambda **changes: generate(  # noqa: E731
        model, prompts("qwen3"), config=dataclasses.replace(config, **changes)
    )
    assert draw() == draw()
    assert draw() != draw(seed=1)
    likeliest = [tokens[:12] for tokens in greedy("qwen3")]
    assert draw(top_p=1e-6) == likeliest
    assert draw(temperature=1e-4) == likeliest


def test_draws_follow_the_probabilities_of_the_nucleus():
    """Against NumPy: only its tokens, each about as often as it should."""
    logits = np.random.default_rng(0).normal(size=8) * 2
    temperature, top_p, draws = 0.7, 0.8, 20_000
    likely = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    order = np.argsort(-likely)
    count = int(np.searchsorted(np.cumsum(likely[order]), top_p)) + 1
    wanted = np.zeros(8)
    wanted[order[:count]] = likely[order[:count]] / likely[order[:count]].sum()
    batch = np.broadcast_to(logits.astype(np.float32).reshape(4, 1, 2), (4, draws, 2))
    tokens = jax.vmap(
        lambda part: sampling.sample(
            part,
            jax.random.key(1),
            temperature=jnp.float32(temperature),
            top_p=jnp.float32(top_p),
            axis_name="tensor",
        ),
        axis_name="tensor",
    )(jnp.asarray(batch))
    assert (tokens == tokens[0]).all()
    found = np.bincount(np.asarray(tokens[0]), minlength=8) / draws
    spread = np.sqrt(wanted * (1 - wanted) / draws)
    assert (np.abs(found - wanted) <= 5 * spread).all()


@pytest.mark.parametrize(
    ("size", "wanted"),
    [(1, 16), (16, 16), (17, 32), (256, 256), (257, 512), (600, 768)],
)
def test_buckets(size, wanted):
    assert bucket(size) == wanted


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
    ],
)
def test_wrong_choices(changes, words):
    with pytest.raises(ValueError, match=words):
        GenerationConfig(**changes)


@pytest.mark.usefixtures("as_shipped")
def test_wrong_prompts():
    model = loaded("qwen3", 2)
    with pytest.raises(ValueError, match=r"token 300 is not among the model's 300"):
        generate(model, [[1, 300]])
    with pytest.raises(ValueError, match=r"193 tokens and 64 new .* the model's 256"):
        generate(model, [[1] * 193])
    nameless = dataclasses.replace(
        model, checkpoint=dataclasses.replace(model.checkpoint, eos_ids=())
    )
    with pytest.raises(ValueError, match="start with some text"):
        generate(nameless, [[]])


def test_reference_prompts_differ_in_length():
    """What the tests above rest on."""
    assert len({len(prompt) for prompt in prompts("qwen3")}) == 5
    assert reference("qwen3")["greedy_0"].shape == (64,)
    assert tensor_mesh(2).shape == {"tensor": 2}
