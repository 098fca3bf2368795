import dataclasses
import json

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from echo_jax import models
from echo_jax.layers import RopeScaling, merge_module
from echo_jax.models.checkpoint import config_dict, read_config
from echo_jax.models.gguf import _LAYER, _TOP, interleaved_rows
from echo_jax.models.sources import SafetensorsFolder
from tests.models.checkpoints import (
    EXACT,
    FIXTURES,
    NAMES,
    copy_of,
    loaded,
    reference,
    tensor_mesh,
)
from tests.ranks import bits_of, mesh

TOLERANCE = 1e-4  # of logits around 3; measured: 2e-6


def tensors_of(folder) -> dict[str, np.ndarray]:
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= safetensors.numpy.load_file(file)
    return tensors


def edit_config(folder, **changes) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    raw = {name: value for name, value in raw.items() if value is not ...}
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("name", "ranks"),
    [(name, ranks) for name in ("qwen3", "llama") for ranks in (1, 2, 4)]
    + [("llama_linear", 1), ("llama_linear", 3)],
)
def test_logits_are_those_of_transformers(name, ranks):
    """Among them tied and untied, sharded, and heads that the ranks do not divide."""
    wanted = reference(name)
    logits = loaded(name, ranks).logits(wanted["tokens"], plan=EXACT)
    np.testing.assert_allclose(logits, wanted["logits"], rtol=0, atol=TOLERANCE)


def test_padding_is_zero_and_copies_are_equal():
    """On 8 ranks each of three key-value heads stands twice, for two queries each."""
    model = loaded("llama", 8)
    attention = model.params["layers"]["attention"]
    heads = lambda kernel: np.asarray(kernel).reshape(2, 72, -1, 8)  # noqa: E731
    query, key = heads(attention["query"]["kernel"]), heads(attention["key"]["kernel"])
    out = np.asarray(attention["out"]["kernel"]).reshape(2, 16, 8, 72)
    real = model.placement.query_heads() >= 0
    assert real.sum() == 9
    assert query[:, :, real].any(axis=(0, 1, 3)).all()
    assert out[:, real].any(axis=(0, 2, 3)).all()
    assert not query[:, :, ~real].any()
    assert not out[:, ~real].any()
    np.testing.assert_array_equal(key[:, :, 0:6:2], key[:, :, 1:6:2])
    assert not key[:, :, 6:].any()


def test_other_axes_of_the_mesh_hold_copies():
    model = models.load(FIXTURES / "qwen3", mesh(dp=2, tp=2), axis_name="tp")
    wanted = reference("qwen3")
    logits = model.logits(wanted["tokens"], plan=EXACT)
    np.testing.assert_allclose(logits, wanted["logits"], rtol=0, atol=TOLERANCE)


def test_each_rank_is_handed_its_part_and_each_byte_is_read_once(monkeypatch):
    pieces = []
    read = SafetensorsFolder.read

    def spy(self, name, index):
        piece = read(self, name, index)
        pieces.append(piece.nbytes)
        return piece

    monkeypatch.setattr(SafetensorsFolder, "read", spy)
    model = models.load(FIXTURES / "qwen3", tensor_mesh(4))
    stored = sum(tensor.nbytes for tensor in tensors_of(FIXTURES / "qwen3").values())
    # Beside the pieces one value of each tensor, to learn its dtype.
    assert stored <= sum(pieces) < 1.01 * stored
    query = model.params["layers"]["attention"]["query"]["kernel"]
    assert {shard.data.shape for shard in query.addressable_shards} == {(2, 64, 32)}
    rows = 320 // 4  # of the padded vocabulary
    assert max(pieces) == rows * 64 * 4


def test_replicas_share_what_is_read(monkeypatch):
    """A mesh with data ranks outside reads no byte twice."""
    read = []
    whole = SafetensorsFolder.read

    def counting(self, name, index):
        piece = whole(self, name, index)
        read.append(piece.nbytes)
        return piece

    monkeypatch.setattr(SafetensorsFolder, "read", counting)
    models.load(FIXTURES / "llama", mesh(data=1, tensor=2))
    once = sum(read)
    read.clear()
    models.load(FIXTURES / "llama", mesh(data=4, tensor=2))
    assert sum(read) == once


def test_progress_grows_to_the_end():
    seen = []
    models.load(
        FIXTURES / "llama", tensor_mesh(2), progress=lambda *args: seen.append(args)
    )
    done = [count for count, _ in seen]
    assert done == sorted(done)
    assert seen[-1][0] == seen[-1][1]
    assert len(seen) > 10


