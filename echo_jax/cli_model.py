"""What the commands on a checkpoint share: which one, where it runs, how it sums."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Generator
from typing import Literal

import tyro
from jax.sharding import Mesh
from rich import progress
from rich.console import Console

from echo_jax.config import EchoConfig
from echo_jax.devices import Device, tensor_mesh, use_compilation_cache
from echo_jax.layers.attention_kernel import AttentionChoice
from echo_jax.models.loading import LoadedModel, load, read_checkpoint
from echo_jax.plan import DepthPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which checkpoint, in which precision, on which devices."""

    model: pathlib.Path
    """Folder with config.json and safetensors, or a GGUF file."""
    tensor_ranks: int | None = None
    """Ranks that split every layer; default all devices, or 1 with --device cpu."""
    device: Device = "default"
    """cpu simulates as many devices as there are ranks; default takes JAX's own."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of parameters and computation; default the checkpoint's."""
    attention: AttentionChoice = "auto"
    """What computes the attention; auto takes cuDNN where it can run, else XLA."""
    compilation_cache: pathlib.Path | None = None
    """Folder that keeps compiled programs, so that the next run starts at once."""

    def make_mesh(self, *, simulate_ranks: int | None = None) -> Mesh:
        """The mesh that the model lies on. Call it before any computation.

        Args:
          simulate_ranks: ranks that one device plays instead; the mesh has that one.

        Raises:
          ValueError: if there are too few devices, or the cache is a file.
        """
        ranks = self.tensor_ranks if simulate_ranks is None else 1
        mesh = tensor_mesh(ranks, self.device)
        if self.compilation_cache is not None:
            use_compilation_cache(self.compilation_cache)
        return mesh

    def load(self, mesh: Mesh, *, simulate_ranks: int | None = None) -> LoadedModel:
        """Reads the checkpoint onto the mesh, with a progress bar on standard error.

        Args:
          mesh: from :meth:`make_mesh`.
          simulate_ranks: as there.

        Raises:
          ValueError: as :func:`echo_jax.models.load`.
        """
        with _loading_bar(Console(stderr=True)) as advance:
            return load(
                self.model,
                mesh,
                dtype=self.dtype,
                attention=self.attention,
                simulate=simulate_ranks,
                progress=advance,
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """How the all-reduces of a model are sent."""

    plan: Literal["edges", "uniform", "exact"] = "edges"
    """Which all-reduces are sent in few bits. edges: all, the first two layers and the
    last with 8 bits; uniform: all alike; exact: none."""
    plan_file: pathlib.Path | None = None
    """Take the plan from a file that DepthPlan.save wrote, instead of --plan."""
    config: tyro.conf.OmitArgPrefixes[EchoConfig] = EchoConfig()

    def __post_init__(self):
        if self.plan_file is not None and (
            self.plan != "edges" or self.config != EchoConfig()
        ):
            raise ValueError(
                f"{self.plan_file} says how every sum is sent: leave out --plan and "
                "the options of a configuration, or --plan-file."
            )

    @property
    def name(self) -> str:
        """What tables and records call the plan."""
        return self.plan if self.plan_file is None else self.plan_file.stem

    def choose(self, model: pathlib.Path, ranks: int) -> DepthPlan:
        """The plan that is meant. Reads no weights.

        Args:
          model: the checkpoint.
          ranks: size of the tensor axis.

        Raises:
          ValueError: if the file holds no plan, or one for another number of ranks or
            of calls, or a backend that is named cannot run here.
        """
        plan = self._choose(model, ranks)
        plan.check_backends()
        return plan

    def _choose(self, model: pathlib.Path, ranks: int) -> DepthPlan:
        if self.plan_file is not None:
            plan = DepthPlan.load(self.plan_file, axis_size=ranks)
            return plan.bind(read_checkpoint(model).decoder.num_calls)
        if self.plan == "exact":
            return DepthPlan.uniform(self.config.exact())
        if self.plan == "uniform":
            return DepthPlan.uniform(self.config)
        return DepthPlan.edges(self.config)


@contextlib.contextmanager
def _loading_bar(console: Console) -> Generator[Callable[[int, int], None]]:
    """A bar over the bytes of a checkpoint; yields what ``load`` reports them to."""
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console) as bar:
        task = bar.add_task("loading")
        yield lambda done, total: bar.update(task, completed=done, total=total)
