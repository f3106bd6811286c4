"""How backends of attention fill the pages of a layer, as far as that is known.

Where it is known, pages move token by token, between blocks of any two sizes. Otherwise the bytes of a head in a page
move as they are, and both servers need blocks of one size and the same kind of pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ._kinds import Kind

__all__ = ["Fill", "fill_of"]

PAGES = dict.fromkeys(
    (
        *("FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION", "FLASHINFER"),
        *("MINIMAX_M3_SPARSE", "CUTLASS_MSA", "TRITON_MSA"),
    ),
    "pairs",
)
"""How backends fill pages with keys and values, where that is known; see `statelink_vllm._options.FILLS`. These split
the content of a page's row into its two halves (``kv_cache.split`` in their sources)."""

BY_TOKEN = "fp8_ds_mla"
"""vLLM's name of quantised latents whose every token has its scales beside it: 512 values, 16 bytes of scales, and 128
of rotary values (the table in ``vllm/v1/attention/backends/mla/flashmla_sparse.py``)."""


class Fill(NamedTuple):
    """How `statelink.state.fused_pages` describes the content of pages.

    Attributes:
        keys: Elements of the key of a token and head; 0 if the content is not keys and values, or is not taken apart.
        halves: Whether a page has all keys before all values.
        opaque: Whether a page is known only to the backend.
        format: What both servers must have alike.
    """

    keys: int = 0
    halves: bool = False
    opaque: bool = False
    format: str = ""


def fill_of(
    kind: Kind, specs: Sequence[Any], backends: Sequence[str], pages: Mapping[str, str], *, latent: bool
) -> Fill:
    """How the pages of layers are filled.

    Args:
        kind: What the layers have in common.
        specs: The specification of each layer.
        backends: The name of the backend of each layer.
        pages: What the operator says of backends.
        latent: Whether a token has one vector, and not a key and a value.
    """
    if latent:
        return _latents(kind, specs[0], backends)
    fills = sorted({{**PAGES, **pages}.get(name, name) for name in backends})
    content = "+".join(fills)
    keys = _keys(specs) if content in ("pairs", "halves") else 0
    return Fill(
        keys,
        halves=keys > 0 and content == "halves",
        opaque=not keys and content != "pairs",
        format=_format(specs[0], "" if keys else content),
    )


def _latents(kind: Kind, spec: Any, backends: Sequence[str]) -> Fill:
    # An index of bytes has its scales behind the keys of the whole page, and may be shuffled for the kernel that reads
    # it. So have the latents of DeepSeek V4.
    if kind.of_index and spec.dtype.itemsize == 1:
        return Fill(opaque=True, format=_format(spec, "+".join(sorted(set(backends)))))
    packed = spec.state_content_bytes is not None
    layout = str(spec.cache_dtype_str)
    if packed and (layout != BY_TOKEN or spec.model_version):
        return Fill(opaque=True, format=_format(spec, f"{spec.model_version} {layout}"))
    return Fill(format=_format(spec, f"latent {layout}" if packed else "latent"))


def _keys(specs: Sequence[Any]) -> int:
    """Elements of the key of a token and head, where the rest of its content is the value; else 0."""
    sizes = {(each.head_size, each.state_content_bytes, getattr(each.kv_quant_mode, "name", "NONE")) for each in specs}
    size, packed, quantised = sizes.pop()
    return int(size) if not sizes and packed is None and quantised == "NONE" else 0


def _format(spec: Any, content: str) -> str:
    quantised = getattr(spec.kv_quant_mode, "name", "NONE")
    return content if quantised == "NONE" else f"{content} {quantised}"
