"""GGUF files: configuration, tensors and tokenizer, through the ``gguf`` package."""

import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from echo_jax.layers.rope import RopeScaling
from echo_jax.models.checkpoint import Checkpoint, check_architecture
from echo_jax.models.config import DecoderConfig
from echo_jax.typing import Shape

# Names of Hugging Face, and what GGUF calls the same.
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


class GgufFile:
    """A GGUF file: tensors under their Hugging Face names, dequantized as read."""

    def __init__(self, path: pathlib.Path):
        """Reads the header; tensors stay on the disk."""
        try:
            import gguf
        except ImportError as error:
            raise ValueError(
                "Reading GGUF needs a package: pip install 'echo_jax[hf]'."
            ) from error
        self._dequantize = gguf.quants.dequantize
        self.path = path
        try:
            reader = gguf.GGUFReader(path)
            self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        except Exception as error:  # whatever a cut header makes the reader raise
            raise ValueError(
                f"{path} cannot be read as GGUF ({type(error).__name__}: {error}): the "
                "file may be truncated; copy or download it again."
            ) from error
        self._fields = reader.fields
        self.architecture = str(self.field("general.architecture"))
        check_architecture(self.architecture, path)
        if "rope_freqs.weight" in self._tensors:
            raise ValueError(
                f"{path}: GGUF files with stretched rotary frequencies "
                "(rope_freqs.weight, as Llama 3.1 has) are not supported; load the "
                "safetensors checkpoint."
            )

    def field(self, name: str, default: Any = None) -> Any:
        """Value of one entry of the header."""
        found = self._fields.get(name)
        return default if found is None else found.contents()

    def checkpoint(self) -> Checkpoint:
        """Sizes, lengths and token ids. The dtype is that of the floats in the file."""
        heads = self._number("attention.head_count")
        width = self._number("embedding_length")
        stored = "float32" if self._all_float32() else "bfloat16"
        decoder = DecoderConfig(
            vocab_size=self.shape("model.embed_tokens.weight")[0],
            num_layers=self._number("block_count"),
            width=width,
            num_heads=heads,
            num_kv_heads=self._number("attention.head_count_kv", heads),
            head_dim=self._number("attention.key_length", width // heads),
            mlp_width=self._number("feed_forward_length"),
            rope_theta=float(self._value("rope.freq_base", 10_000.0)),
            rope_scaling=self._rope_scaling(),
            qk_norm=self.architecture == "qwen3",
            norm_epsilon=float(self._value("attention.layer_norm_rms_epsilon", 1e-6)),
            tied_embeddings="lm_head.weight" not in self,
            dtype=stored,
            param_dtype=stored,
        )
        end = self.field("tokenizer.ggml.eos_token_id")
        return Checkpoint(
            decoder=decoder,
            max_length=self._number("context_length", 2048),
            bos_id=self.field("tokenizer.ggml.bos_token_id"),
            eos_ids=() if end is None else (int(end),),
        )

    def __contains__(self, name: object) -> bool:
        return _gguf_name(str(name)) in self._tensors

    def shape(self, name: str) -> Shape:
        """Shape of a tensor, the slowest dimension first."""
        tensor = self._tensors[_gguf_name(name)]
        return tuple(int(size) for size in tensor.shape[::-1])

    def read(self, name: str, index: Sequence[slice]) -> np.ndarray:
        """A piece of a tensor; only its rows are dequantized."""
        tensor = self._tensors[_gguf_name(name)]
        rows = np.arange(self.shape(name)[0])[index[0]]
        if self._is_permuted(name):
            rows = self._permuted(name)[rows]
        data = np.asarray(tensor.data[rows])
        return self._dequantize(data, tensor.tensor_type)[(slice(None), *index[1:])]

    def _is_permuted(self, name: str) -> bool:
        """Whether a head's two halves are interleaved, as the llama files have them."""
        query_or_key = name.endswith(("q_proj.weight", "k_proj.weight"))
        return self.architecture == "llama" and query_or_key

    def _permuted(self, name: str) -> np.ndarray:
        """Row of the file for each row in the order of Hugging Face."""
        return interleaved_rows(self.shape(name)[0], self.checkpoint().decoder.head_dim)

    def _all_float32(self) -> bool:
        return all(t.tensor_type.name == "F32" for t in self._tensors.values())

    def _value(self, name: str, default: Any = None) -> Any:
        value = self.field(f"{self.architecture}.{name}", default)
        if value is None:
            raise ValueError(f"{self.path} lacks {self.architecture}.{name}.")
        return value

    def _number(self, name: str, default: int | None = None) -> int:
        return int(self._value(name, default))

    def _rope_scaling(self) -> RopeScaling | None:
        kind = self._value("rope.scaling.type", "none")
        if kind == "none":
            return None
        if kind != "linear":
            raise ValueError(f"{self.path}: rope scaling {kind!r} is not supported.")
        factor = float(self._value("rope.scaling.factor"))
        return RopeScaling(kind="linear", factor=factor)


@functools.cache
def interleaved_rows(rows: int, head_dim: int) -> np.ndarray:
    """Where a half-split row stands when pairs of each head are side by side."""
    head, within = np.divmod(np.arange(rows), head_dim)
    half, pair = np.divmod(within, head_dim // 2)
    return head * head_dim + 2 * pair + half


def _gguf_name(name: str) -> str:
    """GGUF's name for a tensor of Hugging Face."""
    if name in _TOP:
        return _TOP[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER[rest.removesuffix('.weight')]}.weight"
