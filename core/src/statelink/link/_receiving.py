"""Decode's side of one room."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from statelink._nearest import did_you_mean
from statelink.errors import ClosedError, Reason, RoomError
from statelink.plan import Items, PairPlan, checked_int, due, required
from statelink.wire import MAX_INDICES

from ._room import Ready, Room
from ._standing import Party, missing_on_decode, party_of
from ._status import ENDED, Status

if TYPE_CHECKING:
    from statelink.backend import Moved, ReceiveHook

    from ._decode import DecodeRole
    from ._hook_room import ReceiveRoom
    from ._instance import Instance, Source
    from ._node import Node

__all__ = ["Receiving", "Writer"]


@dataclass
class Writer:
    """What one prefill rank owes to one room.

    Attributes:
        source: The rank.
        plan: What it writes.
        hooks: Receive hook per component.
        expected: Bytes per component.
        finished: What it said it moved, once it did.
        owes: Hooks, their transfers, and comparisons of digests that have not ended.
        owing: What these are, in words, and how many of each.
        closed: Whether nothing of it can land any more.
        asked: Whether it was, or may have been, asked.
        met: Whether it has said that it has a room for this use.
        came: Components of which something has come.
        prepared: What this side's hooks prepared for it.
        elsewhere: Components that it does not write to in place.
        digests: What it said of what it moved, where both sides verify.
        verified: Whether that was compared with what arrived, or is being.
        contexts: What each hook sees.
        released: Whether the hooks were told that nothing of it can land any more.
    """

    source: Source
    plan: PairPlan
    hooks: dict[str, ReceiveHook]
    expected: dict[str, int]
    finished: Mapping[str, Moved] | None = None
    owes: int = 0
    owing: Counter[str] = field(default_factory=Counter)
    closed: bool = False
    asked: bool = False
    met: bool = False
    prepared: dict[str, bytes] = field(default_factory=dict)
    elsewhere: list[str] = field(default_factory=list)
    digests: Mapping[str, bytes] = field(default_factory=dict)
    verified: bool = False
    came: set[str] = field(default_factory=set)
    contexts: dict[str, ReceiveRoom] = field(default_factory=dict)
    released: bool = False

    def begin(self, what: str) -> None:
        """Something begins that the room's end waits for."""
        self.owes += 1
        self.owing[what] += 1

    def end(self, what: str) -> None:
        """It has ended."""
        self.owes -= 1
        self.owing[what] -= 1

    @property
    def waits(self) -> str:
        """What the room still waits for on this side, in words. Any thread."""
        return " and ".join(what for what, count in list(self.owing.items()) if count)


