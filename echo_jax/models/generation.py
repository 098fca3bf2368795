"""Text generation: one prefill, then one token a sequence and step."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from echo_jax.layers.cache import KVCache
from echo_jax.models import sampling
from echo_jax.models.decoder import Decoder
from echo_jax.models.loading import LoadedModel
from echo_jax.models.traffic import stream_traffic
from echo_jax.plan import DepthPlan

OnTokens = Callable[[list[int | None]], None]  # one token a sequence, None once ended

# Prompts and caches are padded to sizes from a short list, so that few are compiled.
_SMALLEST_BUCKET = 16
_BUCKET_STEP = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How tokens are chosen, and when to stop.

    Raises:
      ValueError: for a number out of its range.
    """

    max_new_tokens: int = 64  # tokens that are added to each prompt at most
    temperature: float = 0.0  # what logits are divided by; 0 takes the likeliest token
    # Nucleus sampling: draw from the likeliest tokens whose probabilities add up to
    # this.
    top_p: float = 1.0
    seed: int = 0  # of the random draws
    # Token ids that end a sequence, and are left out of it; None for the checkpoint's.
    stop_ids: tuple[int, ...] | None = None

    def __post_init__(self):
        if type(self.max_new_tokens) is not int or self.max_new_tokens < 1:
            raise ValueError(
                f"max_new_tokens={self.max_new_tokens!r} must be an int of at least 1."
            )
        sampling.check_seed(self.seed)
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"temperature={self.temperature} must be finite and at least 0, which "
                "takes the likeliest token."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p={self.top_p} must be above 0 and at most 1, which draws from "
                "all tokens."
            )

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0


def generate(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    *,
    config: GenerationConfig = GenerationConfig(),
    plan: DepthPlan = DepthPlan.edges(),
    on_tokens: OnTokens | None = None,
) -> list[list[int]]:
    """Continues prompts, together as one batch.

    Prompts of different lengths are padded on the left; no token attends to padding,
    and no quantized block spans two tokens. By default the messages of a decode step
    are below ``min_bytes``, so that its sums are exact and it runs the same program as
    the exact model. Those of the prefill are quantized once the prompts are long
    enough.

    Sharding: keys and values are sharded over the tensor axis by heads; every rank
    chooses from the same gathered numbers, hence the same tokens.

    Args:
      model: from :func:`~echo_jax.models.load`.
      prompts: token ids of each. An empty one starts from the checkpoint's
        beginning-of-text token, or from its end-of-text token if it has no other.
      config: how tokens are chosen.
      plan: the configurations of the all-reduces.
      on_tokens: called after every step with one token id for each prompt, None for
        those that have ended; for streaming.

    Returns:
      The new tokens of each prompt, without the one that ended it.

    Raises:
      ValueError: if a prompt has ids that are no tokens, or is too long, or is empty
        where the checkpoint names no first token.

    Example:
        >>> generate(model, [[9707, 1879]], config=GenerationConfig(max_new_tokens=8))
    """
    if not len(prompts):
        return []
    prompts = check_prompts(model, prompts, config)
    stop = model.checkpoint.eos_ids if config.stop_ids is None else config.stop_ids
    texts: list[list[int]] = [[] for _ in prompts]
    running = [True] * len(prompts)
    steps = _Steps(model, plan, config)
    token, cache = steps.prefill(prompts)
    for step in range(1, config.max_new_tokens + 1):
        shown: list[int | None] = [None] * len(prompts)
        for row, chosen in enumerate(np.asarray(token).tolist()):
            running[row] = running[row] and chosen not in stop
            if running[row]:
                texts[row].append(chosen)
                shown[row] = chosen
        if on_tokens is not None:
            on_tokens(shown)
        if step == config.max_new_tokens or not any(running):
            break
        token, cache = steps.decode(token, cache, step)
    return texts


def check_prompts(
    model: LoadedModel, prompts: Sequence[Sequence[int]], config: GenerationConfig
) -> list[list[int]]:
    """The prompts as :func:`generate` takes them, none of them empty.

    Raises:
      ValueError: as :func:`generate`.
    """
    return [_checked(model, prompt, config) for prompt in prompts]


def bytes_per_token(model: LoadedModel, plan: DepthPlan, *, tokens: int) -> float:
    """Bytes that one rank sends for each token of a pass over so many.

    The layers' sums and the embedding's; what choosing a token takes is left out.

    Args:
      model: the model.
      plan: the configurations of its all-reduces.
      tokens: in the pass, of all sequences; 1 for a decode step of one.
    """
    traffic = stream_traffic(
        model.config, plan, batch=1, length=tokens, ranks=model.ranks
    )
    return sum(traffic.values()) / tokens


