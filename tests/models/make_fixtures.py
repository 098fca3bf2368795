"""Writes the tiny checkpoints in ``fixtures/`` and what transformers makes of them.

    pip install torch==2.13.0 transformers==5.24.0 tokenizers
    python -m tests.models.make_fixtures

Each folder is a random model as ``save_pretrained`` writes it, with ``reference.npz``:
``tokens (2, 24)`` and their float32 ``logits``, and for each prompt ``prompt_i`` the 64
tokens ``greedy_i`` that greedy decoding appends. The norms' weights are random too:
ones would hide norms that are left out or swapped.
"""

import json
import pathlib

import numpy as np
import tokenizers
import torch
import transformers

FOLDER = pathlib.Path(__file__).parent / "fixtures"
VOCAB = 300  # no multiple of 64, so that tables are padded
NEW_TOKENS = 64
PROMPT_LENGTHS = (1, 5, 9, 17, 33)
# Closer logits than this could fall to either side in another order of sums.
SMALLEST_GAP = 2e-3

QWEN3 = transformers.Qwen3Config(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,  # 8 x 16 is not the width, on purpose
    max_position_embeddings=256,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=0,
)
LLAMA = transformers.LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=72,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=9,  # like SmolLM2: no power of two divides 9 and 3
    num_key_value_heads=3,
    head_dim=8,
    max_position_embeddings=256,
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=0,
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
)
LINEAR = transformers.LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=256,
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=[0, 1],
    rope_parameters={"rope_type": "linear", "rope_theta": 5_000.0, "factor": 2.0},
)


def randomized(config, seed: int):
    """A random model whose norms are no identity."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            noise = torch.randn_like(param)
            param.copy_(1 + 0.2 * noise if "norm" in name else 0.08 * noise)
    return model


def reference(model, seed: int) -> tuple[dict[str, np.ndarray], float]:
    """Logits and greedy tokens, and the smallest lead of a chosen token."""
    random = np.random.default_rng(seed)
    arrays = {"tokens": random.integers(0, VOCAB, (2, 24))}
    gap = float("inf")
    with torch.no_grad():
        logits = model(torch.tensor(arrays["tokens"])).logits
        arrays["logits"] = logits.numpy().astype(np.float32)
        for i, length in enumerate(PROMPT_LENGTHS):
            prompt = random.integers(0, VOCAB, length)
            found = model.generate(
                torch.tensor(prompt)[None],
                attention_mask=torch.ones(1, length, dtype=torch.long),
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                eos_token_id=None,
                pad_token_id=0,
            )
            assert found.shape == (1, length + NEW_TOKENS)
            best = model(found).logits[0, length - 1 : -1].topk(2).values
            gap = min(gap, float((best[:, 0] - best[:, 1]).min()))
            arrays[f"prompt_{i}"] = prompt
            arrays[f"greedy_{i}"] = found[0, length:].numpy()
    return arrays, gap


def write(name: str, config, **save_options) -> pathlib.Path:
    """One folder, from the first seed without near ties."""
    for seed in range(100):
        model = randomized(config, seed)
        arrays, gap = reference(model, seed)
        if gap > SMALLEST_GAP:
            break
    folder = FOLDER / name
    model.save_pretrained(folder, **save_options)
    np.savez_compressed(folder / "reference.npz", **arrays)
    print(f"{name}: seed {seed}, smallest lead {gap:.4f}")
    return folder


def respell(folder: pathlib.Path) -> None:
    """Writes config.json the way transformers 4 did."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["torch_dtype"] = config.pop("dtype")
    config["rope_theta"] = rope["rope_theta"]
    config["rope_scaling"] = {"type": rope["rope_type"], "factor": rope["factor"]}
    config["transformers_version"] = "4.38.0"
    del config["head_dim"]
    path.write_text(json.dumps(config, indent=2) + "\n")


def write_tokenizer(folder: pathlib.Path) -> None:
    """A byte-level tokenizer of this vocabulary, from this file's own text."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([pathlib.Path(__file__).read_text()], trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    tokenizer.save(str(folder / "tokenizer.json"))


def main() -> None:
    qwen3 = write("qwen3", QWEN3, max_shard_size="200KB")
    write_tokenizer(qwen3)
    write("llama", LLAMA)
    respell(write("llama_linear", LINEAR))
    for folder in FOLDER.iterdir():
        (folder / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
