"""Which clause each wrong strategy breaks, and a test class for each; not collected by itself."""

from __future__ import annotations

import importlib

from statelink_conformance import StrategyTests

BROKEN: dict[str, tuple[str, str]] = {
    "half": ("test_its_blocks_are_those_of_the_plan[1 to 1]", "bytes are planned, and"),
    "twice": ("test_its_blocks_are_those_of_the_plan[1 to 1]", "places are written twice"),
    "elsewhere": ("test_its_blocks_are_those_of_the_plan[1 to 1]", "they go elsewhere or come from elsewhere"),
    "waits": ("test_its_blocks_are_those_of_the_plan[1 to 1]", "blocks() waits for what never comes"),
    "trusting": ("test_what_a_peer_says_may_be_anything", "message of its send hook raised UnicodeDecodeError"),
    "lossy": ("test_its_bytes_arrive[1 to 1]", "items are wrong"),
}
"""Name of the strategy, to the clause that it breaks, and to a part of what the kit says of it."""

_wrong = importlib.import_module("statelink_wrong_strategies")
for _type, _strategy in _wrong.WRONG.items():
    _attributes = {"strategy": _strategy.name, "state_type": _type, "patience": 4.0}
    globals()[f"Test{_strategy.name}"] = type(f"Test{_strategy.name}", (StrategyTests,), _attributes)
