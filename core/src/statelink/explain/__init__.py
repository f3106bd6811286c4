"""Before any GPU is rented: can this pair of fleets work, and what does a request cost?

A `Side` is a model (a preset, or its geometry) and a parallel layout, usually read from TOML. `explain` builds the
inventories of all ranks of both sides with made-up addresses, matches, routes and compiles them exactly as connecting
would, and plans one request. Nothing is allocated, and nothing is connected.
"""

from __future__ import annotations

from ._inventories import inventories
from ._layout import Layout, Side, read_side
from ._model import Model, preset, presets
from ._report import Flow, Rank, Report, Total, explain

__all__ = [
    "Flow",
    "Layout",
    "Model",
    "Rank",
    "Report",
    "Side",
    "Total",
    "explain",
    "inventories",
    "preset",
    "presets",
    "read_side",
]
