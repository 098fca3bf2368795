"""Benchmarks and perplexity under any plan, with the bytes that they cost.

``echo_jax.evaluation.harness`` is the adapter for EleutherAI's lm-evaluation-harness;
it is imported by itself, since it needs that package.
"""

from echo_jax.evaluation.encoding import encode_items as encode_items
from echo_jax.evaluation.encoding import encode_request as encode_request
from echo_jax.evaluation.encoding import first_token as first_token
from echo_jax.evaluation.prose import Prose as Prose
from echo_jax.evaluation.questions import Questions as Questions
from echo_jax.evaluation.questions import load_questions as load_questions
from echo_jax.evaluation.questions import save_questions as save_questions
from echo_jax.evaluation.saved import SavedScores as SavedScores
from echo_jax.evaluation.scoring import Request as Request
from echo_jax.evaluation.scoring import Scorer as Scorer
from echo_jax.evaluation.scoring import Scores as Scores
from echo_jax.evaluation.search import refine_plan as refine_plan
from echo_jax.evaluation.sets import Item as Item
from echo_jax.evaluation.sets import grade as grade
from echo_jax.evaluation.sets import read_items as read_items
from echo_jax.evaluation.statistics import Estimate as Estimate
from echo_jax.evaluation.statistics import average as average
from echo_jax.evaluation.statistics import mean_of as mean_of
from echo_jax.evaluation.statistics import paired_difference as paired_difference
