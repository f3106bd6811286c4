"""What a model keeps for a request: its geometry as data. The presets are tables of it, in `presets.toml`."""

from __future__ import annotations

import functools
import importlib.resources
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

import msgspec

from statelink.config import read_options
from statelink.errors import ConfigError
from statelink.hints import did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

__all__ = [
    "SIZES",
    "Attention",
    "Chunk",
    "Compressed",
    "Dtype",
    "Index",
    "Kind",
    "Latent",
    "Mamba",
    "Model",
    "Window",
    "parse_toml",
    "preset",
    "presets",
]

Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]
Kind = Literal["full", "window", "chunk", "mamba", "index", "compressed"]
Dtype = Literal["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "uint8"]
SIZES: dict[str, int] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
}
"""Bytes of an element."""


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """Keys and values of full attention, in pages.

    Attributes:
        heads: KV heads of the whole model.
        dim: Elements of a key.
        value_dim: Elements of a value; by default those of a key.
    """

    heads: Count
    dim: Count
    value_dim: Count | None = None


class Latent(msgspec.Struct, frozen=True, kw_only=True):
    """Latents of MLA, in pages.

    Attributes:
        width: Elements of a latent, with its rotary part: ``kv_lora_rank + qk_rope_head_dim``.
    """

    width: Count


class Window(Attention, frozen=True, kw_only=True):
    """Keys and values of sliding-window attention, in a page pool of their own.

    Attributes:
        tokens: Number of tokens that the layers look back.
    """

    tokens: Count


class Chunk(Attention, frozen=True, kw_only=True):
    """Keys and values of chunked local attention, in a page pool of their own.

    Attributes:
        tokens: Tokens of an attention chunk. A token attends to its own chunk only.
    """

    tokens: Annotated[int, msgspec.Meta(ge=2, le=1 << 32)]


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """Index keys of sparse attention, in the pages of full attention.

    Attributes:
        width: Elements of an index key.
        dtype: Its element type; by default that of keys and values.
        scale: Bytes of scale that follow a page's index keys, per token.
        type: State type: ``dsa``, or ``minimax_index_k``.
    """

    width: Count
    dtype: Dtype | None = None
    scale: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)] = 0
    type: str = "dsa"


class Mamba(msgspec.Struct, frozen=True, kw_only=True):
    """Convolution and recurrent state, one slot for each request.

    Attributes:
        conv: ``[channels, heads]`` of each block of the convolution that is sharded on its own; empty for no
            convolution.
        kernel: Taps of the convolution. Its state has one less.
        state: Shape of the recurrent state, heads first; empty for none.
    """

    conv: tuple[tuple[Count, Count], ...] = ()
    kernel: Annotated[int, msgspec.Meta(ge=2, le=1 << 16)] | None = None
    state: tuple[Count, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.conv) != (self.kernel is not None):
            raise ConfigError(
                "'conv' and 'kernel' belong together", cause=f"'{'conv' if self.conv else 'kernel'}' stands alone"
            )
        if not self.conv and not self.state:
            raise ConfigError("a recurrent layer keeps something", cause="it has neither 'conv' nor 'state'")


