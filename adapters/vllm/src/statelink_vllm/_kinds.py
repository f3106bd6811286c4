"""Tells the kinds of layers in one of vLLM's groups apart.

A group has one block table. vLLM puts layers of several kinds into it, if they need the same blocks: the keys of a
sparse index beside the latents, a compressor's rows beside the windows, a draft model's layers beside the model's. Each
kind is a component. Its name follows from the layers alone, so that every stage of a pipeline and the other server have
the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence
    from fractions import Fraction

__all__ = ["ATTENTION", "LATENT", "RECURRENT", "Kind", "kind_of", "numbers_of"]

ATTENTION = ("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")
LATENT = ("MLAAttentionSpec", "SlidingWindowMLASpec")
RECURRENT = ("MambaSpec",)


class Kind(NamedTuple):
    """What the layers of a component have in common.

    Attributes:
        type: Their state type.
        ratio: Tokens that one row of a page stands for.
        of_index: Whether they belong to the index of sparse attention.
        draft: Whether a draft model has them.
    """

    type: str
    ratio: int | Fraction = 1
    of_index: bool = False
    draft: bool = False

    def name(self, number: int | None) -> str:
        """The name of the component; ``number`` tells groups of one type apart, if there are several."""
        parts = [self.type]
        if number is not None:
            parts.append(str(number))
        if self.ratio != 1:
            parts.append(f"c{self.ratio}")
        if self.of_index and self.type != "dsa":
            parts.append("index")
        return ".".join(["draft", *parts] if self.draft else parts)


def kind_of(name: str, spec: Any, *, draft: bool) -> Kind:
    """The kind of a layer.

    Args:
        name: vLLM's name of the layer.
        spec: Its specification.
        draft: Whether a draft model has it.
    """
    # vLLM says so in the specification of some models, and only in the name of the layer for DeepSeek V4.
    role = getattr(spec, "cache_role", None)
    index = getattr(role, "name", "") == "INDEXER" or "indexer" in name.split(".")
    kind, ratio = type_of(spec), getattr(spec, "tokens_per_state", 1) if type(spec).__name__ in LATENT else 1
    if ratio != 1:
        kind = "dsv4"
    elif index and kind == "kv":
        kind = "dsa"
    return Kind(kind, ratio, index, draft)


def type_of(spec: Any) -> str:
    """The state type of layers with this specification, even if they cannot be described."""
    name = type(spec).__name__
    if name in RECURRENT:
        return "mamba"
    return "swa" if "Sliding" in name else "chunked_local" if "Chunked" in name else "kv"


def numbers_of(groups: Sequence[Any]) -> list[int | None]:
    """A number for each group among those of its type; ``None`` where it is the only one."""
    types = [type_of(_some(group.kv_cache_spec)) for group in groups]
    return [types[:place].count(name) if types.count(name) > 1 else None for place, name in enumerate(types)]


def _some(spec: Any) -> Any:
    """The specification of one of a group's layers."""
    inner = getattr(spec, "kv_cache_specs", None)
    return spec if inner is None else next(iter(inner.values()))
