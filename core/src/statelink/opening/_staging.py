"""Decides which components of a link are staged, from its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from statelink.backend import DIRECT
from statelink.errors import ConfigError
from statelink.hints import did_you_mean
from statelink.staged import Staged

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import ExitStack

    from statelink.backend import Backend, Strategy
    from statelink.config import Staging
    from statelink.state import Inventory

__all__ = ["choose_staging", "open_strategies"]


def choose_staging(
    strategies: Mapping[str, Strategy], backend_type: type[Backend], settings: Staging | None, role: str
) -> dict[str, Strategy]:
    """Component to strategy, with staging for the configured ones of those that would move directly.

    Raises:
        ConfigError: A configured component does not exist, or has another strategy than direct moves.
    """
    if settings is None:
        return dict(strategies)
    modes: dict[str, Literal["auto", "always"]] = {}
    for name, strategy in strategies.items():
        mode = settings.components.get(name, settings.mode)
        if mode != "never" and strategy is DIRECT:
            modes[name] = mode
    for name, mode in settings.components.items():
        if mode != "never" and name not in modes:
            known = strategies.get(name)
            raise ConfigError(
                f"component {name!r} cannot be staged",
                cause=f"it moves by strategy {known.name!r}"
                if known is not None
                else f"this rank has {', '.join(strategies)}",
                hint=did_you_mean(name, () if known is not None else strategies, "correct `components` of staging"),
                code="config.staging",
            )
    staged = Staged(
        backend_type.capabilities,
        ring_bytes=settings.ring_bytes,
        parcel_bytes=settings.parcel_bytes,
        modes=modes,
        both_roles=role == "both",
    )
    return {name: staged if name in modes else strategy for name, strategy in strategies.items()}


def open_strategies(strategies: Mapping[str, Strategy], inventory: Inventory, opened: ExitStack) -> Inventory:
    """Open strategies, and return the inventory with their memory added. ``opened`` closes them again."""
    # By identity, because equal strategies may be different objects.
    for strategy in {id(each): each for each in strategies.values()}.values():
        brings = strategy.open(inventory, [name for name, other in strategies.items() if other is strategy])
        opened.callback(strategy.close)
        inventory = msgspec.structs.replace(inventory, regions=(*inventory.regions, *brings))
    return inventory
