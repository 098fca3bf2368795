"""Predicts the time of exact and of quantized sums, and which to use."""

from echo_jax.cost_model.advice import Advice as Advice
from echo_jax.cost_model.advice import Message as Message
from echo_jax.cost_model.advice import advise as advise
from echo_jax.cost_model.advice import break_even as break_even
from echo_jax.cost_model.advice import decoder_messages as decoder_messages
from echo_jax.cost_model.calibration import calibrate as calibrate
from echo_jax.cost_model.fitting import Sample as Sample
from echo_jax.cost_model.fitting import fit as fit
from echo_jax.cost_model.fitting import predict as predict
from echo_jax.cost_model.model import CodecSpeed as CodecSpeed
from echo_jax.cost_model.model import CostModel as CostModel
from echo_jax.cost_model.model import ExactSpeed as ExactSpeed
from echo_jax.cost_model.model import Link as Link
from echo_jax.cost_model.model import SumTimes as SumTimes
from echo_jax.cost_model.projection import MACHINES as MACHINES
from echo_jax.cost_model.projection import Machine as Machine
from echo_jax.cost_model.projection import TwoLevels as TwoLevels
from echo_jax.cost_model.projection import project as project