def test_dtype_is_the_checkpoints_or_the_one_asked_for(tmp_path):
    model = models.load(FIXTURES / "llama", tensor_mesh(2), dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {
        np.dtype(ml_dtypes.bfloat16)
    }
    models.save(tmp_path / "half", model)
    again = models.load(tmp_path / "half", tensor_mesh(4))
    assert again.config.dtype == "bfloat16"
    np.testing.assert_array_equal(
        bits_of(again.params["final_norm"]["scale"]),
        bits_of(model.params["final_norm"]["scale"]),
    )


@pytest.mark.parametrize("ranks", [2, 8])  # with eight, key-value heads are copied
def test_the_attention_asked_for_is_that_of_the_layers(ranks):
    model = models.load(FIXTURES / "qwen3", tensor_mesh(ranks), attention="xla")
    decoder = merge_module(model.graphdef, model.params)
    assert model.config.attention == decoder.layers.attention.attention == "xla"


# Configurations.


def test_both_spellings_of_the_configuration(tmp_path):
    new = read_config(FIXTURES / "qwen3")
    folder = copy_of("qwen3", tmp_path)
    edit_config(
        folder, rope_parameters=..., dtype=..., rope_theta=1e4, torch_dtype="float32"
    )
    assert read_config(folder) == new
    old = read_config(FIXTURES / "llama_linear")
    assert old.decoder.rope_scaling == RopeScaling(kind="linear", factor=2.0)
    assert old.decoder.rope_theta == 5_000.0
    assert old.decoder.head_dim == 16
    assert old.eos_ids == (0, 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_written_configuration_reads_the_same(name, tmp_path):
    checkpoint = read_config(FIXTURES / name)
    (tmp_path / "config.json").write_text(json.dumps(config_dict(checkpoint)))
    assert read_config(tmp_path) == checkpoint


def test_generation_config_has_the_last_word_on_ids(tmp_path):
    folder = copy_of("qwen3", tmp_path)
    text = json.dumps({"eos_token_id": [7, 8], "bos_token_id": 9})
    (folder / "generation_config.json").write_text(text)
    checkpoint = read_config(folder)
    assert (checkpoint.eos_ids, checkpoint.bos_id) == ((7, 8), 9)


# Saving.


@pytest.mark.parametrize("limit", [5 << 30, 150_000])
@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_what_is_saved_is_what_was_loaded(name, limit, tmp_path):
    """From a padded layout too, bit for bit, in one file or several."""
    models.save(tmp_path / "out", loaded(name, 4), max_shard_bytes=limit)
    saved, original = tensors_of(tmp_path / "out"), tensors_of(FIXTURES / name)
    assert saved.keys() == original.keys()
    for tensor in original:
        np.testing.assert_array_equal(bits_of(saved[tensor]), bits_of(original[tensor]))
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert (len(files) > 1) == (limit < 1 << 30)
    again = models.load(tmp_path / "out", tensor_mesh(2))
    assert again.checkpoint == loaded(name, 4).checkpoint
    assert (tmp_path / "out" / "tokenizer.json").exists() == (name == "qwen3")
    with pytest.raises(ValueError, match="holds a model already"):
        models.save(tmp_path / "out", again)


# GGUF.


def write_gguf(path, name, quantized=(), architecture=None):
    """One of the checkpoints as its converter would write it."""
    checkpoint = read_config(FIXTURES / name)
    config = checkpoint.decoder
    architecture = architecture or ("qwen3" if config.qk_norm else "llama")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(checkpoint.max_length)
    writer.add_embedding_length(config.width)
    writer.add_feed_forward_length(config.mlp_width)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    writer.add_rope_freq_base(config.rope_theta)
    if config.rope_scaling is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_scaling.factor)
    add_tokenizer(writer)
    names = {
        f"model.layers.{layer}.{theirs}.weight": f"blk.{layer}.{ours}.weight"
        for layer in range(config.num_layers)
        for theirs, ours in _LAYER.items()
    } | _TOP
    kind = gguf.GGMLQuantizationType.Q8_0
    for tensor, values in tensors_of(FIXTURES / name).items():
        if architecture == "llama" and tensor.endswith(
            ("q_proj.weight", "k_proj.weight")
        ):
            order = np.argsort(interleaved_rows(len(values), config.head_dim))
            values = values[order]
        if tensor.endswith(quantized or ("nothing",)):
            writer.add_tensor(
                names[tensor], gguf.quants.quantize(values, kind), raw_dtype=kind
            )
        else:
            writer.add_tensor(names[tensor], values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer):
    """That of the qwen3 fixture, which splits text like GPT-2's."""
    raw = json.loads((FIXTURES / "qwen3" / "tokenizer.json").read_text())
    vocab = raw["model"]["vocab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocab, key=vocab.get))
    writer.add_token_types([3] + [1] * (len(vocab) - 1))
    writer.add_token_merges([" ".join(pair) for pair in raw["model"]["merges"]])
    writer.add_eos_token_id(0)


@pytest.mark.parametrize("name", ["qwen3", "llama_linear"])
def test_gguf_holds_the_same_model(name, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", name)
    model = models.load(path, tensor_mesh(2))
    other = loaded(name, 2)
    theirs = dataclasses.replace(
        other.config, norm_epsilon=float(np.float32(other.config.norm_epsilon))
    )
    assert model.config == theirs
    assert model.checkpoint.max_length == other.checkpoint.max_length
    same = jax.tree.map(lambda a, b: bool((a == b).all()), model.params, other.params)
    assert all(jax.tree.leaves(same))


def test_gguf_is_dequantized_by_its_own_package(tmp_path):
    names = ("embed_tokens.weight", "q_proj.weight")
    write_gguf(tmp_path / "model.gguf", "llama_linear", quantized=names)
    # The folder means the file.
    model = models.load(tmp_path, tensor_mesh(4))
    assert model.config.dtype == "bfloat16"
    model = models.load(tmp_path, tensor_mesh(4), dtype="float32")
    kind = gguf.GGMLQuantizationType.Q8_0
    stored = tensors_of(FIXTURES / "llama_linear")["model.embed_tokens.weight"]
    wanted = gguf.quants.dequantize(gguf.quants.quantize(stored, kind), kind)
    found = np.asarray(model.params["embed"]["embedding"])
    np.testing.assert_array_equal(found[:300], wanted)
    assert not found[300:].any()


# What cannot be loaded: one clear error each.


def truncate(path, keep: float):
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data))])


