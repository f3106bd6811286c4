"""Computes which part of an axis a rank holds, checks that it says so, and has the small checks of all constructors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from statelink._arguments import shown, switch, whole
from statelink.errors import StateError

if TYPE_CHECKING:
    from ._build import View
    from ._inventory import Axis, Component
    from ._memory import Memory

__all__ = [
    "as_int",
    "attention_type",
    "check_shares",
    "expect_axes",
    "ints",
    "page_of",
    "pair",
    "settle_ints",
    "settle_switches",
    "share",
]

OPTIONAL = frozenset({"layer", "position", "window"})
"""Fields that may be ``None``."""
UINT64 = 1 << 64


def as_int(value: Any, what: str) -> int:
    """Convert ``value``, which may be an integer of numpy or torch, to a Python integer.

    Raises:
        StateError: It is no integer. The error says ``what`` it was meant to be.
    """
    return whole(value, what)


def settle_ints(struct: msgspec.Struct, what: str, *fields: str) -> None:
    """Make Python integers of some fields of a frozen struct, whose constructor an engine or a decoder called.

    Fields that are ``None`` by default may be ``None``.

    Raises:
        StateError: One is no integer. The error names the field.
    """
    for field in fields:
        given = getattr(struct, field)
        usual = type(given) is int and 0 <= given < UINT64
        if not usual and not (given is None and field in OPTIONAL):
            msgspec.structs.force_setattr(struct, field, as_int(given, f"the {field} of {what}"))


def settle_switches(struct: msgspec.Struct, what: str, *fields: str) -> None:
    """Make Python bools of some fields of a frozen struct.

    Raises:
        StateError: One is no bool. The error names the field.
    """
    for field in fields:
        given = getattr(struct, field)
        if type(given) is not bool:
            msgspec.structs.force_setattr(struct, field, switch(given, f"{field!r} of {what}"))


def ints(given: Any, what: str) -> tuple[int, ...]:
    """A tuple of whole numbers, such as a shape.

    Raises:
        StateError: It is something else. The error says ``what`` it was meant to be.
    """
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise StateError(f"{what} is {shown(given)}", cause="a tuple of whole numbers is expected")
    if type(given) is tuple and all(type(each) is int and 0 <= each < UINT64 for each in given):
        return given
    return tuple(as_int(each, what) for each in given)


def pair(given: Any, what: str) -> tuple[int, int]:
    """Two whole numbers, such as a rank and a width.

    Raises:
        StateError: It is something else. The error says ``what`` it was meant to be.
    """
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise StateError(f"{what} is {shown(given)}", cause="a pair of whole numbers is expected")
    return as_int(given[0], what), as_int(given[1], what)


def share(label: str, what: str, total: int, tp: tuple[int, int], *, replicate: bool = True) -> tuple[int, int]:
    """This rank's range of ``total`` along a TP axis.

    If there are more ranks than units, consecutive ranks hold the same unit: rank ``r`` of ``X`` holds unit
    ``r // (X / total)``.

    Raises:
        StateError: Neither divides the other, or ``replicate`` is off and the ranks do not divide the total.
    """
    rank, width = pair(tp, f"the rank and width of {label!r}")
    total = as_int(total, f"the number of {what}s of {label!r}")
    if total < 1 or width < 1 or not 0 <= rank < width:
        raise StateError(f"rank {rank} of {width} cannot hold a share of {total} {what}s of {label!r}")
    if total % width == 0:
        each = total // width
        return rank * each, (rank + 1) * each
    if replicate and width % total == 0:
        one = rank // (width // total)
        return one, one + 1
    raise StateError(
        f"{total} {what}s of {label!r} cannot be shared by {width} ranks",
        cause="one does not divide the other" if replicate else "the width is not divisible",
        hint="give the state type's own TP width, or describe the slabs by hand",
        code="state.shares",
    )


def expect_axes(label: str, memory: Memory, axes: str) -> None:
    """Check the number of axes of an array. ``axes`` names them, for the error."""
    if len(memory.shape) != len(axes.split(",")):
        raise StateError(f"array {label!r} needs the axes [{axes}]", cause=f"its shape is {memory.shape}")


def attention_type(window: int | None, attention_chunk: int | None, given: str) -> str:
    """The state type of layers of attention: the one that was given, or that of their windows or attention chunks.

    Raises:
        StateError: The layers have both.
    """
    if window is not None and attention_chunk is not None:
        raise StateError(
            "layers have either sliding windows or attention chunks",
            cause=f"window is {window}, attention_chunk {attention_chunk}",
            hint="layers of different kinds are components of their own",
        )
    plain = "kv" if attention_chunk is None else "chunked_local"
    return given or (plain if window is None else "swa")


def page_of(name: str, views: Sequence[View]) -> int:
    """Number of tokens of a page. All arrays of a component must have the same."""
    if not views:
        raise StateError(f"component {name!r} needs at least one array")
    sizes = sorted({view.shape[0] for view in views if view.memory.shape[0]} or {view.shape[0] for view in views})
    if len(sizes) != 1:
        found = ", ".join(map(str, sizes))
        raise StateError(f"the arrays of component {name!r} differ in tokens a page", cause=f"they have {found}")
    return sizes[0]


def check_shares(components: Sequence[Component], tp: Axis | None) -> None:
    """Check that every component of a TP rank says which part of the model's state it holds.

    The width of TP is that of the axis ``tp``, or the largest width that a component states. Items without heads on
    such a rank are the same on every rank, or the engine forgot to say which heads they hold. In the second case, ranks
    would count as replicas, and a reader of one rank's bytes would get another's. So the engine has to say it.

    Args:
        components: The components of one rank.
        tp: Its coordinate on the axis ``tp``, if it has one.

    Raises:
        StateError: A component does not say it, or contradicts the axis or another component. The error names it.
    """
    width, by = (tp.size, "the axis 'tp'") if tp is not None else (1, "")
    indices: dict[int, Component] = {}
    """For each width, the first component of that width."""
    for component in components:
        share = component.share
        if share is None or share.size == 1:
            continue
        other = indices.setdefault(share.size, component)
        if other.share is not None and other.share.index != share.index:
            raise StateError(
                f"components {other.name!r} and {component.name!r} are of different TP ranks",
                cause=f"one holds share {other.share.index} of {share.size}, the other share {share.index}",
                hint="pass the same tp=(rank, width) to the constructors of one rank",
            )
        if tp is not None and share.size == tp.size and share.index != tp.index:
            raise StateError(
                f"component {component.name!r} and the axis 'tp' contradict each other",
                cause=f"it holds share {share.index} of {share.size}; the rank is {tp.index} of {tp.size}",
                hint="pass the same rank and width to the constructor and to axes",
            )
        if share.size > width:
            width, by = share.size, f"component {component.name!r}"
    if width == 1:
        return
    for component in components:
        if component.share is None and not component.replicated and _holds_all(component):
            raise StateError(
                f"component {component.name!r} does not say how the TP ranks share it",
                cause=f"its items have no heads, and {by} says that this is one of {width} TP ranks",
                hint="pass replicated=True where every TP rank lists the same bytes; where each holds heads of its "
                "own, heads= and tp=(rank, width), or describe its part of each item by slabs",
            )


def _holds_all(component: Component) -> bool:
    """Whether every item is here as a whole, so that no other rank can have another part of it."""
    held = [buffer.layout.whole for buffer in component.buffers if buffer.count]
    return bool(held) and all(held)
