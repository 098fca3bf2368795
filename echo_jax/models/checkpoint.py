"""What a checkpoint's configuration says, in the words of Hugging Face and in ours."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from echo_jax.layers.rope import RopeScaling
from echo_jax.models.config import DecoderConfig

SUPPORTED = ("llama", "qwen3")
_NORM_AFTER_SUM = (
    "it normalizes the output of each block between the all-reduce and the add to the "
    "stream, so that the error of one sum is not repaid by the next: error feedback "
    "does not hold there, and echo_jax has no such decoder."
)
REFUSED = dict.fromkeys(
    ("gemma2", "gemma3", "gemma3_text", "olmo2", "olmo3"), _NORM_AFTER_SUM
)
_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A decoder's configuration with what a tokenizer and a generator need to know."""

    decoder: DecoderConfig  # dtypes as stored
    max_length: int = 2048  # tokens of a sequence that the model was made for
    bos_id: int | None = None  # token in front of a text
    eos_ids: tuple[int, ...] = ()  # tokens that end one


def check_architecture(name: str, where: pathlib.Path) -> None:
    """Refuses what is no decoder of ours, with the reason.

    Raises:
      ValueError: if the architecture is not supported.
    """
    if name in SUPPORTED:
        return
    reason = REFUSED.get(name.replace("-", ""))
    if reason is not None:
        raise ValueError(f"{where}: architecture {name!r} is refused because {reason}")
    raise ValueError(
        f"{where}: architecture {name!r} is not known; echo_jax loads "
        f"{' and '.join(SUPPORTED)} checkpoints."
    )


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
      ValueError: if it is none, as when the file was cut short.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not valid JSON ({error}): the file may be truncated; copy or "
            "download it again."
        ) from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not an object.")
    return value


def read_config(folder: pathlib.Path) -> Checkpoint:
    """Reads ``config.json`` as transformers 4 or 5 spells it.

    Raises:
      ValueError: for an architecture or an option that our decoder does not have.
    """
    path = folder / "config.json"
    raw = read_json(path)
    check_architecture(str(raw.get("model_type")), path)
    _check_options(raw, path)
    generation = folder / "generation_config.json"
    ids = {**raw, **(read_json(generation) if generation.exists() else {})}
    return Checkpoint(
        decoder=_decoder(raw, path),
        max_length=int(raw.get("max_position_embeddings", 2048)),
        bos_id=_first(ids.get("bos_token_id")),
        eos_ids=_as_ids(ids.get("eos_token_id")),
    )


def config_dict(checkpoint: Checkpoint) -> dict[str, Any]:
    """``config.json`` for a decoder, as transformers 4 and 5 spell it, both at once."""
    config = checkpoint.decoder
    name = "Qwen3" if config.qk_norm else "Llama"
    rope = _rope_dict(config.rope_scaling)
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": name.lower(),
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "max_position_embeddings": checkpoint.max_length,
        "tie_word_embeddings": config.tied_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": checkpoint.bos_id,
        "eos_token_id": _as_json(checkpoint.eos_ids),
        "dtype": config.param_dtype,
        "torch_dtype": config.param_dtype,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else rope,
        "rope_parameters": {"rope_theta": config.rope_theta, **rope},
    }


def _decoder(raw: Mapping[str, Any], path: pathlib.Path) -> DecoderConfig:
    missing = [name for name in _SIZES.values() if name not in raw]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}.")
    sizes = {ours: raw[theirs] for ours, theirs in _SIZES.items()}
    heads = sizes["num_heads"]
    rope = raw.get("rope_parameters") or {}
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    if dtype not in _DTYPES:
        raise ValueError(f"{path}: dtype {dtype!r} is not one of {_DTYPES}.")
    return DecoderConfig(
        **sizes,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or sizes["width"] // heads,
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
        rope_scaling=_rope_scaling(raw.get("rope_scaling") or rope, path),
        qk_norm=raw["model_type"] == "qwen3",
        norm_epsilon=float(raw.get("rms_norm_eps", 1e-6)),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        dtype=dtype,
        param_dtype=dtype,
    )


_ROPE_FIGURES = {
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
_SIZES = {
    "vocab_size": "vocab_size",
    "num_layers": "num_hidden_layers",
    "width": "hidden_size",
    "num_heads": "num_attention_heads",
    "mlp_width": "intermediate_size",
}


def _check_options(raw: Mapping[str, Any], path: pathlib.Path) -> None:
    """Refuses options that would change the result silently."""
    for option in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if raw.get(option):
            raise ValueError(
                f"{path}: {option}=true is not supported; echo_jax's decoder has no "
                "biases and attends to the whole sequence."
            )
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"{path}: hidden_act={activation!r} is not 'silu'.")
    quantization = raw.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method")
        raise ValueError(
            f"{path}: weights quantized by {method!r} are not supported; take the "
            "unquantized checkpoint, or a GGUF file."
        )


def _rope_scaling(raw: Mapping[str, Any], path: pathlib.Path) -> RopeScaling | None:
    """From ``rope_scaling`` or ``rope_parameters``."""
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind == "default":
        return None
    missing = [name for name in _ROPE_FIGURES.get(kind, ()) if name not in raw]
    if missing:
        raise ValueError(f"{path}: rope scaling {kind!r} lacks {', '.join(missing)}.")
    if kind == "linear":
        return RopeScaling(kind="linear", factor=float(raw["factor"]))
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=float(raw["factor"]),
            low_frequency=float(raw["low_freq_factor"]),
            high_frequency=float(raw["high_freq_factor"]),
            original_length=int(raw["original_max_position_embeddings"]),
        )
    raise ValueError(
        f"{path}: rope scaling {kind!r} is not supported; 'default', 'linear' and "
        "'llama3' are."
    )


def _rope_dict(scaling: RopeScaling | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default"}
    common = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "linear":
        return common
    return {
        **common,
        "low_freq_factor": scaling.low_frequency,
        "high_freq_factor": scaling.high_frequency,
        "original_max_position_embeddings": scaling.original_length,
    }


def _as_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def _as_json(ids: tuple[int, ...]) -> int | list[int] | None:
    if len(ids) > 1:
        return list(ids)
    return ids[0] if ids else None


def _first(value: Any) -> int | None:
    ids = _as_ids(value)
    return ids[0] if ids else None
