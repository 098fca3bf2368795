"""Gradients averaged over data ranks in few bits, errors repaid a step later.

The message is one and the same in every step, so that its residual is carried from
step to step: classical error feedback. With both residuals the sum of all synchronised
gradients is that of all mean gradients, less what the newest step rounded away.

Source: Seide et al., "1-Bit Stochastic Gradient Descent and its Application to
Data-Parallel Distributed Training of Speech DNNs", 2014; Karimireddy et al., "Error
Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from echo_jax import axes
from echo_jax.collectives import echo_psum, traffic
from echo_jax.layers.partitioning import Specs
from echo_jax.residual import Residual, init_residual, make_layout
from echo_jax.training.buckets import Bucket, leading_axis, no_leading_axis
from echo_jax.training.gradient_plan import (
    GradientPlan,
    GradientSyncConfig,
    fingerprint,
    names_in,
    plan_gradients,
)
from echo_jax.training.gradient_state import GradientSyncState
from echo_jax.typing import AxisName
from echo_jax.wire import gaussian_stream_error


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class GradientSync:
    """A gradient transformation that averages over data ranks in few bits.

    Works inside ``jax.shard_map`` or ``jax.vmap(axis_name=...)``, on gradients that
    still differ from one data rank to the next: take them with respect to
    :meth:`per_rank` parameters, or JAX sums them itself, exactly and at full width.
    Leaves are joined into buckets, each of which is one :func:`echo_jax.echo_psum`;
    every leaf begins with a block of its own, so that no two leaves share a scale.
    Small leaves, and those that are replicated over a mesh axis over which others are
    sharded (the scales of norms on a tensor-parallel mesh), are averaged exactly.

    Put it in front of everything that looks at gradients: clipping, optimizers,
    ``optax.apply_if_finite``. A gradient that is not finite becomes NaN in its block on
    every data rank alike.

    Args:
      config: formats and sizes.
      axis_name: the data axis, or a tuple of axes that act as one.
      specs: how parameters are sharded over the mesh, as ``split_module`` returns it.
        Needed where they are cut and types are not tracked, and for
        :attr:`state_spec`.

    Example:
        >>> sync = GradientSync(specs=parts.specs)
        >>> state = sync.create(params, mesh)
        >>> def local(params, state, batch):  # inside shard_map over (data, tensor)
        ...     loss, grads = jax.value_and_grad(loss_of)(sync.per_rank(params), batch)
        ...     grads, state = sync.update(grads, state)
        ...     return jax.lax.pmean(loss, "data"), grads, state
    """

    config: GradientSyncConfig = GradientSyncConfig()
    axis_name: AxisName = "data"
    specs: Specs | None = None

    @property
    def state_spec(self) -> PartitionSpec:
        """The spec of every leaf of a state: one part a rank, data ranks slowest."""
        names = [] if self.specs is None else names_in(jax.tree.leaves(self.specs))
        own = axes.axis_names(self.axis_name)
        return PartitionSpec((*own, *(n for n in names if n not in own)))

    @property
    def transformation(self) -> optax.GradientTransformation:
        """The pair of functions, to stand first in an ``optax.chain``."""
        return optax.GradientTransformation(self.init, self.update)

    @property
    def relative_error(self) -> float:
        """Expected error of one step's means over the means, in root mean squares.

        For independent Gaussian gradients; smaller where ranks agree. With feedback an
        error is made and the one before repaid, which is ``sqrt(2)`` as much in a
        single step, though it cancels over steps. What divides by the root of mean
        squares (Adam) takes steps that are shorter by ``sqrt(1 + relative_error**2)``:
        a learning rate larger by as much makes up for it.
        """
        sums = self.config.sums
        if sums.is_exact:
            return 0.0
        roundings = 1 if sums.algorithm == "one-shot" else 2
        once = gaussian_stream_error(sums.format, roundings=roundings)
        return once * (2.0 if sums.feedback else 1.0) ** 0.5

    def per_rank(self, params: Any) -> Any:
        """Parameters that count as different on each data rank; the same values."""
        if not axes.is_tracked(self.axis_name):
            return params
        own = frozenset(axes.axis_names(self.axis_name))
        return jax.tree.map(lambda leaf: axes.to_varying(leaf, own), params)

    def init(self, params: Any) -> GradientSyncState:
        """A rank's state that owes nothing, for gradients like these parameters.

        Args:
          params: this rank's parts.
        """
        plan = self._plan(params)
        residuals = [
            init_residual(bucket.shape, self.axis_name, config=self.config.sums)
            for bucket in plan.buckets
        ]
        layout = jnp.full((1,), fingerprint(plan, self.config), jnp.uint32)
        return self._vary(_state_of(layout, residuals), plan)

    def update(
        self, updates: Any, state: Any, params: Any = None
    ) -> tuple[Any, GradientSyncState]:
        """Means over data ranks, and what is owed to the next step.

        Sharding: gradients differ from rank to rank of the data axis; the means are the
        same on all of them, bit for bit, and typed so. Other axes stay as they are.

        Args:
          updates: this rank's gradients, of the mean loss over its part of the batch.
          state: from :meth:`init` or the step before.
          params: ignored; optax hands it in.

        Returns:
          ``(means, state)``, each mean in the dtype of its leaf. If any is not finite
          on any rank of the mesh, the state is the one that was handed in.

        Raises:
          ValueError: if gradients have been averaged already, a dtype is not
            supported, or the state belongs to other parameters.
        """
        del params
        leaves, tree = jax.tree.flatten(updates)
        plan = self._plan(updates)
        self._check(leaves, state, plan)
        exact = lax.pmean([leaves[place] for place in plan.exact], self.axis_name)
        means: dict[int, jax.Array] = dict(zip(plan.exact, exact, strict=True))
        ranks, residuals = axes.axis_size(self.axis_name), []
        for index, bucket in enumerate(plan.buckets):
            total, residual = echo_psum(
                bucket.join(leaves),
                self._residual(state, index, bucket),
                self.axis_name,
                config=self.config.sums,
            )
            residuals.append(residual)
            for place, values in bucket.cut(total):
                means[place] = (values / ranks).astype(leaves[place].dtype)
        after = _state_of(state.layout, residuals)
        if after.send and self.config.keep_on_nonfinite:
            finite = self._all_finite(list(means.values()), plan)
            after = jax.tree.map(lambda n, o: jnp.where(finite, n, o), after, state)
        ordered = [means[place] for place in range(len(leaves))]
        return jax.tree.unflatten(tree, ordered), after

    def create(self, params: Any, mesh: Mesh) -> GradientSyncState:
        """A state that owes nothing, as global arrays on a mesh.

        Args:
          params: global parameters.
          mesh: has the data axis and the axes of ``specs``.
        """
        specs = PartitionSpec() if self.specs is None else self.specs
        init = jax.shard_map(
            self.init, mesh=mesh, in_specs=(specs,), out_specs=self.state_spec
        )
        return jax.jit(init)(params)

    def wire_bytes(self, params: Any, ranks: int) -> dict[str, int]:
        """Bytes that one rank sends to others in a step, by collective, exactly.

        Args:
          params: one rank's parts, or their shapes.
          ranks: size of the data axis.
        """
        leaves, plan = jax.tree.leaves(params), self._plan(params, ranks)
        sums = self.config.sums
        parts = [
            traffic.wire_bytes(bucket.shape, ranks, sums, dtype="float32")
            for bucket in plan.buckets
        ]
        parts += [
            traffic.wire_bytes(
                leaves[i].shape, ranks, sums.exact(), dtype=leaves[i].dtype
            )
            for i in plan.exact
        ]
        total: dict[str, int] = {}
        for part in parts:
            for name, sent in part.items():
                total[name] = total.get(name, 0) + sent
        return total

    def _plan(self, tree: Any, ranks: int | None = None) -> GradientPlan:
        return plan_gradients(
            tree,
            axes.axis_names(self.axis_name),
            ranks=axes.axis_size(self.axis_name) if ranks is None else ranks,
            config=self.config,
            specs=self.specs,
        )

    def _residual(self, state, index: int, bucket: Bucket) -> Residual | None:
        if not self.config.sums.feedback:
            return None
        return Residual(
            send=no_leading_axis(state.send[index]),
            reduce=no_leading_axis(state.reduce[index]),
            layout=make_layout(bucket.shape, self.axis_name, self.config.sums),
        )

    def _all_finite(self, means: list[jax.Array], plan: GradientPlan) -> jax.Array:
        """Whether every mean is finite on every rank.

        Data ranks hold the same bits; ranks of the other axes have to be asked.
        """
        flags = [jnp.all(jnp.isfinite(mean)) for mean in means]
        finite = jnp.all(jnp.stack(self._vary(flags, plan, own=False)))
        if not plan.others:
            return finite
        return lax.pmin(finite.astype(jnp.int32), plan.others) > 0

    def _vary(self, tree, plan: GradientPlan, *, own: bool = True):
        """Types a tree as differing along the other axes, and along the data axis."""
        if not axes.is_tracked(self.axis_name):
            return tree
        names = axes.axis_names(self.axis_name) if own else ()
        vary = frozenset((*names, *plan.others))
        return jax.tree.map(lambda leaf: axes.to_varying(leaf, vary), tree)

    def _check(
        self, leaves: list, state: GradientSyncState, plan: GradientPlan
    ) -> None:
        """Refuses what would be averaged twice, and a state of something else."""
        for leaf in leaves:
            traffic.check_dtype(leaf.dtype)
        own = frozenset(axes.axis_names(self.axis_name))
        if axes.is_tracked(self.axis_name) and not all(
            own <= axes.varying_axes(leaf) for leaf in leaves
        ):
            raise ValueError(
                f"gradients have been summed over {sorted(map(str, own))} already, "
                "exactly and at full width: take them with respect to parameters that "
                "count as different on each data rank.\n"
                "  wrong:  jax.grad(loss)(params, batch)\n"
                "  right:  jax.grad(loss)(sync.per_rank(params), batch)"
            )
        needed = len(plan.buckets) if self.config.sums.feedback else 0
        if len(state.send) != needed:
            raise ValueError(
                f"the state has residuals of {len(state.send)} messages, these "
                f"gradients travel in {needed}: make it with init or create of the "
                "same GradientSync, from the parameters of these gradients."
            )


def _state_of(layout: jax.Array, residuals: list[Residual | None]) -> GradientSyncState:
    """One rank's part of a state."""
    owed = [residual for residual in residuals if residual is not None]
    return GradientSyncState(
        layout=layout,
        send=tuple(leading_axis(residual.send) for residual in owed),
        reduce=tuple(leading_axis(residual.reduce) for residual in owed),
    )
