"""What a model keeps for a request: its geometry as data, and the presets of this package."""

from __future__ import annotations

import importlib.resources
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from statelink.config import read_options
from statelink.errors import ConfigError
from statelink.hints import did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

__all__ = ["SIZES", "Dtype", "Kind", "Model", "parse_toml", "preset", "presets"]

Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]
Kind = Literal["full", "window", "mamba", "compressed"]
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
    """Latents of MLA, in pages, and the index keys of sparse attention in the same pages.

    Attributes:
        width: Elements of a latent, with its rotary part.
        index_width: Elements of an index key; 0 for no index.
        index_dtype: Element type of an index key.
        index_scale: Bytes of scale that follow a page's index keys, per token.
    """

    width: Count
    index_width: Annotated[int, msgspec.Meta(ge=0)] = 0
    index_dtype: Dtype = "bfloat16"
    index_scale: Annotated[int, msgspec.Meta(ge=0)] = 0


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """Keys and values of sliding-window attention, in a page pool of their own.

    Attributes:
        heads: KV heads of the whole model.
        dim: Elements of a key, and of a value.
        tokens: Number of tokens that the layers look back.
    """

    heads: Count
    dim: Count
    tokens: Count


class Mamba(msgspec.Struct, frozen=True, kw_only=True):
    """Convolution and recurrent state, one slot for each request.

    Attributes:
        conv: ``[channels, heads]`` of each block of the convolution that is sharded on its own.
        kernel: Taps of the convolution. Its state has one less.
        state: Shape of the recurrent state, heads first; empty for none.
    """

    conv: Annotated[tuple[tuple[Count, Count], ...], msgspec.Meta(min_length=1)]
    kernel: Annotated[int, msgspec.Meta(ge=2)]
    state: tuple[Count, ...] = ()


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
        pattern: Kind of each layer, repeated until all layers have one.
        page: Tokens of a page, unless a layout says otherwise.
        source: The source of the numbers.
        note: A remark about them.
        attention: For layers of kind ``full``.
        latent: For layers of kind ``full``, instead of ``attention``.
        window: For layers of kind ``window``.
        mamba: For layers of kind ``mamba``.
        compressed: For layers of kind ``compressed``.
    """

    name: str
    layers: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    pattern: Annotated[tuple[Kind, ...], msgspec.Meta(min_length=1)] = ("full",)
    page: Count = 64
    source: str = ""
    note: str = ""
    attention: Attention | None = None
    latent: Latent | None = None
    window: Window | None = None
    mamba: Mamba | None = None
    compressed: Compressed | None = None

    def __post_init__(self) -> None:
        sections: dict[Kind, dict[str, object]] = {
            "full": {"attention": self.attention, "latent": self.latent},
            "window": {"window": self.window},
            "mamba": {"mamba": self.mamba},
            "compressed": {"compressed": self.compressed},
        }
        for kind, each in sections.items():
            given = [name for name, section in each.items() if section is not None]
            if len(given) != (kind in self.pattern):
                raise ConfigError(
                    f"model {self.name!r} has {'' if kind in self.pattern else 'no '}layers of kind {kind!r}",
                    cause=f"it has {' and '.join(map(repr, given)) or 'no section'} for them",
                    hint=f"a kind that is in 'pattern', and no other, has one section: {' or '.join(map(repr, each))}",
                )
        if self.compressed is not None and len(self.compressed.ratios) != self.layers:
            raise ConfigError(
                f"model {self.name!r} needs a compression ratio for each layer",
                cause=f"it has {self.layers} layers and {len(self.compressed.ratios)} ratios",
            )

    def kind(self, layer: int) -> Kind:
        """The kind of a layer."""
        return self.pattern[layer % len(self.pattern)]

    @classmethod
    def read(cls, given: Mapping[str, Any], what: str) -> Model:
        """Read a model from a mapping, as in a TOML file.

        Raises:
            ConfigError: A key is unknown or missing, a value is of the wrong type, or a section is missing.
        """
        whole = dict(given)
        for name, section in _SECTIONS.items():
            if name in whole:
                whole[name] = read_options(section, whole[name], f"section {name!r} of the {what}")
        model: Model = read_options(cls, whole, what)
        return model


_SECTIONS = {
    "attention": Attention,
    "latent": Latent,
    "window": Window,
    "mamba": Mamba,
    "compressed": Compressed,
}
_FOLDER = importlib.resources.files(__package__).joinpath("presets")


def presets() -> tuple[str, ...]:
    """Names of the presets, in order."""
    files = _FOLDER.iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))


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
    text = _FOLDER.joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return Model.read(parse_toml(text), f"preset {name!r}")


def parse_toml(text: str) -> dict[str, Any]:
    """Read TOML as a mapping.

    Raises:
        ConfigError: The text is no TOML.
    """
    try:
        return dict(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("not TOML", cause=str(error)) from error
