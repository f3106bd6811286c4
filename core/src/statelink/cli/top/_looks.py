"""Rates from what the links have counted, from one look to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from .._inspect import NOT_QUEUED

if TYPE_CHECKING:
    from .._snapshots import Answers

__all__ = ["ROLES", "Looks"]

ENDED: Final = frozenset({"succeeded", "failed"})
ROLES: Final = {"prefill": "sent", "decode": "received"}
"""Role of a link in a room, and what it does with the bytes."""
READY: Final = frozenset({"ready", "attached"})
"""States of a peer with which rooms can move: `ready` as decode sees prefill, `attached` as prefill sees decode."""
UNCOUNTED: Final = NOT_QUEUED | {"changes"}
"""An engine may look at each of its rooms instead, and never take the changes."""


class Looks:
    """Turns the counters of successive snapshots into rates."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, dict[str, int]]] = {}

    def add(self, found: Answers, now: float) -> dict[str, Any]:
        """One look.

        Args:
            found: What the links answered.
            now: When, in seconds.

        Returns:
            ``links``: for each link what it is and has, and its rates ``a_second``, which are ``None`` at its first
            look; and ``silent``, a line for each link that did not answer.
        """
        before, self._before, links = self._before, {}, []
        for answer in found.given:
            seen = answer.seen
            counted = _counted(seen["totals"])
            self._before[seen["link"]] = now, counted
            then, earlier = before.get(seen["link"], (now, counted))
            passed = now - then
            rates = {name: (number - earlier[name]) / passed if passed else None for name, number in counted.items()}
            links.append({"pid": int(answer.pid) if answer.pid.isdigit() else None, **_plain(seen), "a_second": rates})
        return {"links": links, "silent": found.silent}


def _plain(seen: dict[str, Any]) -> dict[str, Any]:
    states: dict[str, list[str]] = {}  # a peer of a link of the role `both` may have a state in each of its roles
    for rank in seen["ranks"]:
        states.setdefault(rank["peer"], []).append(rank["state"])
    return {
        "link": seen["link"],
        "instance": seen["instance"],
        "rank": seen["rank"],
        "role": seen["role"],
        "backend": seen["backend"],
        "peers": len(states),
        "ready": sum(READY.issuperset(each) for each in states.values()),
        "rooms": sum(count for status, count in seen["rooms"].items() if status not in ENDED),
        "held_bytes": sum(seen["held_bytes"].values()),
        "quarantined_bytes": sum(seen["quarantined_bytes"].values()),
        "queued": {
            name: depth
            for name, depth in seen["load"].items()
            if depth and name not in UNCOUNTED and not name.endswith("_bytes")
        },
    }


def _counted(totals: dict[str, Any]) -> dict[str, int]:
    """The counters of which rates are shown."""
    counted = {
        verb: sum(sum(by.values()) for by in totals["bytes"].get(role, {}).values()) for role, verb in ROLES.items()
    }
    outcomes = [(name, count) for by in totals["rooms"].values() for name, count in by.items()]
    counted["succeeded"] = sum(count for name, count in outcomes if name == "succeeded")
    counted["failed"] = sum(count for name, count in outcomes if name != "succeeded")
    return counted
