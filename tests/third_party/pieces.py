"""The kit, against the third party's strategy; not collected by itself, since its package is not installed."""

from __future__ import annotations

from statelink_conformance import StrategyTests


class TestPieces(StrategyTests):
    strategy, state_type, backend = "acme.pieces", "kv", "tcp"
