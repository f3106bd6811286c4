"""Pure functions from inventories to byte moves; numpy only.

When two instances connect: `match` compares them, `route` gives every byte one writer, and `compile_pair` compiles what
one rank writes for another. For each request: `required` and `pushed` turn indices into items of positions, and
`plan_move` turns these into a `Move`. Its ``blocks`` are what a backend gets.
"""

from __future__ import annotations

from ._blocks import Blocks, Cutter, RegionTable
from ._boxes import Box
from ._compile import PairPlan, compile_pair
from ._component_plan import NO_LAYER, ComponentPlan
from ._indices import indices_of
from ._items import Items, OffSpanError, Pages, check_pieces, checked_int, pushed, required
from ._layer_groups import layer_groups
from ._match import differences, match
from ._move import MAX_BATCH, Move, arrived_bytes, expected_move, plan_move
from ._pack import Places, Tile
from ._page_counts import Tokens, needs_tokens, tokens_of, unknown_pages
from ._positions import MAX_TOKENS, Due, due, held_items, item_positions, required_span
from ._request_content import MAX_CONTENT, checked_content, content_of
from ._route import Assignment, Share, route
from ._state_bytes import StateBytes
from ._whole import Shapes, Whole

__all__ = [
    "MAX_BATCH",
    "MAX_CONTENT",
    "MAX_TOKENS",
    "NO_LAYER",
    "Assignment",
    "Blocks",
    "Box",
    "ComponentPlan",
    "Cutter",
    "Due",
    "Items",
    "Move",
    "OffSpanError",
    "Pages",
    "PairPlan",
    "Places",
    "RegionTable",
    "Shapes",
    "Share",
    "StateBytes",
    "Tile",
    "Tokens",
    "Whole",
    "arrived_bytes",
    "check_pieces",
    "checked_content",
    "checked_int",
    "compile_pair",
    "content_of",
    "differences",
    "due",
    "expected_move",
    "held_items",
    "indices_of",
    "item_positions",
    "layer_groups",
    "match",
    "needs_tokens",
    "plan_move",
    "pushed",
    "required",
    "required_span",
    "route",
    "tokens_of",
    "unknown_pages",
]