def bucket(size: int) -> int:
    """The next of the sizes that programs are compiled for."""
    power = max(_SMALLEST_BUCKET, 1 << (size - 1).bit_length())
    return power if power <= _BUCKET_STEP else -(-size // _BUCKET_STEP) * _BUCKET_STEP


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens ``(batch, length)`` that end together, and the padding of each."""
    length = bucket(max(map(len, prompts)))
    tokens = np.zeros((len(prompts), length), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, length - len(prompt) :] = prompt
    return tokens, np.array([length - len(p) for p in prompts], np.int32)


class _Steps:
    """The two compiled programs of a generation, kept with the model."""

    def __init__(self, model: LoadedModel, plan: DepthPlan, config: GenerationConfig):
        self._model, self._plan, self._config = model, plan, config
        self._key = jax.random.key(config.seed)
        # Arrays, so that no value is compiled in.
        self._settings = jnp.float32(config.temperature), jnp.float32(config.top_p)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[jax.Array, KVCache]:
        """The first token of each, and the cache."""
        tokens, padding = left_padded(prompts)
        slots = bucket(tokens.shape[1] + self._config.max_new_tokens)

        def local(decoder: Decoder, tokens, padding, draw):
            cache = decoder.empty_cache(padding, slots)
            return self._extend(decoder, tokens, cache, draw)

        program = self._program(("prefill", slots), local, num_args=2)
        return program(self._model.params, tokens, padding, self._draw(0))

    def decode(
        self, token: jax.Array, cache: KVCache, step: int
    ) -> tuple[jax.Array, KVCache]:
        """The next token of each; the cache that goes in is used up."""

        def local(decoder: Decoder, token, cache, draw):
            return self._extend(decoder, token[:, None], cache, draw)

        program = self._program(("decode",), local, cached=True)
        return program(self._model.params, token, cache, self._draw(step))

    def _extend(self, decoder: Decoder, tokens, cache: KVCache, draw):
        logits, cache = decoder.extend(tokens, cache, plan=self._plan)
        axis = self._model.axis_name
        if self._config.is_greedy:
            return sampling.greedy(logits, axis), cache
        key, temperature, top_p = draw
        chosen = sampling.sample(
            logits, key, temperature=temperature, top_p=top_p, axis_name=axis
        )
        return chosen, cache

    def _draw(self, step: int):
        """What the draw of one step depends on; None where nothing is drawn."""
        if self._config.is_greedy:
            return None
        return jax.random.fold_in(self._key, step), *self._settings

    def _program(self, name, local: Callable, *, num_args=1, cached=False) -> Callable:
        key = (*name, self._plan, self._config.is_greedy)
        if key not in self._model.programs:
            replicated, cache = PartitionSpec(), cache_specs(self._model.axis_name)
            arguments = (replicated,) * num_args + ((cache,) if cached else ())
            function = self._model.on_ranks(
                local, (*arguments, replicated), (replicated, cache)
            )
            donated = 2 if cached else ()
            self._model.programs[key] = jax.jit(function, donate_argnums=donated)
        return self._model.programs[key]


def cache_specs(axis_name: str) -> KVCache:
    """How a cache is sharded: by heads."""
    heads = PartitionSpec(None, None, None, axis_name)
    replicated = PartitionSpec()
    return KVCache(key=heads, value=heads, length=replicated, padding=replicated)


def _checked(
    model: LoadedModel, prompt: Sequence[int], config: GenerationConfig
) -> list[int]:
    """The prompt, not empty, of known tokens, with room for the new ones."""
    checkpoint = model.checkpoint
    is_ids = not isinstance(prompt, str | bytes) and np.ndim(prompt) == 1
    if not is_ids or not all(isinstance(t, int | np.integer) for t in prompt):
        raise ValueError(
            f"a prompt is a sequence of token ids, got {prompt!r}: encode texts with "
            "load_tokenizer(path).encode(text), and give a list of prompts."
        )
    prompt = list(prompt)
    if not prompt:
        first = (checkpoint.bos_id,) if checkpoint.bos_id is not None else ()
        starts = first or checkpoint.eos_ids
        if not starts:
            raise ValueError(
                "an empty prompt needs a first token, and the checkpoint names none: "
                "start with some text."
            )
        prompt = [starts[0]]
    vocab = model.config.vocab_size
    strange = [token for token in prompt if not 0 <= token < vocab]
    if strange:
        raise ValueError(
            f"token {strange[0]} is not among the model's {vocab}: the tokenizer "
            "belongs to another model."
        )
    if len(prompt) + config.max_new_tokens > checkpoint.max_length:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens and {config.max_new_tokens} new ones "
            f"exceed the model's {checkpoint.max_length}: shorten the prompt or lower "
            "max_new_tokens."
        )
    return prompt