class Receiving(Room):
    """One request on decode. Made by `Link.receive`; every method returns at once, except `Room.wait`."""

    def __init__(
        self,
        node: Node,
        role: DecodeRole,
        room: int,
        tokens: int,
        generation: int,
        deadline: float | None,
        attempt: int = 0,
    ) -> None:
        super().__init__(node, room, tokens, deadline, attempt)
        self._role = role
        self._generation = generation
        self._items: dict[str, Items] = {}
        self._ready: Ready | None = None
        self._accepted = False
        self._requested = False
        self._instance: Instance | None = None
        self._writers: dict[str, Writer] = {}
        self._lock = threading.Lock()

    @property
    def generation(self) -> int:
        """Which use of the room id this is."""
        return self._generation

    def accept(self, items: Mapping[str, Any], *, prefix: int = 0, ready: Ready | None = None) -> None:
        """Say where the request's state belongs. From here on the named memory may be written, until `quiesced`.

        Thread-safe. A room can fail at any moment; accepting one that has does nothing, and its `reason` says why.

        Args:
            items: Component name to its indices (anything one-dimensional and integral; copied), or `Pages`: for a
                component that covers positions one for each page that must arrive, for the others exactly one.
                A component of which nothing must arrive may be left out.
            prefix: P: positions that this side already holds.
            ready: Guards the memory: nothing is written before ``ready.query()`` is true.

        Raises:
            RoomError: The items are not what must arrive; the room stays as it was.
            ClosedError: It was accepted before.
        """
        self._node.check_process()
        with self._lock:
            if self._status is Status.FAILED:
                return
            if self._accepted:
                raise ClosedError(
                    "a room cannot be accepted", cause="it was accepted before", room=self._room, code="room.closed"
                )
            try:
                prefix = checked_int(prefix, "the prefix of a room", 0, self._tokens, code="room.prefix")
            except RoomError as error:
                raise self._error(error.reason.what, error.reason.cause, code=error.code) from None
            self._check_given(items, ready, "room.items")
            checked = self._check(items, prefix)
            self._items, self._prefix, self._ready, self._accepted = checked, prefix, ready, True
            self._quiesced = False  # from here on the memory is named; worked out anew on the control thread
            self._quiet.clear()
        self._node.post(lambda: self._role.accepted(self))

    def _check(self, items: Mapping[str, Any], prefix: int) -> dict[str, Items]:
        known = {component.name: component for component in self._node.inventory.components}
        for name in items:
            if name not in known:
                raise self._error(
                    f"accept names component {name!r}",
                    cause=f"this rank has {', '.join(known) or 'none'}",
                    hint=did_you_mean(name, known),
                )
        checked: dict[str, Items] = {}
        for name, component in known.items():
            given = items.get(name)
            try:
                if given is None and not component.kind.positional:
                    raise RoomError(
                        f"accept lacks component {name!r}",
                        cause=f"every request has its {component.kind.index.value}",
                        hint=f"add items[{name!r}]",
                        code="room.items",
                    )
                checked[name] = required(component, self._tokens, prefix, [] if given is None else given)
            except RoomError as error:
                raise self._error(error.reason.what, error.reason.cause, error.reason.hint, error.code) from None
        count = sum(len(each.ids) for each in checked.values())
        if count > MAX_INDICES:
            raise self._error(
                f"accept names {count} indices",
                cause=f"a request carries at most {MAX_INDICES}, of all components together",
                hint="describe pages of more tokens",
            )
        return checked

    def _error(self, what: str, cause: str = "", hint: str = "", code: str = "room.items") -> RoomError:
        return RoomError.of(self._reason_for(code, what, cause, hint))

    def _parties(self) -> list[Party]:
        writers = [writer.source for writer in list(self._writers.values())]
        return [party_of(source) for source in writers or (self._instance.sources.values() if self._instance else ())]

    def _transports(self) -> dict[str, str]:
        return {writer.source.name: writer.source.transport for writer in list(self._writers.values())}

    def _missing(self) -> str:
        return missing_on_decode(self)

    def _abort(self, why: str) -> None:
        self._role.fail(self, self._reason_for("room.aborted", "decode aborted the request", why))

    def _broken(self, reason: Reason) -> None:
        self._role.fail(self, reason)

    def _expect(self, plan: PairPlan) -> dict[str, int]:
        """Bytes that a writer must move, per component: computed here, never taken from the writer."""
        expected = {}
        for name, part in plan.components.items():
            expected[name] = part.granule_nbytes * len(due(part.source, part.target, self._tokens, self._prefix or 0))
        return expected

    def _settle(self) -> None:
        """Work out anew whether this side's memory is quiet."""
        still = all(writer.closed and not writer.owes for writer in self._writers.values())
        self._set_quiesced(still and (self._status in ENDED or not self._accepted))
        self._node.forget(self)

    def _held(self) -> tuple[int, str]:
        nbytes = sum(self._bytes_of(name, len(items.ids)) for name, items in self._items.items())
        writers = list(self._writers.values())  # the control thread may be adding to it
        if any(writer.owes for writer in writers):
            return nbytes, "a receive hook or a digest has not ended"
        waits = sorted(writer.source.name for writer in writers if not writer.closed)
        return nbytes, f"not known to have stopped: {', '.join(waits)}"
