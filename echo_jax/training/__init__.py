"""Training over a (data, tensor) mesh: configuration, data, state, step, loop."""

from echo_jax.training.checkpoint import CheckpointWarning as CheckpointWarning
from echo_jax.training.config import CheckpointConfig as CheckpointConfig
from echo_jax.training.config import DataConfig as DataConfig
from echo_jax.training.config import MeshConfig as MeshConfig
from echo_jax.training.config import OptimizerConfig as OptimizerConfig
from echo_jax.training.config import TrainConfig as TrainConfig
from echo_jax.training.config_file import load_config as load_config
from echo_jax.training.config_file import save_config as save_config
from echo_jax.training.corpus import Corpus as Corpus
from echo_jax.training.gradient_plan import GradientSyncConfig as GradientSyncConfig
from echo_jax.training.gradient_state import GradientSyncState as GradientSyncState
from echo_jax.training.gradient_state import fit_state as fit_state
from echo_jax.training.gradient_state import residual_rms as residual_rms
from echo_jax.training.gradient_sync import GradientSync as GradientSync
from echo_jax.training.loop import compare as compare
from echo_jax.training.loop import prepare as prepare
from echo_jax.training.metrics import flops_per_token as flops_per_token
from echo_jax.training.metrics import (
    signal_to_quantization_db as signal_to_quantization_db,
)
from echo_jax.training.optimizer import make_optimizer as make_optimizer
from echo_jax.training.optimizer import make_schedule as make_schedule
from echo_jax.training.prepare_text import PrepareConfig as PrepareConfig
from echo_jax.training.prepare_text import write_corpus as write_corpus
from echo_jax.training.ranks import SimulatedMesh as SimulatedMesh
from echo_jax.training.ranks import make_mesh as make_mesh
from echo_jax.training.ranks import on_ranks as on_ranks
from echo_jax.training.result import RunResult as RunResult
from echo_jax.training.run import Comparison as Comparison
from echo_jax.training.run import TrainingRun as TrainingRun
from echo_jax.training.state import ModelParts as ModelParts
from echo_jax.training.state import TrainState as TrainState
from echo_jax.training.state import create_state as create_state
from echo_jax.training.step import StepMetrics as StepMetrics
from echo_jax.training.step import make_eval_step as make_eval_step
from echo_jax.training.step import make_train_step as make_train_step