class Compressed(msgspec.Struct, frozen=True, kw_only=True):
    """Sliding window and compressed keys and values of DeepSeek-V4, one shared head.

    Attributes:
        ratios: For each layer, tokens of one compressed row: 4 (with an index), 128, or 0 for none.
        width: Elements of a row.
        index_width: Elements of a row of the index.
        window: Number of tokens that every layer looks back.
    """

    ratios: tuple[Literal[0, 4, 128], ...]
    width: Count
    index_width: Count
    window: Count


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """What a model keeps for a request.

    Attributes:
        name: Its identity. Both sides must have the same.
        layers: Number of layers.
        pattern: What each layer keeps, repeated until all layers have an entry: a kind, or a list of kinds. An empty
            list is a layer that keeps nothing.
        page: Tokens of a page, unless a layout says otherwise.
        dtype: Element type of keys, values and latents, unless a layout says otherwise.
        conv_dtype: The same for convolution states.
        state_dtype: The same for recurrent and compressor states.
        source: The source of the numbers.
        note: A remark about them.
        attention: For layers of kind ``full``.
        latent: For layers of kind ``full``, instead of ``attention``.
        window: For layers of kind ``window``.
        chunk: For layers of kind ``chunk``.
        index: For layers of kind ``index``.
        mamba: For layers of kind ``mamba``.
        compressed: For layers of kind ``compressed``.
    """

    name: str
    layers: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    pattern: Annotated[tuple[Kind | tuple[Kind, ...], ...], msgspec.Meta(min_length=1, max_length=4096)] = ("full",)
    page: Count = 64
    dtype: Dtype = "bfloat16"
    conv_dtype: Dtype = "bfloat16"
    state_dtype: Dtype = "float32"
    source: str = ""
    note: str = ""
    attention: Attention | None = None
    latent: Latent | None = None
    window: Window | None = None
    chunk: Chunk | None = None
    index: Index | None = None
    mamba: Mamba | None = None
    compressed: Compressed | None = None

    def __post_init__(self) -> None:
        used = {kind for layer in range(self.layers) for kind in self.kinds(layer)}
        for kind in get_args(Kind):
            sections = [name for name, (serves, _) in _SECTIONS.items() if serves == kind]
            given = [name for name in sections if getattr(self, name) is not None]
            if len(given) != (kind in used):
                raise ConfigError(
                    f"model {self.name!r} has {'' if kind in used else 'no '}layers of kind {kind!r}",
                    cause=f"it has {' and '.join(map(repr, given)) or 'no section'} for them",
                    hint="a kind that a layer in 'pattern' has, and no other, has one section: "
                    + " or ".join(map(repr, sections)),
                )
        if not used:
            raise ConfigError(f"model {self.name!r} keeps nothing", cause="no layer in 'pattern' has a kind")
        for entry in self.pattern:
            if len(set(kinds := _listed(entry))) != len(kinds):
                raise ConfigError(f"model {self.name!r} names a kind of a layer twice", cause=f"{list(kinds)}")
        if self.compressed is not None and len(self.compressed.ratios) != self.layers:
            raise ConfigError(
                f"model {self.name!r} needs a compression ratio for each layer",
                cause=f"it has {self.layers} layers and {len(self.compressed.ratios)} ratios",
            )

    def kinds(self, layer: int) -> tuple[Kind, ...]:
        """What a layer keeps; empty for nothing."""
        return _listed(self.pattern[layer % len(self.pattern)])

    @classmethod
    def read(cls, given: Mapping[str, Any], what: str) -> Model:
        """Read a model from a mapping, as in a TOML file.

        Raises:
            ConfigError: A key is unknown or missing, a value is of the wrong type, or a section is missing.
        """
        whole = dict(given)
        for name, (_, section) in _SECTIONS.items():
            if name in whole:
                whole[name] = read_options(section, whole[name], f"section {name!r} of the {what}")
        model: Model = read_options(cls, whole, what)
        return model


def _listed(entry: Kind | tuple[Kind, ...]) -> tuple[Kind, ...]:
    return (entry,) if isinstance(entry, str) else entry


_SECTIONS: dict[str, tuple[Kind, type]] = {
    "attention": ("full", Attention),
    "latent": ("full", Latent),
    "window": ("window", Window),
    "chunk": ("chunk", Chunk),
    "index": ("index", Index),
    "mamba": ("mamba", Mamba),
    "compressed": ("compressed", Compressed),
}
"""For each section: the kind of layers that it describes, and its fields."""


def presets() -> tuple[str, ...]:
    """Names of the presets, in order."""
    return tuple(sorted(_tables()))


def preset(name: str) -> Model:
    """The preset called ``name``.

    Raises:
        ConfigError: There is none.
    """
    known = presets()
    if name not in known:
        raise ConfigError(
            f"no preset named {name!r}",
            cause=f"known presets: {', '.join(known)}",
            hint=did_you_mean(name, known, "give the model's geometry in a section 'model'"),
        )
    return Model.read({"name": name, **_tables()[name]}, f"preset {name!r}")


@functools.cache
def _tables() -> dict[str, Any]:
    return parse_toml(importlib.resources.files(__package__).joinpath("presets.toml").read_text(encoding="utf-8"))


def parse_toml(text: str) -> dict[str, Any]:
    """Read TOML as a mapping.

    Raises:
        ConfigError: The text is no TOML.
    """
    try:
        return dict(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("not TOML", cause=str(error)) from error
