"""What every kind of telemetry is: an object that belongs to one link, and sees its rooms end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from statelink._logs import logger
from statelink.backend import RoomReport, hookimpl

if TYPE_CHECKING:
    import pluggy

    from statelink.link import Link

__all__ = ["Observer", "RoomObserver"]

log = logger("statelink.telemetry")


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For telemetry that has no options."""


class Observer:
    """Watches one link, from its opening to its end. An engine's thread makes it, and another may close it.

    Args:
        options: What is configured, as `Options`.
        link: The link. It is open.

    Attributes:
        Options: A ``msgspec.Struct`` with its options.
        needs: The module that it imports; empty for none.
        extra: The extra of ``statelink`` that brings this module.
    """

    Options: ClassVar[type[Any]] = NoOptions
    needs: ClassVar[str] = ""
    extra: ClassVar[str] = ""

    def __init__(self, options: Any, link: Link) -> None:
        self.options = options
        self.link = link
        self._hooks: pluggy.PluginManager | None = None

    def close(self) -> None:
        """The link is closed: let go of everything."""

    def register(self, hooks: pluggy.PluginManager) -> None:
        """Be called from now on."""
        self._hooks = hooks
        hooks.register(self)

    @hookimpl
    def statelink_link_closed(self, link: Link) -> None:
        """See the hook."""
        if link is self.link and self._hooks is not None:
            self._hooks.unregister(self)
            try:
                self.close()
            except Exception:
                log.exception("telemetry was not closed")


class RoomObserver(Observer):
    """An observer that sees each room of its link when it ends."""

    def ended(self, report: RoomReport) -> None:
        """A room of the link has ended. On the link's control thread: must not block."""
        raise NotImplementedError

    @hookimpl
    def statelink_room_ended(self, report: RoomReport) -> None:
        """See the hook."""
        if report.link == self.link.name:
            try:
                self.ended(report)
            except Exception:  # an error here must not keep other observers from the room
                log.exception("telemetry of room %d failed", report.room)
