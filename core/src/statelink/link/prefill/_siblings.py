"""The other ranks of this link's own instance: it asks them how a room stands there, and answers them."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING

from statelink import wire
from statelink._logs import logger
from statelink.errors import ConfigError
from statelink.link._status import ENDED, Status
from statelink.link.peers import find_siblings

if TYPE_CHECKING:
    from statelink.errors import Reason
    from statelink.link._context import Context
    from statelink.link._room_table import Rooms

    from ._sending_state import SendingState

__all__ = ["Siblings"]

log = logger("statelink.link")

REMEMBERED_ROOMS = 65536
"""Most rooms for which this link remembers who asked."""
ENDS = 16384
"""Most rooms whose end this link remembers, for ranks that ask later. Each takes about 200 bytes."""
MOST_ASKING = 1024
"""Most ranks that may ask about one room."""


class Siblings:
    """Asks the other ranks how a room stands, with `Inquire`, and answers their `Inquire` with `Standing`.

    It asks only about rooms for which the engine has asked.

    Belongs to the control thread, except where a method says otherwise.

    Args:
        context: The link's parts.
        rooms: The rooms that send.

    Attributes:
        listen: Whether another rank may care how a room stands here. If not, `changed` has nothing to do.
    """

    def __init__(self, context: Context, rooms: Rooms[SendingState]) -> None:
        self._context = context
        self._rooms = rooms
        self._count = context.inventory.ranks - 1
        self.listen = self._count > 0
        self._addresses = _checked(context.config.siblings)
        self._looks = False
        """Whether a data thread asks the rendezvous server for them."""
        self._asking: weakref.WeakSet[SendingState] = weakref.WeakSet()
        """Rooms about which this link asks. Weak references, because an engine that dropped a room needs no answer."""
        self._askers: OrderedDict[int, set[str]] = OrderedDict()
        """For each room, the link names of the ranks that are told how it stands here."""
        self._ended: OrderedDict[int, Status] = OrderedDict()
        """How rooms that are forgotten ended here."""

    @property
    def count(self) -> int:
        """How many other ranks there are. Any thread."""
        return self._count

    def name(self, addresses: list[str]) -> None:
        """Use these addresses. Any thread."""
        self._addresses = addresses

    def check(self) -> None:
        """Check that the other ranks can be asked. Any thread.

        Raises:
            ConfigError: Their addresses are not known.
        """
        known = len(self._addresses)
        if known == self._count or (not known and self._context.config.rendezvous):
            return
        raise ConfigError(
            "the other ranks of this instance cannot be asked",
            cause=f"addresses of {known} of them are known, and there are {self._count}",
            hint="call siblings() with the addresses of all other ranks, or configure 'siblings' or 'rendezvous'",
            code="config.peer",
            link=self._context.name,
        )

    # This link asks.

    def ask(self, room: SendingState) -> None:
        """Ask the other ranks for a room's status, and to tell every change of it."""
        self._asking.add(room)
        self._inquire(room)

    def _inquire(self, room: SendingState) -> None:
        if not self._addresses:
            self._look()
        inquire = wire.Inquire(sender=self._context.name, room=room.room)
        unsure = self._unsure(room)
        try:
            self._context.channel.undialled(unsure)
        except ConfigError as error:  # too few files for all of them; the room then stays as it is
            log.debug("the other ranks of this instance are not asked: %s", error.reason.coded)
            return
        for address in unsure:
            try:
                self._context.channel.dial(wire.parse_endpoint(address))
            except ConfigError:
                continue  # a key that is not allowed; the room then stays as it is
            self._context.channel.send(inquire, address)

    def _unsure(self, room: SendingState) -> list[str]:
        return [] if room.standings is None else room.standings.unsure(room.status, self._addresses)

    def _look(self) -> None:
        if self._looks or not self._context.config.rendezvous:
            return
        self._looks = True
        context = self._context

        # Runs on the control thread, after a data thread has asked the rendezvous server.
        def then(found: list[str] | None, _: Reason | None) -> None:
            self._looks = False
            if found and not self._addresses:
                self._addresses = found
                for room in list(self._asking):
                    self._inquire(room)

        find = partial(find_siblings, context.rendezvous, context.inventory.instance, context.channel.endpoint)
        context.workers.run(context.workers.setups, ("resolve", "own instance"), find, then)

    def answered(self, message: wire.Standing, address: str) -> None:
        """Another rank says how a room stands there."""
        for room in list(self._asking):
            if room.room == message.room and address in self._addresses and room.standings:
                room.standings.note(address, Status(message.status))

    def beat(self) -> None:
        """Ask again where an answer may have been lost. Forget rooms that failed on a rank, or succeeded on all."""
        for room in list(self._asking):
            if self._unsure(room) or not self._addresses:
                self._inquire(room)
            else:
                self._asking.discard(room)

    # This link is asked.

    def inquired(self, message: wire.Inquire) -> None:
        """Another rank asks how a room stands here. Tell it at once if the room is open, and tell it every change."""
        self.listen = True  # also an instance of one rank answers who asks
        number = message.room
        room = self._rooms.get(number)
        here = room.status if room is not None else self._ended.get(number)
        if here not in ENDED:
            askers = self._askers.setdefault(number, set())
            if len(askers) < MOST_ASKING:
                askers.add(message.sender)
            self._askers.move_to_end(number)
            if len(self._askers) > REMEMBERED_ROOMS:
                self._askers.popitem(last=False)
        if here is not None:
            self._say(number, here, message.sender)

    def opened(self, room: SendingState) -> None:
        """A room was opened: how an earlier use of its id ended does not matter any more.

        The room itself may have ended by now, since messages about it may be handled before this is called.
        """
        if self._ended and room.status not in ENDED:
            self._ended.pop(room.room, None)

    def changed(self, room: SendingState) -> None:
        """The status of a room changed: tell those who asked."""
        number, status = room.room, room.status
        for name in self._askers.get(number, ()):
            self._say(number, status, name)
        if status in ENDED and self._count:
            self._askers.pop(number, None)
            self._ended[number] = status
            if len(self._ended) > ENDS:
                self._ended.popitem(last=False)

    def _say(self, room: int, status: Status, name: str) -> None:
        standing = wire.Standing(sender=self._context.name, to=name, room=room, status=int(status))
        self._context.channel.send(standing)


def _checked(addresses: tuple[str, ...]) -> list[str]:
    return [str(wire.parse_endpoint(address)) for address in addresses]
