import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import echo_jax as echo
from echo_jax.layers import KVCache
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


@pytest.mark.parametrize(("name", "ranks"), [("qwen3", 4), ("llama", 2)])
def test_greedy_tokens_are_those_of_transformers(name, ranks):
    """Five prompts of 1 to 33 tokens in one batch, 64 new tokens each."""
    assert generate(loaded(name, ranks), prompts(name), config=TO_THE_END) == greedy(
        name
    )


def test_a_prompt_alone_is_continued_as_in_a_batch():
    model = loaded("qwen3", 2)
    for prompt, wanted in list(zip(prompts("qwen3"), greedy("qwen3"), strict=True))[:3]:
        assert generate(model, [prompt], config=SHORT) == [wanted[:6]]


def test_no_step_compiles_anew():
    model = loaded("qwen3", 2)
    generate(model, prompts("qwen3"), config=SHORT)
    before = {name: f._cache_size() for name, f in model.programs.items()}
    # Another prompt of the same bucket, another number of new tokens.
    generate(model, prompts("qwen3")[::-1], config=dataclasses.replace(SHORT, seed=1))
    assert before == {name: f._cache_size() for name, f in model.programs.items()}


def test_c13_ranks_choose_the_same_tokens():
    """Greedy and drawn, from sums in 4 bits; also when all logits are equal."""
    model, size, batch = loaded("llama_linear", 4), 4, 32

    def local(decoder, tokens, cache, key):
        logits, cache = decoder.extend(tokens, cache, plan=FOUR_BITS)
        drawn = sampling.sample(
            logits * 1e-3,
            key,
            temperature=jnp.float32(1.0),
            top_p=jnp.float32(0.9),
            axis_name="tensor",
        )
        likeliest = sampling.greedy(logits, "tensor")
        first = sampling.greedy(logits * 0, "tensor")
        return jnp.stack([drawn, likeliest, first])[None], cache

    whole, cache_spec = PartitionSpec(), cache_specs("tensor")
    run = model.on_ranks(
        local, (whole, cache_spec, whole), (PartitionSpec("tensor"), cache_spec)
    )
    run = jax.jit(run)
    # 4 ranks of one key-value head of 16 features each.
    slots = jnp.zeros((1, batch, 16, 4, 16))
    cache = KVCache(slots, slots, jnp.int32(0), jnp.zeros(batch, jnp.int32))
    tokens = jnp.arange(batch)[:, None]
    seen = set()
    for step in range(8):
        key = jax.random.fold_in(jax.random.key(0), step)
        chosen, cache = run(model.params, tokens, cache, key)
        chosen = np.asarray(chosen)
        assert chosen.shape == (size, 3, batch)
        assert (chosen == chosen[0]).all()
        assert (chosen[:, 2] == 0).all()  # of equal logits the lowest id
        tokens = jnp.asarray(chosen[0, 0])[:, None]
        seen |= set(chosen[0, :2].ravel().tolist())
    assert len(seen) > 60


def steps(model, plan, tokens, padding):
    """Compiled prefill and decode that return whole logits and the cache."""
    whole, cache = PartitionSpec(), cache_specs("tensor")
    out = (PartitionSpec(None, "tensor"), cache)

    def prefill(decoder, tokens, padding):
        return decoder.extend(tokens, decoder.empty_cache(padding, 128), plan=plan)

    def decode(decoder, tokens, cache):
        return decoder.extend(tokens, cache, plan=plan)

    first = jax.jit(model.on_ranks(prefill, (whole, whole), out))
    then = jax.jit(model.on_ranks(decode, (whole, cache), out))
    first = first.lower(model.params, tokens, padding).compile()
    _, cache = first(model.params, tokens, padding)
    return first, then.lower(model.params, tokens[:, -1:], cache).compile()


def test_c08_a_decode_step_is_the_exact_model_bit_for_bit():
    """Messages below min_bytes; those of the prefill are above it, and quantized."""
    model = loaded("qwen3", 2)
    tokens, padding = map(jnp.asarray, left_padded(prompts("qwen3")))
    one = tokens[:, -1:]
    config = echo.EchoConfig(min_bytes=one.size * model.config.width * 4 + 1)
    plan = echo.DepthPlan.edges(config, first=1, last=1)
    prefill, decode = steps(model, plan, tokens, padding)
    exact_prefill, exact_decode = steps(model, EXACT, tokens, padding)
    logits, cache = prefill(model.params, tokens, padding)
    exact_logits, _ = exact_prefill(model.params, tokens, padding)
    assert not (logits == exact_logits).all()
    for _ in range(3):
        found = decode(model.params, one, cache)
        wanted = exact_decode(model.params, one, cache)
        for left, right in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
            np.testing.assert_array_equal(bits_of(left), bits_of(right))
        cache = found[1]
    assert {c.dtype for c in hlo.collectives(decode)} == {"f32"}
    assert "u8" in {c.dtype for c in hlo.collectives(prefill)}


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
    model = loaded("qwen3", 2)  # no bos, eos 0
    assert generate(model, [[]], config=SHORT) == generate(model, [[0]], config=SHORT)
    begins = dataclasses.replace(
        model, checkpoint=dataclasses.replace(model.checkpoint, bos_id=7)
    )
    assert generate(begins, [[]], config=SHORT) == generate(model, [[7]], config=SHORT)
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
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 1 << 32}, "seed=4294967296"),
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
    for wrong in (["text"], [[1.5]], [1, 2], np.ones((1, 2))):
        with pytest.raises(ValueError, match="a sequence of token ids"):
            generate(model, wrong)
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
