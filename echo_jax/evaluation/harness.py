"""EleutherAI's lm-evaluation-harness on our models. Needs ``pip install lm-eval``."""

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean
from lm_eval.api.model import TemplateLM
from lm_eval.api.task import Task
from lm_eval.config.task import TaskConfig
from lm_eval.evaluator import evaluate
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from echo_jax.evaluation.encoding import encode_request, first_token
from echo_jax.evaluation.scoring import Request, Scorer
from echo_jax.evaluation.sets import SETS, BenchmarkSet, Item, grade, read_items
from echo_jax.models.generation import GenerationConfig, bytes_per_token, generate
from echo_jax.models.loading import LoadedModel
from echo_jax.models.switched import unconditional
from echo_jax.models.tokenizer import TextTokenizer
from echo_jax.plan import DepthPlan

Progress = Callable[[int, int], None]  # requests done, requests in all


class EchoLM(TemplateLM):
    """A loaded model under a plan, as the harness drives it.

    Scores do not depend on what else is asked: batches have fixed shapes, and every
    call of the plan is quantized whatever its size. Generated text is another matter:
    there ``min_bytes`` of the plan holds, as for users.

    Args:
      model: from :func:`echo_jax.models.load`.
      tokenizer: from :func:`echo_jax.models.load_tokenizer`.
      plan: the configurations of the all-reduces.
      batch_tokens: tokens of a batch, padding included.
      progress: called with the requests done and the requests in all.

    Example:
        >>> lm = EchoLM(model, tokenizer, DepthPlan.edges())
        >>> results = lm_eval.simple_evaluate(lm, tasks=["lambada_openai"])

    Source: Gao et al., "The Language Model Evaluation Harness", 2023.
    """

    def __init__(
        self,
        model: LoadedModel,
        tokenizer: TextTokenizer,
        plan: DepthPlan,
        *,
        batch_tokens: int = 4096,
        progress: Progress | None = None,
    ):
        """See the class."""
        super().__init__()
        self.model, self.text_tokenizer, self.plan = model, tokenizer, plan
        self._first = first_token(model.checkpoint)
        self._scorer = Scorer(model, [plan], batch_tokens=batch_tokens)
        self._batch_tokens, self._progress = batch_tokens, progress

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return (*self.model.checkpoint.eos_ids, self._first)[0]

    @property
    def prefix_token_id(self) -> int:
        """What stands in front of a text without context."""
        return self._first

    @property
    def max_length(self) -> int:
        """Tokens that are scored together at most."""
        return self._scorer.lengths[-1]

    @property
    def bytes_per_token(self) -> float:
        """Bytes that a rank sends for each token of a batch."""
        always = unconditional(self.plan, self.model.config.num_calls)
        return bytes_per_token(self.model, always, tokens=self._batch_tokens)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs
    ) -> list[int]:
        """Token ids, with what the tokenizer puts in front unless told not to."""
        ids = self.text_tokenizer.encode(string)
        if add_special_tokens is False:
            return ids[len(self.text_tokenizer.encode("")) :]
        return ids

    def loglikelihood(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """How likely each continuation is, and whether greedy decoding writes it."""
        return self._score(
            [
                encode_request(self.text_tokenizer, *request.args, first=self._first)
                for request in requests
            ]
        )

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """How likely each text is as a whole, in windows of ``max_length``."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            for pair in get_rolling_token_windows(
                ids,
                prefix_token=self._first,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append(Request(*make_disjoint_window(pair)))
                owners.append(number)
        totals = np.zeros(len(requests))
        found = [score for score, _ in self._score(windows)]
        np.add.at(totals, np.array(owners, int), found)
        return totals.tolist()

    def generate_until(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[str]:
        """Greedy or drawn continuations, cut before the first stop text."""
        texts = []
        for number, request in enumerate(requests):
            context, options = request.args
            # Tasks that repeat a request want samples that differ.
            texts.append(self._generate(context, dict(options), seed=number))
            if self._progress is not None:
                self._progress(number + 1, len(requests))
        return texts

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs
    ) -> list[tuple[float, bool]]:
        return self._score([Request(*request[1:]) for request in requests])

    def _score(self, requests: Sequence[Request]) -> list[tuple[float, bool]]:
        scores = self._scorer.score(requests, self.plan, progress=self._progress)
        return list(zip(*(values.tolist() for values in scores), strict=True))

    def _generate(self, context: str, options: dict[str, Any], *, seed: int) -> str:
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else until
        new = int(options.get("max_gen_toks") or options.get("max_new_tokens") or 256)
        drawn = bool(options.get("do_sample")) and options.get("temperature", 1.0) > 0
        config = GenerationConfig(
            max_new_tokens=new,
            temperature=float(options.get("temperature", 1.0)) if drawn else 0.0,
            top_p=float(options.get("top_p", 1.0)),
            seed=seed,
        )
        # The end of a context that is too long, as for scores.
        kept = self.model.checkpoint.max_length - new
        ids = self.text_tokenizer.encode(context)[-kept:]
        (found,) = generate(self.model, [ids], config=config, plan=self.plan)
        text = self.text_tokenizer.decode(found)
        ends = [text.find(stop) for stop in until if stop and stop in text]
        return text[: min(ends)] if ends else text


class LocalTask(Task):
    """A set of :data:`echo_jax.evaluation.sets.SETS`, read from files.

    Args:
      name: a key of ``SETS``.
      items: from :func:`echo_jax.evaluation.read_items`.
    """

    VERSION = 1
    OUTPUT_TYPE = "loglikelihood"

    def __init__(self, name: str, items: Sequence[Item]):
        """See the class."""
        self.kind: BenchmarkSet = SETS[name]
        self.items = list(items)
        # The base class makes a configuration for generated text, and warns of it.
        logger = logging.getLogger("lm_eval")
        level = logger.level
        logger.setLevel(logging.ERROR)
        super().__init__()
        logger.setLevel(level)
        self._config = TaskConfig(
            task=name, num_fewshot=0, output_type=self.OUTPUT_TYPE, repeats=1
        )

    def download(self, *args, **kwargs) -> None:
        """Nothing: the items are there."""

    def has_training_docs(self) -> bool:
        """Whether there are examples to show; there are none."""
        return False

    def has_validation_docs(self) -> bool:
        """Whether there is a second split; there is none."""
        return False

    def has_test_docs(self) -> bool:
        """Whether there are questions."""
        return True

    def test_docs(self) -> list[dict[str, Any]]:
        """The questions, as the harness logs them."""
        return [item._asdict() for item in self.items]

    def doc_to_text(self, doc: dict[str, Any]) -> str:
        """The context of the right answer."""
        return doc["contexts"][doc["gold"]]

    def doc_to_target(self, doc: dict[str, Any]) -> str:
        """The right answer."""
        return doc["continuations"][doc["gold"]]

    def fewshot_context(self, doc: dict[str, Any], *args, **kwargs) -> str:
        """The question alone."""
        return self.doc_to_text(doc)

    def construct_requests(
        self, doc: dict[str, Any], ctx: str, **kwargs
    ) -> list[Instance]:
        """One request a choice."""
        kwargs = {"metadata": kwargs["metadata"]}
        pairs = zip(doc["contexts"], doc["continuations"], strict=True)
        return [
            Instance("loglikelihood", doc=doc, arguments=pair, idx=place, **kwargs)
            for place, pair in enumerate(pairs)
        ]

    def process_results(
        self, doc: dict[str, Any], results: Sequence[tuple[float, bool]]
    ) -> dict[str, float]:
        """1 or 0 by each metric."""
        likely, greedy = zip(*results, strict=True)
        return grade(
            self.kind.metric,
            likely,
            greedy,
            gold=doc["gold"],
            characters=Item(**doc).characters,
        )

    def aggregation(self) -> dict[str, Callable]:
        """Means over the questions."""
        return dict.fromkeys(("acc", "acc_norm"), mean)

    def higher_is_better(self) -> dict[str, bool]:
        """All metrics are."""
        return dict.fromkeys(("acc", "acc_norm"), True)


def local_tasks(
    names: Sequence[str], folder: str | os.PathLike, *, limit: int | None = None
) -> dict[str, LocalTask]:
    """Sets from files as tasks of the harness.

    Args:
      names: keys of :data:`echo_jax.evaluation.sets.SETS`.
      folder: as for :func:`echo_jax.evaluation.read_items`.
      limit: questions of each set at most, evenly spaced.

    Raises:
      ValueError: for a set that is not known or not there, or none at all.
    """
    if not names:
        raise ValueError(f"no sets: name some of {', '.join(SETS)}.")
    return {
        name: LocalTask(name, read_items(name, folder, limit=limit)) for name in names
    }


def evaluate_tasks(
    lm: EchoLM, tasks: dict[str, LocalTask]
) -> dict[str, dict[str, float]]:
    """Runs tasks through the harness.

    Args:
      lm: the model under its plan.
      tasks: from :func:`local_tasks`.

    Returns:
      By set: ``acc`` and ``acc_norm`` with their standard errors ``acc_stderr`` and
      ``acc_norm_stderr``, the number of ``questions``, and ``bytes_per_token``.

    Example:
        >>> rows = evaluate_tasks(lm, local_tasks(["piqa", "sciq"], "data"))
    """
    # Errors of means need no bootstrap, but two questions.
    errors = min(len(task.items) for task in tasks.values()) > 1
    found = evaluate(lm, tasks, log_samples=False, bootstrap_iters=int(errors))
    rows = {}
    for name, task in tasks.items():
        row: dict[str, float] = {}
        for key, value in found["results"][name].items():
            metric, _, kept = key.partition(",")
            if kept and isinstance(value, float | int):
                row[metric] = float(value)
        row["questions"] = len(task.items)
        row["bytes_per_token"] = lm.bytes_per_token
        rows[name] = row
    return rows
