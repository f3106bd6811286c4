"""Descriptions of what one rank holds, in global coordinates.

Nothing here moves a byte or knows a library. An `Inventory` lists a rank's `Component` objects, which are named parts
of request state. A component consists of `Buffer` views into registered `Region` memory. A `Layout` of `Slab` boxes
describes each item of a buffer. State types are data: see `StateType` and `register_state_type`.
"""

from __future__ import annotations

from ._attention import compressed_pages, index_pages, kv_pages, mla_pages, planar_pages
from ._build import Described, describe
from ._diff import Difference
from ._fused import fused_pages
from ._inventory import Axis, Buffer, Component, Inventory, Partition, Region
from ._layout import Layout, Slab
from ._memory import Memory
from ._packed import PackedState, packed_slots
from ._requests import aux_rows, mamba_slots, ring_rows, whole_items
from ._types import Coverage, IndexSpace, StateType, register_state_type, state_type, state_types

__all__ = [
    "Axis",
    "Buffer",
    "Component",
    "Coverage",
    "Described",
    "Difference",
    "IndexSpace",
    "Inventory",
    "Layout",
    "Memory",
    "PackedState",
    "Partition",
    "Region",
    "Slab",
    "StateType",
    "aux_rows",
    "compressed_pages",
    "describe",
    "fused_pages",
    "index_pages",
    "kv_pages",
    "mamba_slots",
    "mla_pages",
    "packed_slots",
    "planar_pages",
    "register_state_type",
    "ring_rows",
    "state_type",
    "state_types",
    "whole_items",
]
