"""Which tensor of a checkpoint each parameter of our decoder comes from, and how."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from jaxtyping import Int

from echo_jax.models.config import DecoderConfig
from echo_jax.models.placement import NOTHING, Placement
from echo_jax.models.sources import Source, dtype_of
from echo_jax.typing import Shape

Path = tuple[str, ...]  # of a parameter in the nested dict
Advance = Callable[[int], None]  # told the bytes that were read


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamLayout:
    """One parameter: its tensors' name and the order of rows and columns.

    ``places`` is an index map along the dimension that is cut (of one layer's kernel,
    in our orientation ``(in, out)``), None where nothing is padded or copied.
    """

    name: str  # of the tensor, with {layer} if there is one for each
    transposed: bool = False  # stored as (out, in)
    cut: int = 0  # the dimension of the index map
    places: Int[np.ndarray, "positions"] | None = None

    @property
    def is_stacked(self) -> bool:
        """Whether the parameter has a leading axis of layers."""
        return "{layer}" in self.name

    def tensor(self, layer: int) -> str:
        """Name of the tensor of one layer."""
        return self.name.format(layer=layer)

    def read(
        self, source: Source, shape: Shape, index: tuple[slice, ...], advance: Advance
    ) -> np.ndarray:
        """The piece ``index`` of the padded parameter of this global shape."""
        if not self.is_stacked:
            return self._read(source, self.name, shape, index, advance)
        layers = range(shape[0])[index[0]]
        return np.stack(
            [
                self._read(source, self.tensor(layer), shape[1:], index[1:], advance)
                for layer in layers
            ]
        )

    def _read(self, source, name, shape, index, advance) -> np.ndarray:
        def stored(index: Sequence[slice]) -> np.ndarray:
            order = -1 if self.transposed else 1
            piece = source.read(name, index[::order])
            return piece.T if self.transposed else piece

        spans = [slice(*part.indices(n)) for part, n in zip(index, shape, strict=True)]
        if self.places is None:
            piece = stored(spans)
        else:
            piece = self._gather(stored, dtype_of(source, name), spans)
        advance(piece.nbytes)
        return piece

    def _gather(self, stored, dtype: np.dtype, spans: list[slice]) -> np.ndarray:
        """The runs of neighbours that the index map names, zeros for padding."""
        assert self.places is not None
        wanted = self.places[spans[self.cut]]
        pieces = []
        for start, stop, is_padding in _runs(wanted):
            span = spans.copy()
            span[self.cut] = slice(start, stop)
            if is_padding:
                shape = [part.stop - part.start for part in span]
                pieces.append(np.zeros(shape, dtype))
            else:
                pieces.append(stored(span))
        return np.concatenate(pieces, axis=self.cut)

    def write(self, param: np.ndarray) -> np.ndarray:
        """One layer's parameter without padding and copies, as it is stored."""
        if self.places is not None:
            real = np.flatnonzero(self.places != NOTHING)
            _, first = np.unique(self.places[real], return_index=True)
            param = np.take(param, real[first], axis=self.cut)
        return np.ascontiguousarray(param.T if self.transposed else param)


def _runs(wanted: Int[np.ndarray, "positions"]) -> Iterator[tuple[int, int, bool]]:
    """``(start, stop, is_padding)`` of maximal runs of neighbours, or of padding."""
    breaks = (np.diff(wanted) != 1) & ~(
        (wanted[1:] == NOTHING) & (np.diff(wanted) == 0)
    )
    for part in np.split(wanted, np.flatnonzero(breaks) + 1):
        padding = bool(part[0] == NOTHING)
        start = 0 if padding else int(part[0])
        yield start, start + len(part), padding


def param_layouts(placement: Placement) -> dict[Path, ParamLayout]:
    """The layout of every parameter of the padded decoder."""
    config = placement.config
    query = placement.features(placement.query_heads())
    kv = placement.features(placement.kv_heads())
    mlp, tokens = placement.mlp_features(), placement.tokens()

    def kernel(name: str, *, cut: int, places) -> ParamLayout:
        name = f"model.layers.{{layer}}.{name}.weight"
        return ParamLayout(name=name, transposed=True, cut=cut, places=places)

    def scale(name: str) -> ParamLayout:
        return ParamLayout(name=f"model.layers.{{layer}}.{name}.weight")

    layouts: dict[Path, ParamLayout] = {
        ("embed", "embedding"): ParamLayout(
            name="model.embed_tokens.weight", places=tokens
        ),
        ("layers", "attention_norm", "scale"): scale("input_layernorm"),
        ("layers", "attention", "query", "kernel"): kernel(
            "self_attn.q_proj", cut=1, places=query
        ),
        ("layers", "attention", "key", "kernel"): kernel(
            "self_attn.k_proj", cut=1, places=kv
        ),
        ("layers", "attention", "value", "kernel"): kernel(
            "self_attn.v_proj", cut=1, places=kv
        ),
        ("layers", "attention", "out", "kernel"): kernel(
            "self_attn.o_proj", cut=0, places=query
        ),
        ("layers", "mlp_norm", "scale"): scale("post_attention_layernorm"),
        ("layers", "mlp", "gate", "kernel"): kernel("mlp.gate_proj", cut=1, places=mlp),
        ("layers", "mlp", "up", "kernel"): kernel("mlp.up_proj", cut=1, places=mlp),
        ("layers", "mlp", "down", "kernel"): kernel("mlp.down_proj", cut=0, places=mlp),
        ("final_norm", "scale"): ParamLayout(name="model.norm.weight"),
    }
    if config.qk_norm:
        layouts["layers", "attention", "query_norm", "scale"] = scale(
            "self_attn.q_norm"
        )
        layouts["layers", "attention", "key_norm", "scale"] = scale("self_attn.k_norm")
    if not config.tied_embeddings:
        layouts["readout", "kernel"] = ParamLayout(
            name="lm_head.weight", transposed=True, cut=1, places=tokens
        )
    return layouts


def tensor_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Shape of every tensor that a checkpoint of this decoder must have."""
    width, dim = config.width, config.head_dim
    heads, kv_heads = config.num_heads * dim, config.num_kv_heads * dim
    layer: dict[str, Shape] = {
        "input_layernorm": (width,),
        "self_attn.q_proj": (heads, width),
        "self_attn.k_proj": (kv_heads, width),
        "self_attn.v_proj": (kv_heads, width),
        "self_attn.o_proj": (width, heads),
        "post_attention_layernorm": (width,),
        "mlp.gate_proj": (config.mlp_width, width),
        "mlp.up_proj": (config.mlp_width, width),
        "mlp.down_proj": (width, config.mlp_width),
    }
    if config.qk_norm:
        layer |= {"self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,)}
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, width),
        "model.norm.weight": (width,),
    }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, width)
    for index in range(config.num_layers):
        shapes |= {
            f"model.layers.{index}.{name}.weight": shape
            for name, shape in layer.items()
        }
    return shapes
