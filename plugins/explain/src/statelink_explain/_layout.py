"""How one side spreads a model over ranks, and its layout in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from statelink.config import read_options
from statelink.errors import ConfigError

from ._config import read_config
from ._model import Count, Dtype, Model, parse_toml, preset

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Layout", "Side", "read_side"]

Size = Annotated[int, msgspec.Meta(ge=1, le=1024)]


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Parallel and memory layout of one instance.

    Ranks are numbered with tensor parallelism innermost, then context, then pipeline parallelism.

    Attributes:
        tp: Width of tensor parallelism.
        pp: Pipeline stages.
        stages: Layers of each stage. By default, all stages have the same number, and if that is not possible, the
            first ones have one layer more.
        cp: Context-parallel ranks, each with a consecutive part of a request's full-attention pages (prefill).
        dcp: Ranks of a tensor-parallel group over which full-attention tokens are dealt out (decode).
        dcp_block: Consecutive tokens that are dealt out together.
        page: Tokens of a page; by default that of the model.
        window_page: Tokens of a page of the pools of windows and of attention chunks; by default ``page``.
        order: ``nhd`` or ``hnd``: whether tokens or heads are outermost in a page.
        dtype: Element type of keys, values and latents; by default that of the model.
        conv_dtype: Element type of convolution states; by default that of the model.
        state_dtype: Element type of recurrent and compressor states; by default that of the model.
        transposed: Whether convolution states have their channels last.
        pool_tokens: Tokens that each page pool holds.
        slots: Requests that each pool of per-request state holds.
        c4_ring: Rows of a ratio-4 compressor's ring; twice as many with speculation.
        c128_ring: Rows of a ratio-128 compressor's ring, a multiple of 128.
        aux_bytes: Bytes of a request's metadata row; none when 0.
    """

    tp: Size = 1
    pp: Size = 1
    stages: tuple[Count, ...] = ()
    cp: Size = 1
    dcp: Size = 1
    dcp_block: Count = 1
    page: Count | None = None
    window_page: Count | None = None
    order: Literal["nhd", "hnd"] = "nhd"
    dtype: Dtype | None = None
    conv_dtype: Dtype | None = None
    state_dtype: Dtype | None = None
    transposed: bool = False
    pool_tokens: Count = 1 << 21
    slots: Count = 64
    c4_ring: Count = 8
    c128_ring: Count = 128
    aux_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 30)] = 0

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.pp * self.cp * self.tp


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One instance of a model.

    Attributes:
        model: The model.
        layout: Its layout.
        instance: Its name.
        file: Name of the file that describes it; empty for none.
    """

    model: Model
    layout: Layout = Layout()
    instance: str = "instance"
    file: str = ""

    def __post_init__(self) -> None:
        model, layout = self.model, self.layout
        if layout.stages and (len(layout.stages) != layout.pp or sum(layout.stages) != model.layers):
            raise ConfigError(
                f"{len(layout.stages)} stages of {sum(layout.stages)} layers together",
                cause=f"pp is {layout.pp}, and {model.name!r} has {model.layers} layers",
            )
        if layout.pp > model.layers:
            raise ConfigError(f"pp is {layout.pp}", cause=f"{model.name!r} has {model.layers} layers")
        if layout.cp > 1 and layout.dcp > 1:
            raise ConfigError("a side has 'cp' or 'dcp'", cause=f"cp is {layout.cp}, dcp is {layout.dcp}")
        heads = model.attention.heads if model.attention else 1
        # Ranks that share tokens hold the same heads.
        alike = max(1, layout.tp // heads)
        if alike % layout.dcp:
            raise ConfigError(
                f"dcp is {layout.dcp}",
                cause=f"tp is {layout.tp}, and {alike} ranks hold each of {heads} KV heads",
                hint="dcp divides the number of ranks that hold the same head",
            )
        if model.compressed is not None and (self.page % 128 or layout.c4_ring % 4 or layout.c128_ring % 128):
            raise ConfigError(
                "a page and 'c128_ring' are multiples of 128, 'c4_ring' is one of 4",
                cause=f"page is {self.page}, c128_ring {layout.c128_ring}, c4_ring {layout.c4_ring}",
            )
        if layout.pool_tokens < max(self.page, self.window_page):
            raise ConfigError("a pool holds a page at least", cause=f"pool_tokens is {layout.pool_tokens}")

    @property
    def page(self) -> int:
        """Tokens of a page."""
        return self.layout.page or self.model.page

    @property
    def window_page(self) -> int:
        """Tokens of a page of the pools of windows and of attention chunks."""
        return self.layout.window_page or self.page

    @property
    def dtype(self) -> Dtype:
        """Element type of keys, values and latents."""
        return self.layout.dtype or self.model.dtype

    @property
    def conv_dtype(self) -> Dtype:
        """Element type of convolution states."""
        return self.layout.conv_dtype or self.model.conv_dtype

    @property
    def state_dtype(self) -> Dtype:
        """Element type of recurrent and compressor states."""
        return self.layout.state_dtype or self.model.state_dtype

    def stage(self, index: int) -> range:
        """The layers of a pipeline stage."""
        layout, layers = self.layout, self.model.layers
        sizes = layout.stages or [layers // layout.pp + (n < layers % layout.pp) for n in range(layout.pp)]
        first = sum(sizes[:index])
        return range(first, first + sizes[index])


class _File(msgspec.Struct, frozen=True, kw_only=True):
    preset: str | None = None
    config: str | None = None
    model: dict[str, Any] | None = None
    layout: dict[str, Any] = {}
    instance: str | None = None


def read_side(path: Path, instance: str) -> Side:
    """One side from a file.

    A TOML file names its model by ``preset = "name"``, by ``config = "path"`` of a ``config.json`` or of a folder with
    one, relative to the file, or by a section ``model``. It may have a section ``layout``. A ``config.json``, or a
    folder with one, is a side of one rank with the default layout.

    Args:
        path: The file, or a model's folder.
        instance: Name of the instance, if the file has none.

    Raises:
        ConfigError: A key is unknown or missing, a value is of the wrong type, a layout contradicts itself, or a
            ``config.json`` has something that is not understood.
    """
    try:
        return _read(path, instance)
    except ConfigError as error:
        reason = error.reason
        raise ConfigError(
            reason.what, cause=reason.cause, hint=reason.hint, code=reason.code, **reason.who, file=path.name
        ) from error


def _read(path: Path, instance: str) -> Side:
    if path.is_dir() or path.suffix == ".json":
        return Side(model=read_config(path), instance=instance, file=path.name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("a file cannot be read", cause=str(error)) from error
    file: _File = read_options(_File, parse_toml(text), "file")
    given = [name for name in ("preset", "config", "model") if getattr(file, name) is not None]
    if len(given) != 1:
        raise ConfigError(
            "a side names its model once",
            cause=f"it has {' and '.join(map(repr, given))}"
            if given
            else "it has no 'preset', no 'config' and no 'model'",
            hint='preset = "..." for a published model (`statelink explain --presets`), config = "..." for its '
            "config.json, or its geometry in [model]",
        )
    if file.preset is not None:
        model = preset(file.preset)
    elif file.config is not None:
        model = read_config(path.parent / file.config)
    else:
        model = Model.read(file.model or {}, "model")
    layout: Layout = read_options(Layout, file.layout, "layout")
    if layout.stages and layout.pp == 1:
        layout = msgspec.structs.replace(layout, pp=len(layout.stages))
    return Side(model=model, layout=layout, instance=file.instance or instance, file=path.name)
