"""What a training run is made of, as small composed dataclasses."""

import dataclasses
import math
import pathlib
from typing import Annotated, Literal

import tyro

from echo_jax.config import Backend, EchoConfig, ResidualDtype
from echo_jax.models import DecoderConfig
from echo_jax.models.sampling import check_seed
from echo_jax.plan import DepthPlan
from echo_jax.training.gradient_plan import GradientSyncConfig
from echo_jax.wire import WireFormat

Variant = Literal["exact", "echo", "forward-only", "edges", "no-feedback"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The shape of the device mesh."""

    data_ranks: int = 2  # ranks that split the batch
    tensor_ranks: int = 4  # ranks that split every layer
    # All ranks on one device by vmap, the same code: for a parity test on one GPU.
    simulated: bool = False

    def __post_init__(self):
        if min(self.data_ranks, self.tensor_ranks) < 1:
            raise ValueError(
                f"data_ranks={self.data_ranks} and tensor_ranks={self.tensor_ranks} "
                "must be at least 1."
            )

    @property
    def size(self) -> int:
        """Devices that the mesh takes."""
        return 1 if self.simulated else self.data_ranks * self.tensor_ranks

    def __str__(self) -> str:
        kind = "simulated " if self.simulated else ""
        return f"{self.data_ranks} data x {self.tensor_ranks} {kind}tensor ranks"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which text is read, and in what pieces."""

    # A folder that `echo-jax prepare` wrote, read token by token; or a file or folder
    # of text, read byte by byte. None: the source of Python's standard library.
    path: Annotated[pathlib.Path | None, tyro.conf.arg(name="data")] = None
    batch_size: int = 16  # sequences in an optimizer step, over all data ranks
    length: int = 128  # tokens that a sequence predicts; one more is read
    heldout_batches: int = 16  # batches that measure the held-out loss

    def __post_init__(self):
        for name in ("batch_size", "length", "heldout_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with clipping, warm-up and decay."""

    learning_rate: float = 4e-3  # the highest, which the warm-up ends at
    # cosine: half a cosine from the warm-up to the end; wsd (warm up, stay, decay):
    # constant, then linear.
    schedule: Literal["cosine", "wsd"] = "cosine"
    warmup: float = 0.1  # share of the steps over which the rate rises linearly
    decay: float = 0.2  # wsd only: share of the steps, at the end, in which it falls
    # What the rate falls to, as a share of the highest: reached after the last step, as
    # in optax's schedules.
    final: float = 0.1
    weight_decay: float = 0.1  # of matrices; scales of norms and biases do not decay
    beta2: float = 0.98  # decay rate of Adam's second moment
    clip: float = 1.0  # global norm that gradients are clipped to
    # Gradient accumulation: equal parts of a batch that run one after the other, their
    # gradients averaged, so that a large batch takes the memory of a small one.
    accumulate: int = 1

    def __post_init__(self):
        if not 0 < self.learning_rate < math.inf or not self.clip > 0:
            raise ValueError(
                f"learning_rate={self.learning_rate} and clip={self.clip} must be "
                "positive, and the rate finite."
            )
        if not 0 <= self.warmup < 1 or not 0 <= self.final <= 1:
            raise ValueError(
                f"warmup={self.warmup} and final={self.final} are shares from 0 to 1; "
                "warmup is less than 1."
            )
        if self.schedule not in ("cosine", "wsd"):
            raise ValueError(f"schedule={self.schedule!r} must be 'cosine' or 'wsd'.")
        if not 0 <= self.decay <= 1 - self.warmup:
            raise ValueError(
                f"decay={self.decay} is a share of the steps from 0 to what "
                f"warmup={self.warmup} leaves."
            )
        if not 0 <= self.beta2 < 1 or not 0 <= self.weight_decay < math.inf:
            raise ValueError(
                f"beta2={self.beta2} must be from 0 to under 1 and "
                f"weight_decay={self.weight_decay} at least 0, and finite."
            )
        if self.accumulate < 1:
            raise ValueError(f"accumulate={self.accumulate} must be at least 1.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where a run is saved, and how often."""

    # A folder for each variant in it; None: `checkpoints` beside the metrics.
    folder: Annotated[pathlib.Path | None, tyro.conf.arg(name="checkpoint-folder")] = (
        None
    )
    # Steps between two checkpoints; the last step is saved too. 0: none at all.
    every: Annotated[int, tyro.conf.arg(name="checkpoint-every")] = 0
    # How many of the newest checkpoints are kept. More than one, since an unreadable
    # one falls back to the one before.
    keep: Annotated[int, tyro.conf.arg(name="checkpoints-kept")] = 3

    def __post_init__(self):
        if self.every < 0 or self.keep < 1:
            raise ValueError(
                f"checkpoint_every={self.every} must be at least 0 and "
                f"checkpoints_kept={self.keep} at least 1."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A comparison of training runs that differ in their all-reduces alone."""

    model: DecoderConfig = DecoderConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: MeshConfig = MeshConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    # How every variant but `exact` sends its sums.
    format: WireFormat = WireFormat()
    vocab_bits: int = 8  # bits of the embedding's and the readout's sums
    residual_dtype: ResidualDtype = "bfloat16"  # in which the residual is kept
    backend: Backend = "auto"  # implementation of the codec
    # Bits in which gradients are averaged over the data axis, in every variant, with
    # errors repaid in the next step. None: exactly, in float32.
    gradient_bits: int | None = None
    # Which runs are compared. exact: no sum in few bits; echo: all, forward and
    # backward; forward-only: those of the forward pass; edges: all, with 8 bits in the
    # first two layers and the last; no-feedback: all, without repaying errors.
    variants: tuple[Variant, ...] = ("exact", "echo", "no-feedback")
    steps: int = 200  # optimizer steps of each run
    # Steps that the device takes in one call, before anything comes back to the host:
    # saves that latency where a step is short.
    steps_per_call: int = 1
    log_every: int = 10  # steps between two records
    evaluate_every: int = 0  # steps between two held-out losses; 0: only at the end
    tensorboard: bool = False  # write metrics for TensorBoard too
    seed: int = 0  # of the parameters and the order of the text

    def __post_init__(self):
        self._check_counts()
        if not self.variants or len(set(self.variants)) != len(self.variants):
            raise ValueError(
                f"variants={self.variants} must name at least one, each once."
            )
        parts = self.mesh.data_ranks * self.optimizer.accumulate
        if self.data.batch_size % parts:
            raise ValueError(
                f"batch_size={self.data.batch_size} cannot be split over "
                f"{self.mesh.data_ranks} data ranks x {self.optimizer.accumulate} "
                f"parts of a step: use a multiple of {parts}."
            )
        if self.model.vocab_size < 256:
            raise ValueError(
                f"vocab_size={self.model.vocab_size} is too small for bytes: use 256 "
                "or more."
            )
        self.model.check_ranks(self.mesh.tensor_ranks)
        self.plan("echo")  # refuses bits that no format has
        self.gradient_sync()

    def _check_counts(self) -> None:
        for name in ("steps", "log_every", "steps_per_call"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        check_seed(self.seed)
        if self.evaluate_every < 0:
            raise ValueError(
                f"evaluate_every={self.evaluate_every} must be at least 0."
            )
        counts = {
            "steps": self.steps,
            "log_every": self.log_every,
            "evaluate_every": self.evaluate_every,
            "checkpoint_every": self.checkpoint.every,
        }
        for name, count in counts.items():
            if count % self.steps_per_call:
                raise ValueError(
                    f"{name}={count} must be a multiple of "
                    f"steps_per_call={self.steps_per_call}: between two calls nothing "
                    "comes back from the device."
                )

    def plan(self, variant: Variant) -> DepthPlan:
        """The all-reduces of one variant, the small ones through the codec too."""
        config = EchoConfig(
            format=self.format,
            min_bytes=0,
            feedback=variant != "no-feedback",
            residual_dtype=self.residual_dtype,
            backend=self.backend,
        )
        exact = DepthPlan.uniform(config.exact(), vocab_bits=self.vocab_bits)
        if variant == "exact":
            return exact
        if variant == "edges":
            return DepthPlan.edges(config, vocab_bits=self.vocab_bits)
        plan = DepthPlan.uniform(config, vocab_bits=self.vocab_bits)
        return plan.with_backward(exact) if variant == "forward-only" else plan

    def gradient_sync(self) -> GradientSyncConfig | None:
        """How gradients cross the data axis; None for exact sums."""
        if self.gradient_bits is None:
            return None
        fmt = dataclasses.replace(self.format, bits=self.gradient_bits)
        sums = EchoConfig(
            format=fmt,
            min_bytes=0,
            residual_dtype=self.residual_dtype,
            backend=self.backend,
        )
        # The step itself keeps its whole state where a gradient is not finite.
        return GradientSyncConfig(sums=sums, keep_on_nonfinite=False)
