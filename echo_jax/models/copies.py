"""A decoder whose key-value heads stand in copies: right to run, wrong to train."""

from collections.abc import Sequence

import jax

from echo_jax.models.decoder import Decoder, DecoderLayer, LayerPlan
from echo_jax.residual import Residual
from echo_jax.typing import AnyFloat


class CopiedHeadsLayer(DecoderLayer):
    """A layer that refuses gradients of its attention's kernels.

    A copy would follow the gradient of its own query heads alone and drift away from
    the others; padding beside a copy would come to life.
    """

    def __call__(
        self, stream: AnyFloat, residual: Residual | None, plan: LayerPlan
    ) -> tuple[AnyFloat, Residual | None]:
        """As that of the base class; see there."""
        attention = self.attention
        layers = (attention.query, attention.key, attention.value, attention.out)
        stream = _constant(stream, [layer.kernel[...] for layer in layers])
        return super().__call__(stream, residual, plan)


class CopiedHeadsDecoder(Decoder):
    """As :class:`~echo_jax.models.Decoder`; attention's kernels are not for training.

    Other parameters are: gradients of norms, of adapters around it, of the input.

    Raises:
      ValueError: when a gradient of query, key, value or output kernels is taken.
    """

    layer_type = CopiedHeadsLayer


def _refuse(x, kernels):
    if any(kernel.perturbed for kernel in kernels):
        raise ValueError(
            "this model cannot be trained as it was loaded: its key-value heads stand "
            "in several copies, to fit the ranks, and copies that are trained drift "
            "apart. Load it with trainable=True, which pads heads instead, or on fewer "
            "ranks."
        )
    return x.value, None


@jax.custom_vjp
def _constant(x: AnyFloat, kernels: Sequence[AnyFloat]) -> AnyFloat:
    """x itself; no gradient may be taken of the kernels."""
    return x


_constant.defvjp(_refuse, lambda _, cotangent: (cotangent, None), symbolic_zeros=True)
