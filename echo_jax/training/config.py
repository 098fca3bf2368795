"""What a training run is made of, as small composed dataclasses."""

import dataclasses
import pathlib
from typing import Annotated, Literal

import tyro

from echo_jax.config import EchoConfig
from echo_jax.models import DecoderConfig
from echo_jax.plan import DepthPlan
from echo_jax.wire import WireFormat

Variant = Literal["exact", "echo", "no-feedback"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The shape of the device mesh."""

    data_ranks: int = 2  # ranks that split the batch
    tensor_ranks: int = 4  # ranks that split every layer

    def __post_init__(self):
        if min(self.data_ranks, self.tensor_ranks) < 1:
            raise ValueError(
                f"data_ranks={self.data_ranks} and tensor_ranks={self.tensor_ranks} "
                "must be at least 1."
            )

    @property
    def size(self) -> int:
        """Devices that the mesh takes."""
        return self.data_ranks * self.tensor_ranks


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which text is read, byte by byte, and in what pieces."""

    # File or folder of text; None: the source of Python's standard library.
    path: Annotated[pathlib.Path | None, tyro.conf.arg(name="data")] = None
    batch_size: int = 16  # sequences in a step, over all ranks
    length: int = 128  # tokens in a sequence
    heldout_batches: int = 16  # batches that measure the held-out loss

    def __post_init__(self):
        for name in ("batch_size", "length", "heldout_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with clipping, warm-up and cosine decay."""

    learning_rate: float = 4e-3  # at the end of the warm-up
    warmup: float = 0.1  # share of the steps over which the rate grows from zero
    final: float = 0.1  # the rate at the last step, as a share of the highest
    weight_decay: float = 0.1  # of matrices; vectors do not decay
    beta2: float = 0.98  # decay of the second moment
    clip: float = 1.0  # largest global norm of the gradient

    def __post_init__(self):
        if not self.learning_rate > 0 or not self.clip > 0:
            raise ValueError(
                f"learning_rate={self.learning_rate} and clip={self.clip} must be "
                "positive."
            )
        if not 0 <= self.warmup < 1 or not 0 <= self.final <= 1:
            raise ValueError(
                f"warmup={self.warmup} and final={self.final} are shares from 0 to 1; "
                "warmup is less than 1."
            )
        if not 0 <= self.beta2 < 1 or not self.weight_decay >= 0:
            raise ValueError(
                f"beta2={self.beta2} must be from 0 to under 1 and "
                f"weight_decay={self.weight_decay} at least 0."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A comparison of training runs that differ in their all-reduces alone."""

    model: DecoderConfig = DecoderConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: MeshConfig = MeshConfig()
    format: WireFormat = WireFormat()  # of the echo runs
    vocab_bits: int = 8  # of the vocabulary's two sums in the echo runs
    variants: tuple[Variant, ...] = ("exact", "echo", "no-feedback")
    steps: int = 200  # optimizer steps of each run
    log_every: int = 10  # steps between two records
    seed: int = 0  # of the parameters and the order of the text

    def __post_init__(self):
        if self.steps < 1 or self.log_every < 1:
            raise ValueError(
                f"steps={self.steps} and log_every={self.log_every} must be at least 1."
            )
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must be at least 0.")
        if not self.variants or len(set(self.variants)) != len(self.variants):
            raise ValueError(
                f"variants={self.variants} must name at least one, each once."
            )
        if self.data.batch_size % self.mesh.data_ranks:
            raise ValueError(
                f"batch_size={self.data.batch_size} cannot be split over "
                f"{self.mesh.data_ranks} data ranks: use a multiple of it."
            )
        if self.model.vocab_size < 256:
            raise ValueError(
                f"vocab_size={self.model.vocab_size} is too small for bytes: use 256 "
                "or more."
            )
        self.model.check_ranks(self.mesh.tensor_ranks)
        self.plan("echo")  # refuses bits that no format has

    def plan(self, variant: Variant) -> DepthPlan:
        """The all-reduces of one variant, the small ones through the codec too."""
        config = EchoConfig(
            format=self.format, min_bytes=0, feedback=variant != "no-feedback"
        )
        return DepthPlan.uniform(
            config.exact() if variant == "exact" else config,
            vocab_bits=self.vocab_bits,
        )
