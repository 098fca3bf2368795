"""``echo-jax generate``, in this process."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from echo_jax import cli
from echo_jax.records import read_records
from tests.models.checkpoints import FIXTURES

QWEN3 = str(FIXTURES / "qwen3")


def test_generate_continues_a_prompt_and_counts_bytes(capsys):
    arguments = ["generate", "import ü", "--model", QWEN3, "--max-new-tokens", "4"]
    assert cli.main([*arguments, "--tensor-ranks", "2"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("import ü")
    assert len(captured.out) > len("import ü\n")
    assert "4 tokens in" in captured.err
    # Five sums of 64 float32 values a token, in a ring of two ranks.
    assert "and 1,280 for each new one" in captured.err
    assert "loading" in captured.err


def test_generate_continues_several_prompts_and_an_empty_one(capsys):
    arguments = ["generate", "import", "", "--model", QWEN3, "--max-new-tokens", "2"]
    arguments += ["--tensor-ranks", "1", "--temperature", "1.0", "--plan", "exact"]
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out.startswith("import")


def test_generate_finds_its_programs_again(tmp_path):
    arguments = ["generate", "a", "--model", QWEN3, "--max-new-tokens", "2"]
    arguments += ["--tensor-ranks", "1", "--compilation-cache", str(tmp_path)]
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    try:
        assert cli.main(arguments) == 0
        programs = set(tmp_path.glob("jit_local-*-cache"))
        assert len(programs) == 2  # prefill and decode
        jax.clear_caches()
        assert cli.main(arguments) == 0
        assert set(tmp_path.glob("jit_local-*-cache")) == programs
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_bench_times_the_first_token_of_each_plan(capsys, tmp_path):
    small = str(FIXTURES / "llama_linear")  # needs no tokenizer
    out = tmp_path / "ttft.jsonl"
    arguments = ["bench", "ttft", "--model", small, "--length", "16", "--repeats", "2"]
    measuring = [*arguments, "--tensor-ranks", "2", "--min-bytes", "0"]
    assert cli.main([*measuring, "--out", str(out)]) == 0
    records = read_records(out)
    assert [record["metric"] for record in records] == ["ttft_ms"] * 3
    sent = [record["config"]["bytes_per_token"] for record in records]
    assert sent == [3 * 32 * 4, 3 * 66, 2 * 34 + 66]
    table = capsys.readouterr().out
    assert "First token of 1 x 16 on 2 ranks" in table
    # Three sums of 32 values: in float32; in blocks of 64 in 4 bits and a scale, the
    # embedding's in 8 bits.
    assert str(3 * 32 * 4) in table
    assert str(2 * 34 + 66) in table
    assert cli.main([*arguments[:-4], "--length", "256", "--tensor-ranks", "1"]) == 2
    assert "exceed the model's 256" in capsys.readouterr().err
    assert cli.main([*arguments[:-2], "--repeats", "0", "--tensor-ranks", "1"]) == 2
    assert "repeats=0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a", "--model", QWEN3.replace("qwen3", "llama")], "has no tokenizer.json"),
        (["a", "--model", QWEN3, "--tensor-ranks", "0"], "tensor_ranks=0"),
        (["a", "--model", QWEN3, "--tensor-ranks", "99"], "99 needs as many devices"),
        (["a", "--model", QWEN3, "--top-p", "2"], "top_p=2.0"),
        (["a" * 999, "--model", QWEN3], "shorten the prompt"),
        (["--model", QWEN3], "no prompt"),
        (["a", "--model", QWEN3, "--plan-file", "nowhere.json"], "cannot be read"),
    ],
)
def test_generate_says_clearly_what_is_wrong(arguments, words, capsys):
    assert cli.main(["generate", *arguments]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert not captured.out.replace("a" * 999, "")