def spoil_nothing_there(folder):
    return folder / "missing", "does not exist"


def spoil_a_file(folder):
    return folder / "config.json", "neither a folder nor a .gguf file"


def spoil_empty_folder(folder):
    (folder / "empty").mkdir()
    return folder / "empty", "no config.json and 0 GGUF files"


def spoil_truncated_weights(folder):
    truncate(folder / "model-00002-of-00003.safetensors", 0.5)
    return folder, r"00002.*truncated"


def spoil_missing_shard(folder):
    (folder / "model-00002-of-00003.safetensors").unlink()
    return folder, "lacks model-00002-of-00003"


def spoil_shard_of_another(folder):
    source = folder / "model-00001-of-00003.safetensors"
    (folder / "model-00002-of-00003.safetensors").write_bytes(source.read_bytes())
    return folder, "that no file holds"


def spoil_truncated_config(folder):
    truncate(folder / "config.json", 0.5)
    return folder, "not valid JSON"


def spoil_unknown_architecture(folder):
    edit_config(folder, model_type="mamba")
    return folder, "'mamba' is not known; echo_jax loads llama and qwen3"


def spoil_norm_behind_the_sum(folder):
    edit_config(folder, model_type="gemma3_text")
    return folder, "normalizes the output of each block between the all-reduce"


def spoil_olmo(folder):
    edit_config(folder, model_type="olmo2")
    return folder, "between the all-reduce and the add"


def spoil_sizes(folder):
    edit_config(folder, intermediate_size=95)
    return folder, r"gate_proj.weight has shape \(96, 64\).*\(95, 64\)"


def spoil_lost_tensor(folder):
    edit_config(folder, num_hidden_layers=3)
    return folder, r"lacks tensor model.layers.2"


def spoil_missing_size(folder):
    edit_config(folder, hidden_size=...)
    return folder, "lacks hidden_size"


def spoil_bias(folder):
    edit_config(folder, attention_bias=True)
    return folder, "attention_bias=true is not supported"


def spoil_activation(folder):
    edit_config(folder, hidden_act="gelu")
    return folder, "hidden_act='gelu'"


def spoil_rope(folder):
    edit_config(folder, rope_parameters={"rope_type": "yarn", "factor": 4.0})
    return folder, "rope scaling 'yarn' is not supported"


def spoil_rope_figures(folder):
    edit_config(folder, rope_parameters={"rope_type": "llama3", "factor": 4.0})
    return folder, "rope scaling 'llama3' lacks low_freq_factor, high_freq_factor"


def spoil_quantization(folder):
    edit_config(folder, quantization_config={"quant_method": "gptq"})
    return folder, "quantized by 'gptq'"


def spoil_gguf(folder):
    path = write_gguf(folder / "cut.gguf", "llama_linear")
    truncate(path, 0.5)
    return path, "cannot be read as GGUF"


def spoil_gguf_architecture(folder):
    path = write_gguf(folder / "g.gguf", "llama_linear", architecture="gemma2")
    return path, "'gemma2' is refused because"


SPOILERS = [value for name, value in globals().items() if name.startswith("spoil_")]


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("spoil", SPOILERS)
def test_what_cannot_be_loaded_is_said_clearly(spoil, tmp_path):
    path, words = spoil(copy_of("qwen3", tmp_path))
    with pytest.raises(ValueError, match=words) as caught:
        models.load(path, tensor_mesh(2))
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("dtype", ["half-float", "int8"])
def test_a_dtype_that_is_none(dtype):
    with pytest.raises(ValueError, match=rf"dtype='{dtype}' must be one of"):
        models.load(FIXTURES / "qwen3", tensor_mesh(2), dtype=dtype)


@pytest.mark.usefixtures("as_shipped")
def test_an_axis_that_the_mesh_lacks():
    with pytest.raises(ValueError, match=r"'tp' is no axis.*'tensor'"):
        models.load(FIXTURES / "qwen3", tensor_mesh(2), axis_name="tp")
