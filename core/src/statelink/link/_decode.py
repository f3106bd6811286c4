"""The decode role: asking for rooms, and believing only what adds up."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from statelink import wire
from statelink.backend import UNKNOWN, Arrival, Moved

from ._deadlines import Deadlines, waits_of
from ._departed import Departed
from ._granting import Granting
from ._incoming import Incoming
from ._instances import Instances
from ._mover import reason_of
from ._receiving import Receiving, Writer
from ._stages import Stage
from ._standing import missing_on_decode
from ._status import ENDED, Status
from ._unmet import Unmet
from ._use import Use
from ._verify import check_arrived

if TYPE_CHECKING:
    from statelink.errors import Reason

    from ._instance import Instance, Source
    from ._node import Node
    from ._rendezvous import Peer

__all__ = ["DecodeRole"]

log = logging.getLogger("statelink.link")

OfARoom = wire.Chunk | wire.Finished | wire.Failed | wire.Drained | wire.Note
OF_A_ROOM = (wire.Chunk, wire.Finished, wire.Failed, wire.Drained, wire.Note)
"""What writers say of rooms."""


class DecodeRole:
    """Decode's half of the protocol. Runs on the control thread.

    Args:
        node: The link's control thread.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._instances = Instances(node, self)
        self._deadlines = Deadlines(node, self._expired)
        self._unmet = Unmet(node.now)
        self._departed = Departed(node, self.goodbye)
        self._granting = Granting(node)
        self._incoming = Incoming(node, self._granting.fencing, self.fail, self._maybe_succeed)

    # Messages.

    def handle(self, message: wire.Message, address: str | None) -> None:
        """See `Role.handle`."""
        self._instances.handle(message, address)

    def from_source(self, message: wire.Message, source: Source) -> None:
        """See `Watcher.from_source`."""
        if not isinstance(message, OF_A_ROOM):
            return
        if isinstance(message, (wire.Failed, wire.Drained)) and message.met:
            self._unmet.met(message.met, source.name)
        room = self._node.rooms.get(message.room)
        if not isinstance(room, Receiving) or room.generation != message.generation:
            return
        writer = room._writers.get(source.name)
        if writer is not None:
            self._from_writer(message, room, writer)

    def _from_writer(self, message: OfARoom, room: Receiving, writer: Writer) -> None:
        met = message.met == room.generation if isinstance(message, (wire.Failed, wire.Drained)) else True
        writer.met = writer.met or met
        if isinstance(message, wire.Chunk):
            room._set(Status.TRANSFERRING)
            room._chunks = max(room._chunks, message.number + 1)
            writer.came.update(message.granules.keys() & writer.expected.keys())
            if room.status not in ENDED:
                for name, grains in message.granules.items():
                    arrival = Arrival(message.number, grains, message.layers)
                    self._incoming.arrived(room, writer, name, arrival)
        elif isinstance(message, wire.Finished):
            self._finished(room, writer, message)
        elif isinstance(message, wire.Failed):
            self.fail(room, message.reason)
        elif isinstance(message, wire.Drained):
            self._closed(room, writer.source.name)
        elif room.status not in ENDED:
            self._incoming.message(room, writer, message.component, message.payload)

    # Peers.

    def ready(self, instance: Instance) -> None:
        """See `Watcher.ready`."""
        for room in list(instance.rooms.values()):
            self._ready(room, instance)
        for room in self._quarantined():
            for source in instance.parts:
                writer = room._writers.get(source.name)
                if writer is not None and not writer.closed and room._reason is not None:
                    # It was lost and came back, and what it last said of this room may be lost: ask again.
                    failed = wire.Failed(**self._use(room, writer), reason=room._reason, attempt=room.attempt)
                    self._node.send(failed, source.address)

    def refused(self, instance: Instance, reason: Reason) -> None:
        """See `Watcher.refused`."""
        for room in list(instance.rooms.values()):
            self.fail(room, reason)

    def lost(self, instance: Instance, source: Source, why: str) -> None:
        """See `Watcher.lost`: rooms that the rank owes something fail; others go on, or wait for it to come back."""
        peer = source.name or source.endpoint.address
        for room in list(instance.rooms.values()):
            writer = room._writers.get(source.name)
            if writer is not None and writer.finished is None:
                self.fail(room, room._reason_for("peer.lost", "prefill was lost", why, peer=peer))

    def untaken(self, room: int, generation: int, source: Source) -> None:
        """See `Watcher.untaken`."""
        known = self._node.rooms.get(room)
        if isinstance(known, Receiving) and known.generation == generation:
            self._closed(known, source.name)

    def goodbye(self, source: Source) -> None:
        """See `Watcher.goodbye`; also for a rank whose process has ended."""
        with self._node.lock:
            rooms = [room for room in self._node.rooms.values() if isinstance(room, Receiving)]
        for room in rooms:
            self._closed(room, source.name)

    def beat(self, now: float, late: float) -> None:
        """See `Role.beat`."""
        self._instances.beat(now, late)
        writers = [writer for room in self._quarantined() for writer in room._writers.values() if not writer.closed]
        self._departed.look({writer.source.name: writer.source for writer in writers}.values())

    def close(self) -> None:
        """See `Role.close`."""
        self._instances.close()

    def ranks(self, now: float) -> list[dict[str, Any]]:
        """See `Role.ranks`."""
        return self._instances.ranks(now)

    def snapshot(self) -> dict[str, str]:
        """Peers and how they stand."""
        return self._instances.snapshot()

    def load(self) -> dict[str, int]:
        """What is kept beside the rooms, by kind."""
        return {"unmet": len(self._unmet)}

    def busy(self) -> bool:
        """See `Role.busy`."""
        return bool(self._quarantined())

    def knows(self, name: str) -> bool:
        """See `Role.knows`: decode dials those whom it works with, and its siblings only ask who it is."""
        return False

    def _quarantined(self) -> list[Receiving]:
        """Rooms that ended and whose memory is not quiet."""
        with self._node.lock:
            rooms = list(self._node.rooms.values())
        return [r for r in rooms if isinstance(r, Receiving) and r.status in ENDED and not r.quiesced]

    # Rooms.

    def open(self, room: Receiving, peer: Peer) -> None:
        """The engine opened a room."""
        self._deadlines.add(room)
        instance = self._instances.get(peer)
        room._instance = instance
        instance.rooms[room.room] = room
        if instance.stage is Stage.REFUSED and instance.reason is not None:
            self.fail(room, instance.reason)
        elif instance.stage is Stage.READY:
            self._ready(room, instance)

    def accepted(self, room: Receiving) -> None:
        """The engine said where the state belongs."""
        room._settle()
        if room._instance is not None and room._instance.stage is Stage.READY:
            self._ready(room, room._instance)

    def _ready(self, room: Receiving, instance: Instance) -> None:
        """The instance can be asked; ask, if the engine has accepted and its memory is free."""
        if room.status in ENDED or room._requested or instance.stage is not Stage.READY or instance.suspect:
            return
        room._set(Status.WAITING)
        if not room._accepted or not room._is_ready(room._ready, lambda: self._ready(room, instance)):
            return
        room._requested = True
        try:
            writers = {source.name: self._incoming.writer(room, source) for source in instance.parts}
        except BaseException as error:  # a defect of a strategy, whose hooks are made here
            self.fail(room, reason_of(error, room=room.room, backend=self._node.backend.name))
            return
        room._writers.update(writers)
        room._settle()

        def job() -> None:
            try:
                for writer in room._writers.values():
                    self._incoming.prepare(writer)
                    self._granting.grant(room, writer)
            except BaseException as error:
                reason = reason_of(error, room=room.room, backend=self._node.backend.name)
                self._node.post(lambda: self.fail(room, reason))
            else:
                self._node.post(lambda: self._request(room))

        self._node.fences.submit(("room", room.room), job)

    def _request(self, room: Receiving) -> None:
        if room.status in ENDED:
            for writer in room._writers.values():
                writer.closed = True  # never asked
            self._leave(room)
            return
        for writer in room._writers.values():
            items = {name: wire.pack_items(room._items[name].ids, room._items[name].first) for name in writer.hooks}
            writer.asked = True
            request = wire.Request(
                sender=self._node.name,
                to=writer.source.name,
                room=room.room,
                generation=room.generation,
                tokens=room.tokens,
                prefix=room.prefix or 0,
                items=items,
                prepared=writer.prepared,
                elsewhere=writer.elsewhere,
                attempt=room.attempt,
                lifetime_ms=int(1000 * (room._deadline - room._opened)) + 1,
                unmet=self._unmet.named(room._key, writer.source.name),
            )
            if not self._node.send(request, writer.source.address):
                self.fail(
                    room,
                    room._reason_for("peer.send", "a request could not be sent", peer=writer.source.name),
                )
                return
        if not room._writers:  # the plan says that nobody owes this rank a byte
            self._maybe_succeed(room)

    def _finished(self, room: Receiving, writer: Writer, message: wire.Finished) -> None:
        """A writer's last word: compare it with what this side computed itself."""
        writer.closed = True
        who = {"peer": writer.source.name}
        if message.digest != writer.plan.digest:
            cause = f"{writer.plan.digest.hex()} here, {message.digest.hex()} there"
            self.fail(room, room._reason_for("room.digest", "a writer followed another plan", cause, **who))
        said = {name: moved.nbytes for name, moved in message.moved.items() if moved.nbytes}
        wanted = {name: nbytes for name, nbytes in writer.expected.items() if nbytes}
        if said != wanted:
            names = sorted(name for name in said.keys() | wanted.keys() if said.get(name) != wanted.get(name))
            cause = "; ".join(f"{n}: {wanted.get(n, 0)} bytes promised, {said.get(n, 0)} moved" for n in names)
            what = "a writer did not move what the plan promised"
            self.fail(room, room._reason_for("room.bytes", what, cause, component=", ".join(names), **who))
        writer.finished = message.moved
        writer.source.transport = message.transport or UNKNOWN
        writer.digests = message.digests
        if room.status not in ENDED:
            self._incoming.finish(room, writer)
        self._maybe_succeed(room)

    def _maybe_succeed(self, room: Receiving) -> None:
        writers = room._writers.values()
        if self._node.config.verify != "off" and room.status not in ENDED:
            for writer in writers:
                if writer.finished is not None and not writer.owes and not writer.verified:
                    self._verify(room, writer)
        if room.status in ENDED or not all(writer.finished is not None and not writer.owes for writer in writers):
            self._leave(room)
            return
        for writer in writers:
            for name, moved in (writer.finished or {}).items():
                before = room._moved.get(name, Moved(0, 0))
                room._moved[name] = Moved(before.nbytes + moved.nbytes, before.blocks + moved.blocks)
        room._set_quiesced(True)
        room._set(Status.SUCCEEDED)
        for writer in writers:
            self._node.send(wire.Accepted(**self._use(room, writer)), writer.source.address)
            self._granting.revoke(room, writer, self._closed)
        self._leave(room)

    def fail(self, room: Receiving, reason: Reason) -> None:
        """End a room in failure, tell every writer, and fence its memory or wait for the writers to drain."""
        if not room._fail(reason) or room._reason is None:
            return
        reason = room._reason
        self._unmet.ended(room, self._not_met(room))
        for writer in room._writers.values():
            if not writer.asked:
                # The grant may be on its way on a data thread; it is taken back behind it.
                writer.closed = self._granting.fencing is None
            # Also who was not asked yet is told: its engine may hold the room open, waiting for a request.
            failed = wire.Failed(**self._use(room, writer), reason=reason, attempt=room.attempt)
            self._node.send(failed, writer.source.address)
            self._granting.revoke(room, writer, self._closed)
            self._incoming.abort(room, writer)
        if not room._writers and room._instance is not None:
            self._tell_unasked(room, room._instance, reason)
        self._leave(room)
        release = self._node.config.release_after
        if release is not None and not room.quiesced:
            self._node.after(release, lambda: self._release(room, release))

    def _release(self, room: Receiving, after: float) -> None:
        """Give memory back without proof, as the operator chose."""
        open_writers = [name for name, writer in room._writers.items() if not writer.closed]
        if open_writers:
            log.warning(
                "room %d: memory is given back %.1f s after the failure without proof that %s stopped writing",
                room.room,
                after,
                ", ".join(open_writers),
            )
            for name in open_writers:
                self._closed(room, name)

    def _tell_unasked(self, room: Receiving, instance: Instance, reason: Reason) -> None:
        """Prefill ranks may hold the room open, waiting for a request that will not come."""
        for address, source in instance.sources.items():
            if source.card is not None:
                failed = wire.Failed(
                    sender=self._node.name,
                    to=source.name,
                    room=room.room,
                    generation=room.generation,
                    reason=reason,
                    attempt=room.attempt,
                )
                self._node.send(failed, address)

    def _not_met(self, room: Receiving) -> list[str] | None:
        """Ranks that have not said that they have a room for this use; ``None`` where it is not known who they are."""
        if room._writers:
            return [name for name, writer in room._writers.items() if not writer.met]
        sources = room._instance.sources.values() if room._instance is not None else ()
        names = [source.name for source in sources if source.card is not None]
        return names if names and len(names) == len(sources) else None

    def _leave(self, room: Receiving) -> None:
        """Let go of the instance, once nothing of it can land in this room's memory; until then it is asked again."""
        room._settle()
        if room.status in ENDED:
            self._incoming.release(room)
        if room._instance is None or room.status not in ENDED or not room.quiesced:
            return
        if room._instance.rooms.get(room.room) is room:  # else its id is in use again
            del room._instance.rooms[room.room]

    def _closed(self, room: Receiving, name: str) -> None:
        writer = room._writers.get(name)
        if writer is not None:
            writer.closed = True
            self._leave(room)

    def _verify(self, room: Receiving, writer: Writer) -> None:
        """Compare what a writer says it sent with what lies in memory; success and quiescence wait for it."""
        what = "the comparison of digests"
        writer.verified = True
        writer.begin(what)

        def job() -> None:
            try:
                reason = check_arrived(room, writer)
            except BaseException as error:
                reason = reason_of(error, room=room.room, peer=writer.source.name)
            self._node.post(lambda: done(reason))

        def done(reason: Reason | None) -> None:
            writer.end(what)
            if reason is not None:
                self.fail(room, reason)
            self._maybe_succeed(room)

        self._node.verifiers.submit(("room", room.room, writer.source.name), job)

    # Small helpers.

    def _expired(self, room: Receiving) -> None:
        cause, hint = self._missing(room)
        self.fail(room, room._reason_for("room.deadline", "a room passed its deadline on decode", cause, hint))

    def _missing(self, room: Receiving) -> tuple[str, str]:
        """What a room was still waiting for."""
        instance = room._instance
        if instance is None:
            return "prefill is still unknown", ""
        if instance.stage is not Stage.READY:
            return self._instances.explain(instance)
        if not room._accepted:
            return "the engine never accepted it", "call accept() once memory is allocated"
        lacking = [name for name, writer in room._writers.items() if writer.finished is None]
        held = [f"{writer.waits} for {name}" for name, writer in room._writers.items() if writer.owes]
        hooks = ((f"{key}: {name}", hook) for key, w in room._writers.items() for name, hook in w.hooks.items())
        parts = [f"not finished: {', '.join(lacking)}"] if lacking else []
        parts += [f"not ended here: {', '.join(held)}"] if held else []
        return f"{'; '.join(parts) or missing_on_decode(room)}{waits_of(hooks)}", ""

    def _use(self, room: Receiving, writer: Writer) -> Use:
        return Use(sender=self._node.name, to=writer.source.name, room=room.room, generation=room.generation)
