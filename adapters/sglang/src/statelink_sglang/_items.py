"""SGLang's lists of indices, as the items of a request that a link takes."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ._behaviour import BEHAVIOUR
from ._inventory import TAIL

if TYPE_CHECKING:
    from ._inventory import StateLists

__all__ = ["add_states", "drop_prefix"]


def add_states(items: dict[str, Any], lists: StateLists, states: Sequence[Any], without: Collection[str] = ()) -> None:
    """Add SGLang's lists of indices of its state types to the items of a request, by component.

    Args:
        items: They are changed.
        lists: How the lists go with components.
        states: SGLang's lists.
        without: Components that are left out.

    Raises:
        ValueError: There are not as many lists as state types.
    """
    for names, indices in zip(lists.states, states, strict=True):
        if names[0] == TAIL:
            indices = _rows_of_tail(indices)
        for name in names:
            if name not in without:
                items[name] = _one_dimensional(indices) if name in lists.whole else _one(indices)


def drop_prefix(items: dict[str, Any], pages: int, listed: frozenset[str] = BEHAVIOUR.lists_prefix) -> None:
    """Leave out the pages of decode's prefix, where this release of SGLang lists them although they need not arrive.

    Args:
        items: The items of a request on decode, by component; they are changed.
        pages: How many pages of the full pool are behind the prefix. These lists have the pages of that pool.
        listed: State types of which SGLang does so.
    """
    for name in items:
        if name.removeprefix("draft.") in listed:
            items[name] = items[name][max(0, len(items[name]) - pages) :]


def _rows_of_tail(indices: Any) -> Any:
    """The rows of a request's ring that hold its open group, in the order of positions.

    SGLang has six numbers for them, or none if no group is open: the slot, two parts of its ring, each as its first row
    and a number of rows, and the rows of a ring.
    """
    if not len(indices):
        return np.zeros(0, np.int64)
    slot, first, count, second, rest, ring = map(int, indices)
    parts = np.arange(first, first + count), np.arange(second, second + rest)
    return slot * ring + np.concatenate(parts)


def _one(indices: Any) -> Any:
    """The one index of a request, such as of recurrent state, which SGLang lists as a scalar array in a list."""
    if type(indices) is list and len(indices) == 1:
        try:
            return operator.index(indices[0])
        except TypeError:
            pass
    return _one_dimensional(indices)


def _one_dimensional(indices: Any) -> Any:
    """SGLang's list of one component's indices as an array."""
    if type(indices) is np.ndarray and indices.ndim == 1:
        return indices
    return np.asarray(indices).reshape(-1)
