"""From texts of a benchmark to requests of token ids."""

from collections.abc import Sequence

from echo_jax.evaluation.scoring import Request
from echo_jax.evaluation.sets import Item
from echo_jax.models.checkpoint import Checkpoint
from echo_jax.models.tokenizer import TextTokenizer


def encode_request(
    tokenizer: TextTokenizer, context: str, continuation: str, *, first: int
) -> Request:
    """Token ids of both parts, cut where the context alone would end.

    Blanks at the end of the context go to the continuation, and both are encoded
    together, so that words are cut as they are in running text.

    Args:
      tokenizer: the model's.
      context: may be empty: then ``first`` stands for it.
      continuation: not empty.
      first: the token that begins a text.

    Source: the convention of EleutherAI's lm-evaluation-harness.
    """
    if not context:
        return Request([first], _without_first(tokenizer, continuation))
    kept = context.rstrip()
    continuation = context[len(kept) :] + continuation
    head = tokenizer.encode(kept)
    whole = tokenizer.encode(kept + continuation)
    return Request(head or [first], whole[len(head) :])


def encode_items(
    tokenizer: TextTokenizer, items: Sequence[Item], *, first: int
) -> list[Request]:
    """The requests of every choice of every question, in order."""
    return [
        encode_request(tokenizer, context, continuation, first=first)
        for item in items
        for context, continuation in zip(item.contexts, item.continuations, strict=True)
    ]


def first_token(checkpoint: Checkpoint) -> int:
    """What stands in front of a text that has no context.

    Raises:
      ValueError: if the checkpoint names neither a first nor a last token.
    """
    if checkpoint.bos_id is not None:
        return checkpoint.bos_id
    if checkpoint.eos_ids:
        return checkpoint.eos_ids[0]
    raise ValueError(
        "an empty context needs a first token, and the checkpoint names none: add "
        "bos_token_id to its config.json."
    )


def _without_first(tokenizer: TextTokenizer, text: str) -> list[int]:
    """Token ids of a text, without what the tokenizer puts in front."""
    return tokenizer.encode(text)[len(tokenizer.encode("")) :]
