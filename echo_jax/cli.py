"""The ``echo-jax`` command."""

import contextlib
import dataclasses
import functools
import io
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Annotated, Literal

import jax
import tyro
from rich.console import Console

from echo_jax.cli_advise import Advise, prepare_advice
from echo_jax.cli_bench import Bench, bench
from echo_jax.cli_evaluate import Evaluate, prepare_evaluation
from echo_jax.cli_model import ModelOptions, PlanOptions
from echo_jax.collectives import explain
from echo_jax.config import EchoConfig
from echo_jax.models.generation import (
    GenerationConfig,
    bucket,
    bytes_per_token,
    check_prompts,
    generate,
)
from echo_jax.models.loading import LoadedModel
from echo_jax.models.tokenizer import TextStream, TextTokenizer, load_tokenizer
from echo_jax.plan import DepthPlan
from echo_jax.training.command import (
    PrepareText,
    Train,
    prepare_text,
    prepare_training,
    saved_defaults,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explain:
    """Say which path an echo_psum takes for a shape, and what it sends."""

    shape: tyro.conf.Positional[tuple[int, ...]]
    """Shape of a rank's tensor."""
    ranks: int = 8
    """Ranks on the axis."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Dtype of the tensor."""
    config: tyro.conf.OmitArgPrefixes[EchoConfig] = EchoConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue prompts with a Llama or Qwen3 checkpoint, tensor-parallel."""

    prompts: tyro.conf.Positional[tuple[str, ...]]
    """Texts to continue. One is shown as it grows, several when they are done."""
    checkpoint: tyro.conf.OmitArgPrefixes[ModelOptions]
    max_new_tokens: int = 64
    """The most tokens that are added to each prompt."""
    temperature: float = 0.0
    """Temperature of sampling; 0 is greedy: always the likeliest token."""
    top_p: float = 1.0
    """Nucleus sampling: draw from the likeliest tokens whose probabilities add up to
    this."""
    seed: int = 0
    """Random seed of the draws."""
    sums: tyro.conf.OmitArgPrefixes[PlanOptions] = PlanOptions()


Command = Train | PrepareText | Generate | Evaluate | Bench | Advise | Explain


def _command(defaults: Train):
    """The command line: one subcommand for each class."""
    return (
        Annotated[Train, tyro.conf.subcommand("train", default=defaults)]
        | Annotated[PrepareText, tyro.conf.subcommand("prepare")]
        | Annotated[Generate, tyro.conf.subcommand("generate")]
        | Annotated[Evaluate, tyro.conf.subcommand("evaluate")]
        | Annotated[Bench, tyro.conf.subcommand("bench")]
        | Annotated[Advise, tyro.conf.subcommand("advise")]
        | Annotated[Explain, tyro.conf.subcommand("explain")]
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code.

    0 for success, 1 where a file could not be written or a device has no room, 2 for a
    wrong argument, 130 when Ctrl-C stopped the run; what was measured until then is
    kept.
    """
    try:
        code = _run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("echo-jax: stopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # as by `| head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a full disk, a file that is no longer there
        print(f"echo-jax: {error}", file=sys.stderr)
        return 1
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        first = str(error).partition("\n")[0]
        print(f"echo-jax: the device has no room for this: {first}", file=sys.stderr)
        return 1


def _parse(arguments: list[str]) -> Command:
    """The command; what its own classes refuse is a ValueError, as everywhere else."""
    kind = _command(saved_defaults(arguments))
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            command: Command = tyro.cli(kind, prog="echo-jax", args=arguments)
    except SystemExit as stopped:
        for error in _causes(stopped):
            if isinstance(error, ValueError) and _is_ours(error):
                raise ValueError(str(error)) from None
        print(said.getvalue(), end="", file=sys.stderr)
        raise
    print(said.getvalue(), end="", file=sys.stderr)
    return command


def _causes(error: BaseException) -> Iterator[BaseException]:
    """What led to an error, from it to the first."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__context__


def _is_ours(error: BaseException) -> bool:
    """Whether it was raised in this package, not by the parser."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1].f_globals["__name__"].startswith("echo_jax.")


def _run(arguments: list[str]) -> int:
    """Errors of the arguments are one line; what comes later shows where."""
    try:
        command = _parse(arguments)
        if isinstance(command, Explain):
            finish = _explain(command)
        elif isinstance(command, Generate):
            finish = _prepare_generation(command)
        elif isinstance(command, Evaluate):
            finish = prepare_evaluation(command)
        elif isinstance(command, Bench):
            finish = bench(command)
        elif isinstance(command, PrepareText):
            finish = prepare_text(command)
        elif isinstance(command, Advise):
            finish = prepare_advice(command)
        else:
            finish = prepare_training(command)
    except (ValueError, OSError) as error:
        print(f"echo-jax: {error}", file=sys.stderr)
        return 2
    return finish()


def _explain(command: Explain) -> Callable[[], int]:
    if not command.shape:
        raise ValueError("explain needs a shape, such as: echo-jax explain 8 4096")
    text = str(explain(command.shape, command.dtype, command.ranks, command.config))

    def finish() -> int:
        print(text)
        return 0

    return finish


def _prepare_generation(command: Generate) -> Callable[[], int]:
    """Reads the model and checks the prompts; the rest is for the function returned."""
    if not command.prompts:
        raise ValueError("no prompt: give the text to continue, in quotes.")
    config = GenerationConfig(
        max_new_tokens=command.max_new_tokens,
        temperature=command.temperature,
        top_p=command.top_p,
        seed=command.seed,
    )
    checkpoint = command.checkpoint
    tokenizer = load_tokenizer(checkpoint.model)
    mesh = checkpoint.make_mesh()
    plan = command.sums.choose(checkpoint.model, mesh.shape["tensor"])
    model = checkpoint.load(mesh)
    prompts = [tokenizer.encode(prompt) for prompt in command.prompts]
    prompts = check_prompts(model, prompts, config)
    return functools.partial(
        _generate, command, model, plan, tokenizer, prompts, config
    )


def _generate(
    command: Generate,
    model: LoadedModel,
    plan: DepthPlan,
    tokenizer: TextTokenizer,
    prompts: list[list[int]],
    config: GenerationConfig,
) -> int:
    start = time.perf_counter()
    if len(prompts) == 1:
        texts = _stream(model, tokenizer, command.prompts[0], prompts, config, plan)
    else:
        texts = generate(model, prompts, config=config, plan=plan)
        for prompt, text in zip(command.prompts, texts, strict=True):
            print(f"{prompt}{tokenizer.decode(text)}\n", flush=True)
    seconds = time.perf_counter() - start
    places = bucket(max(map(len, prompts))) * len(prompts)
    prefill, decode = (
        bytes_per_token(model, plan, tokens=tokens) for tokens in (places, len(prompts))
    )
    Console(stderr=True).print(
        f"{sum(map(len, texts))} tokens in {seconds:.1f} s, compilation included. Each "
        f"of {model.ranks} ranks sent {prefill:,.0f} bytes for each of the {places} "
        f"tokens of the prefill, padding included, and {decode:,.0f} for each new one.",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def _stream(model, tokenizer, prompt: str, ids, config, plan) -> list[list[int]]:
    """Generates from one prompt and shows the text as it grows."""
    stream = TextStream(tokenizer)
    print(prompt, end="", flush=True)

    def show(tokens: list[int | None]) -> None:
        if tokens[0] is not None:
            print(stream.add(tokens[0]), end="", flush=True)

    texts = generate(model, ids, config=config, plan=plan, on_tokens=show)
    print(stream.rest(), flush=True)
    return texts


if __name__ == "__main__":
    sys.exit(main())
