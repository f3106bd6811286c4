"""Says whether a pair of fleets can work together, and what a request costs, before any GPU is rented.

A `Side` is a model (a preset, or its geometry) and a parallel layout, usually read from TOML. `explain` builds the
inventories of all ranks of both sides with invented addresses. It matches, routes and compiles them with the same code
as links that connect, and plans one request. It allocates no memory and connects nothing.
"""

from __future__ import annotations

from ._estimate import Estimate, Worth, estimate, worth
from ._inventories import inventories
from ._layout import Layout, Side, read_side
from ._model import Model, preset, presets
from ._report import Flow, Rank, Report, explain

__all__ = [
    "Estimate",
    "Flow",
    "Layout",
    "Model",
    "Rank",
    "Report",
    "Side",
    "Worth",
    "estimate",
    "explain",
    "inventories",
    "preset",
    "presets",
    "read_side",
    "worth",
]
