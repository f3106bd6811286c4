"""Reads memory through a description, with nothing of Statelink's but the numbers in it."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from statelink.state import Described, Inventory


def elements(inventory: Inventory, component: str, buffer: str) -> dict[tuple[int, ...], bytes]:
    """The bytes of every element that is described, by item and global coordinates."""
    return dict(_elements(inventory, component, buffer))


def _elements(inventory: Inventory, component: str, buffer: str) -> Iterator[tuple[tuple[int, ...], bytes]]:
    found = next(each for each in inventory.component(component).buffers if each.name == buffer)
    region = inventory.regions[found.region]
    layout = found.layout
    for item in range(found.count):
        base = found.offset + item * found.stride
        for slab in layout.slabs:
            for coordinate in itertools.product(*(range(a, b) for a, b in zip(slab.start, slab.stop, strict=True))):
                inner = sum((c - a) * stride for c, a, stride in zip(coordinate, slab.start, slab.strides, strict=True))
                at = base + slab.offset + inner
                assert at + layout.itemsize <= region.nbytes
                yield (item, *coordinate), ctypes.string_at(region.address + at, layout.itemsize)


def one_buffer(inventory: Inventory) -> tuple[str, str]:
    """The only component and buffer."""
    (component,) = inventory.components
    (buffer,) = component.buffers
    return component.name, buffer.name


def zeros(*shape: int, dtype: str = "uint8") -> np.ndarray[Any, Any]:
    return np.zeros(shape, dtype)


def pair(*shape: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    return zeros(*shape), zeros(*shape)


def names(made: Described) -> list[str]:
    return [buffer.name for buffer in made.component.buffers]
