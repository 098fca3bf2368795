"""Checkpoints straight onto a tensor-parallel mesh."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from echo_jax.layers.attention_kernel import AttentionChoice
from echo_jax.layers.partitioning import (
    Params,
    Specs,
    merge_module,
    simulate_ranks,
    split_module,
)
from echo_jax.models.checkpoint import Checkpoint, read_config
from echo_jax.models.config import DecoderConfig
from echo_jax.models.copies import CopiedHeadsDecoder
from echo_jax.models.decoder import Decoder
from echo_jax.models.gguf import GgufFile
from echo_jax.models.layout import param_layouts, tensor_shapes
from echo_jax.models.placement import Placement, fit_to_ranks
from echo_jax.models.sources import SafetensorsFolder, Source, dtype_of
from echo_jax.plan import DepthPlan

Progress = Callable[[int, int], None]  # bytes read, bytes in all


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LoadedModel:
    """A decoder with parameters that lie on a mesh."""

    checkpoint: Checkpoint  # as the checkpoint has it, dtypes as they were asked for
    placement: Placement  # sizes as they lie on the mesh
    graphdef: nnx.GraphDef
    params: Params  # sharded over the tensor axis
    specs: Specs
    mesh: Mesh
    axis_name: str = "tensor"
    path: pathlib.Path | None = None  # where it came from
    simulated: int | None = None  # ranks that one device plays; the mesh has one then
    # Compiled functions by what they were made for; filled as they are needed.
    programs: dict[Any, Callable] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def config(self) -> DecoderConfig:
        """The decoder, unpadded."""
        return self.checkpoint.decoder

    @property
    def ranks(self) -> int:
        """Size of the tensor-parallel axis."""
        return self.simulated or self.mesh.shape[self.axis_name]

    def on_ranks(self, function: Callable, in_specs, out_specs) -> Callable:
        """``(params, *args)`` around ``function(decoder, *args)`` of one rank."""

        def local(params, *args):
            return function(merge_module(self.graphdef, params), *args)

        specs = {"in_specs": (self.specs, *in_specs), "out_specs": out_specs}
        if self.simulated is not None:
            ranks, axis_name = self.simulated, self.axis_name
            return simulate_ranks(local, ranks=ranks, axis_name=axis_name, **specs)
        return jax.shard_map(local, mesh=self.mesh, **specs)

    def logits(
        self, tokens: Int[Array | np.ndarray, "batch length"], *, plan: DepthPlan
    ) -> Float[Array, "batch length vocab"]:
        """Logits after every token, sharded by vocabulary over the mesh.

        Args:
          tokens: token ids.
          plan: the configurations of the all-reduces.
        """
        if ("logits", plan) not in self.programs:
            forward = self.on_ranks(
                lambda decoder, tokens: decoder(tokens, plan=plan)[0],
                (PartitionSpec(),),
                PartitionSpec(None, None, self.axis_name),
            )
            self.programs["logits", plan] = jax.jit(forward)
        logits = self.programs["logits", plan](self.params, jnp.asarray(tokens))
        return logits[..., : self.config.vocab_size]


def load(
    path: str | os.PathLike,
    mesh: Mesh,
    *,
    axis_name: str = "tensor",
    dtype: str | None = None,
    attention: AttentionChoice = "auto",
    simulate: int | None = None,
    trainable: bool = False,
    progress: Progress | None = None,
) -> LoadedModel:
    """Reads a Llama or Qwen3 checkpoint onto a tensor-parallel mesh.

    Each device is handed its own part of each parameter, read from the file for it; no
    device and no host array ever holds the model. Heads, hidden features and the
    vocabulary are padded where the axis does not divide them
    (:func:`~echo_jax.models.placement.fit_to_ranks`): the padding computes nothing and
    changes no result. Key-value heads that the axis does not divide may stand in
    several copies, which training would drive apart: gradients of such a model's
    attention are refused, unless it is loaded with ``trainable``.

    Sharding: heads, hidden features and vocabulary are sharded over ``axis_name`` and
    everything is replicated over the mesh's other axes.

    Args:
      path: a folder with ``config.json`` and safetensors as Hugging Face writes it, or
        a GGUF file, or a folder with one.
      mesh: has the axis; others may be there too.
      axis_name: the tensor-parallel axis.
      dtype: of parameters and computation; None for the checkpoint's own (bfloat16 for
        a quantized GGUF file).
      attention: what computes it: XLA's operations, cuDNN's flash attention, or the
        latter where it can run (:class:`~echo_jax.layers.Attention`).
      simulate: ranks that one device plays by ``vmap``, to measure what quality costs
        where there are no more; the mesh's axis must have size 1.
      trainable: pad rather than copy key-value heads. Ranks without a head of their
        own then idle in attention; parameters and gradients are those of the model.
      progress: called with the bytes read and the bytes in all.

    Returns:
      The model, ready for :func:`~echo_jax.models.generate`.

    Raises:
      ValueError: if the path, a file, the architecture, a tensor or the axis is not
        what it should be, saying which.

    Example:
        >>> mesh = jax.make_mesh((4,), ("tensor",))
        >>> model = load("checkpoints/Qwen3-0.6B", mesh)
        >>> logits = model.logits(tokens, plan=DepthPlan.edges())
    """
    path = pathlib.Path(path)
    if axis_name not in mesh.shape:
        raise ValueError(
            f"axis_name={axis_name!r} is no axis of the mesh, which has "
            f"{tuple(mesh.shape)}: name one of them."
        )
    if simulate is not None and mesh.shape[axis_name] != 1:
        raise ValueError(
            f"simulate={simulate} is for one device, axis {axis_name!r} has "
            f"{mesh.shape[axis_name]}: use a mesh of one, or leave simulate out."
        )
    source, checkpoint = _open(path)
    checkpoint = _computed_in(checkpoint, dtype, attention)
    _check_tensors(source, checkpoint.decoder, path)
    ranks = mesh.shape[axis_name] if simulate is None else simulate
    placement = fit_to_ranks(checkpoint.decoder, ranks, allow_copies=not trainable)
    graphdef, shapes, specs = _abstract(placement, axis_name)
    params = _read_params(source, placement, shapes, specs, mesh, progress)
    return LoadedModel(
        checkpoint=checkpoint,
        placement=placement,
        graphdef=graphdef,
        params=params,
        specs=specs,
        mesh=mesh,
        axis_name=axis_name,
        path=path,
        simulated=simulate,
    )


def read_checkpoint(path: str | os.PathLike) -> Checkpoint:
    """What a checkpoint says of itself; no weights are read.

    Args:
      path: as for :func:`load`.

    Raises:
      ValueError: if it is no checkpoint, or one of another architecture.
    """
    return _open(pathlib.Path(path))[1]


def find_gguf(path: pathlib.Path) -> pathlib.Path | None:
    """The GGUF file that a path means, if it means one.

    Raises:
      ValueError: if nothing is there, or a folder holds neither ``config.json`` nor
        exactly one GGUF file.
    """
    if not path.exists():
        raise ValueError(
            f"{path} does not exist: give a folder with config.json and safetensors, "
            "or a GGUF file."
        )
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(
                f"{path} is neither a folder nor a .gguf file: give the folder that "
                "holds config.json."
            )
        return path
    if (path / "config.json").exists():
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return found[0]
    raise ValueError(
        f"{path} holds no config.json and {len(found)} GGUF files: give a folder as "
        "Hugging Face writes it, or the path of one GGUF file."
    )


def _open(path: pathlib.Path) -> tuple[Source, Checkpoint]:
    file = find_gguf(path)
    if file is not None:
        source = GgufFile(file)
        return source, source.checkpoint()
    # The configuration first: what is no model of ours needs no look at its weights.
    checkpoint = read_config(path)
    return SafetensorsFolder(path), checkpoint


def _computed_in(
    checkpoint: Checkpoint, dtype: str | None, attention: AttentionChoice
) -> Checkpoint:
    changes: dict[str, Any] = {"attention": attention}
    if dtype is not None:
        try:
            name = jnp.dtype(dtype).name
        except TypeError:  # left as it is, for DecoderConfig to refuse
            name = dtype
        changes |= {"dtype": name, "param_dtype": name}
    decoder = dataclasses.replace(checkpoint.decoder, **changes)
    return dataclasses.replace(checkpoint, decoder=decoder)


def _check_tensors(source: Source, config: DecoderConfig, path: pathlib.Path) -> None:
    """Refuses a checkpoint without a tensor, or with one of another shape."""
    for name, shape in tensor_shapes(config).items():
        if name not in source:
            raise ValueError(
                f"{path} lacks tensor {name}: the checkpoint is not whole."
            )
        if source.shape(name) != shape:
            raise ValueError(
                f"{path}: tensor {name} has shape {source.shape(name)}, the "
                f"configuration asks for {shape}."
            )


def _abstract(placement: Placement, axis_name: str):
    """Structure, shapes and specs of a decoder that is not built."""
    kind = Decoder if placement.copies == 1 else CopiedHeadsDecoder

    def build():
        return kind(placement.padded, axis_name=axis_name, rngs=nnx.Rngs(0))

    return split_module(jax.eval_shape(build))


def _read_params(
    source: Source,
    placement: Placement,
    shapes: Params,
    specs: Specs,
    mesh: Mesh,
    progress: Progress | None,
) -> Params:
    """Every parameter, each device's part read for it."""
    layouts, done = param_layouts(placement), 0
    total = sum(_stored_bytes(source, placement.config))

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(min(done, total), total)

    def place(key_path, shape, spec):
        layout = layouts[tuple(key.key for key in key_path)]

        # Replicas share a piece, whatever their order in the mesh. All pieces of this
        # process are held until they are on their devices anyway.
        @functools.cache
        def piece(*bounds):
            index = tuple(slice(*pair) for pair in bounds)
            return layout.read(source, shape.shape, index, advance).astype(shape.dtype)

        def callback(index):
            spans = (
                part.indices(n)[:2] for part, n in zip(index, shape.shape, strict=True)
            )
            return piece(*spans)

        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(shape.shape, sharding, callback)

    params = jax.tree_util.tree_map_with_path(place, shapes, specs)
    if progress is not None:
        progress(total, total)
    return params


def _stored_bytes(source: Source, config: DecoderConfig) -> Iterator[int]:
    """Bytes of each tensor as it is read."""
    for name, shape in tensor_shapes(config).items():
        yield int(np.prod(shape)) * dtype_of(source, name).itemsize
