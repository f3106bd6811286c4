"""The decode role: asking for rooms, and believing only what adds up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from statelink import wire
from statelink.backend import (
    MAX_PREPARED,
    UNKNOWN,
    Arrival,
    Fence,
    Fencing,
    Moved,
    Op,
    ReceiveHook,
    Side,
    Transfer,
)
from statelink.errors import Reason, StatelinkError

from ._deadlines import Deadlines
from ._departed import Departed
from ._hook_room import ReceiveRoom
from ._instances import Instances
from ._mover import reason_of
from ._receiving import Receiving, Writer
from ._stages import Stage
from ._status import ENDED, Status
from ._use import Use
from ._verify import check_arrived

if TYPE_CHECKING:
    from ._instance import Instance, Source
    from ._node import Node
    from ._rendezvous import Peer

__all__ = ["DecodeRole"]

log = logging.getLogger("statelink.link")


class DecodeRole:
    """Decode's half of the protocol. Runs on the control thread.

    Args:
        node: The link's control thread.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._instances = Instances(node, self)
        self._deadlines = Deadlines(node, self._expired)
        self._departed = Departed(node, self.goodbye)
        backend = node.backend
        owner = backend.capabilities.fences.get((Op.WRITE, Side.TARGET)) is Fence.OWNER
        self._fencing = backend if owner and isinstance(backend, Fencing) else None

    # Messages.

    def handle(self, message: wire.Message, address: str | None) -> None:
        """See `Role.handle`."""
        self._instances.handle(message, address)

    def from_source(self, message: wire.Message, source: Source) -> None:
        """See `Watcher.from_source`."""
        if not isinstance(message, (wire.Chunk, wire.Finished, wire.Failed, wire.Drained, wire.Note)):
            return
        room = self._node.rooms.get(message.room)
        if not isinstance(room, Receiving) or room.generation != message.generation:
            return
        writer = room._writers.get(source.name)
        if writer is not None:
            self._from_writer(message, room, writer)

    def _from_writer(self, message: wire.Message, room: Receiving, writer: Writer) -> None:
        if isinstance(message, wire.Chunk):
            room._set(Status.TRANSFERRING)
            room._chunks = max(room._chunks, message.number + 1)
            writer.came.update(message.grains.keys() & writer.expected.keys())
            self._arrived(room, writer, message)
        elif isinstance(message, wire.Finished):
            self._finished(room, writer, message)
        elif isinstance(message, wire.Failed):
            self.fail(room, message.reason)
        elif isinstance(message, wire.Drained):
            self._close_writer(room, writer.source.name)
        elif isinstance(message, wire.Note):
            hook = writer.hooks.get(message.component)
            if hook is not None and room.status not in ENDED:
                context, payload = writer.contexts[message.component], message.payload
                self._run_hook(room, writer, message.component, lambda: hook.message(context, payload))

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
                    failed = wire.Failed(**self._use(room, writer), reason=room._reason)
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
            self._close_writer(known, source.name)

    def goodbye(self, source: Source) -> None:
        """See `Watcher.goodbye`; also for a rank whose process has ended."""
        with self._node.lock:
            rooms = [room for room in self._node.rooms.values() if isinstance(room, Receiving)]
        for room in rooms:
            self._close_writer(room, source.name)

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
        """What waits on this side, by kind: nothing but its rooms."""
        return {}

    def busy(self) -> bool:
        """See `Role.busy`."""
        return bool(self._quarantined())

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
        for source in instance.parts:
            assert source.plan is not None
            hooks = {name: self._node.strategies[name].receiver() for name in source.plan.components}
            writer = Writer(source, source.plan, hooks, room._expect(source.plan))
            writer.contexts = {name: self._context(room, writer, name) for name in hooks}
            room._writers[source.name] = writer
        room._settle()

        def job() -> None:
            try:
                for writer in room._writers.values():
                    self._prepare(room, writer)
            except Exception as error:
                reason = reason_of(error, room=room.room, backend=self._node.backend.name)
                self._node.post(lambda: self.fail(room, reason))
            else:
                self._node.post(lambda: self._request(room))

        self._node.fences.submit(("room", room.room), job)

    def _prepare(self, room: Receiving, writer: Writer) -> None:
        """On a data thread: let the hooks say what their counterparts need, and grant the memory."""
        for name, hook in writer.hooks.items():
            prepared = hook.prepare(writer.contexts[name])
            if len(prepared) > MAX_PREPARED:
                raise StatelinkError(
                    f"the receive hook of component {name!r} prepared {len(prepared)} bytes",
                    cause=f"at most {MAX_PREPARED} travel with a request",
                    strategy=self._node.strategies[name].name,
                )
            if prepared:
                writer.prepared[name] = prepared
        if self._fencing is not None:
            addresses, nbytes = _granted(room, writer)
            self._fencing.grant(writer.source.name, room.room, room.generation, addresses, nbytes)

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
            )
            if not self._node.send(request, writer.source.address):
                self.fail(
                    room,
                    room._reason_for("peer.send", "a request could not be sent", peer=writer.source.name),
                )
                return

    def _arrived(self, room: Receiving, writer: Writer, message: wire.Chunk) -> None:
        for name, grains in message.grains.items():
            hook = writer.hooks.get(name)
            if hook is not None and type(hook).arrived is not ReceiveHook.arrived and room.status not in ENDED:
                context, arrival = writer.contexts[name], Arrival(message.number, grains, message.layers)
                self._run_hook(room, writer, name, lambda h=hook, c=context, a=arrival: h.arrived(c, a))  # type: ignore[misc]

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
        for name, hook in writer.hooks.items():
            if type(hook).finish is not ReceiveHook.finish and room.status not in ENDED:
                context = writer.contexts[name]
                self._run_hook(room, writer, name, lambda h=hook, c=context: h.finish(c))  # type: ignore[misc]
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
            self._revoke(room, writer)
        self._leave(room)

    def fail(self, room: Receiving, reason: Reason) -> None:
        """End a room in failure, tell every writer, and fence its memory or wait for the writers to drain."""
        if not room._fail(reason) or room._reason is None:
            return
        reason = room._reason
        for writer in room._writers.values():
            if not writer.asked:
                # The grant may be on its way on a data thread; it is taken back behind it.
                writer.closed = self._fencing is None
            # Also who was not asked yet is told: its engine may hold the room open, waiting for a request.
            self._node.send(wire.Failed(**self._use(room, writer), reason=reason), writer.source.address)
            self._revoke(room, writer)
            for name, hook in writer.hooks.items():
                if type(hook).abort is not ReceiveHook.abort:
                    context = writer.contexts[name]
                    self._run_hook(room, writer, name, lambda h=hook, c=context: h.abort(c))  # type: ignore[misc]
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
                self._close_writer(room, name)

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
                )
                self._node.send(failed, address)

    def _leave(self, room: Receiving) -> None:
        """Let go of the instance, once nothing of it can land in this room's memory; until then it is asked again."""
        room._settle()
        if room.status in ENDED:
            self._release_hooks(room)
        if room._instance is None or room.status not in ENDED or not room.quiesced:
            return
        if room._instance.rooms.get(room.room) is room:  # else its id is in use again
            del room._instance.rooms[room.room]

    def _release_hooks(self, room: Receiving) -> None:
        """Tell the hooks of writers of which nothing can land any more."""
        for writer in room._writers.values():
            if writer.released or writer.owes or not writer.closed:
                continue
            writer.released = True
            for name, hook in writer.hooks.items():
                if type(hook).released is not ReceiveHook.released:
                    call = partial(hook.released, writer.contexts[name])
                    self._node.movers.submit(("hook", room.room), call)

    def _revoke(self, room: Receiving, writer: Writer) -> None:
        """Take the memory back, where this side can alone; done means that nothing can land any more."""
        fencing = self._fencing
        if fencing is None:
            return
        name = writer.source.name

        def job() -> None:
            transfer = fencing.revoke(name, room.room, room.generation)
            self._await(transfer, lambda ok: self._close_writer(room, name) if ok else None)

        self._node.fences.submit(("room", room.room), job)

    def _close_writer(self, room: Receiving, name: str) -> None:
        writer = room._writers.get(name)
        if writer is not None:
            writer.closed = True
            self._leave(room)

    def _verify(self, room: Receiving, writer: Writer) -> None:
        """Compare what a writer says it sent with what lies in memory; success and quiescence wait for it."""
        writer.verified = True
        writer.owes += 1

        def job() -> None:
            try:
                reason = check_arrived(room, writer)
            except Exception as error:
                reason = reason_of(error, room=room.room, peer=writer.source.name)
            self._node.post(lambda: done(reason))

        def done(reason: Reason | None) -> None:
            writer.owes -= 1
            if reason is not None:
                self.fail(room, reason)
            self._maybe_succeed(room)

        self._node.verifiers.submit(("room", room.room, writer.source.name), job)

    # Hooks and transfers that run elsewhere.

    def _run_hook(self, room: Receiving, writer: Writer, component: str, call: Callable[[], Transfer | None]) -> None:
        writer.owes += 1

        def done(ok: bool, reason: Reason | None = None) -> None:
            writer.owes -= 1
            if not ok:
                what = f"a receive hook of component {component!r} failed"
                unknown = room._reason_for("room.hook", what, component=component, peer=writer.source.name)
                self.fail(room, reason or unknown)
            self._maybe_succeed(room)

        def job() -> None:
            try:
                transfer = call()
            except Exception as error:
                strategy = self._node.strategies[component].name
                reason = reason_of(
                    error, room=room.room, component=component, peer=writer.source.name, strategy=strategy
                )
                self._node.post(lambda: done(False, reason))
            else:
                if transfer is None:
                    self._node.post(lambda: done(True))
                else:
                    self._await(transfer, done)

        # Behind what is under way for the room (preparing its request), and not in the way of fences.
        movers = partial(self._node.movers.submit, ("hook", room.room), job)
        self._node.fences.submit(("room", room.room), movers)

    def _await(self, transfer: Transfer, then: Callable[[bool], None]) -> None:
        """Poll one transfer on a data thread, without holding the thread, until it ends."""
        node = self._node
        if transfer.outcome is None:
            try:
                node.backend.poll([transfer])
            except Exception:
                log.exception("backend %s failed to poll", node.backend.name)
        outcome = transfer.outcome
        if outcome is not None:
            node.post(lambda: then(outcome.ok))
        else:
            again: Callable[[], None] = lambda: self._await(transfer, then)  # noqa: E731 - a job
            node.post(lambda: node.after(0.001, lambda: node.fences.submit(("await", id(transfer)), again)))

    # Small helpers.

    def _expired(self, room: Receiving) -> None:
        cause, hint = self._missing(room)
        self.fail(room, room._reason_for("room.deadline", "a room passed its deadline on decode", cause, hint))

    def _missing(self, room: Receiving) -> tuple[str, str]:
        """What a room was still waiting for."""
        instance = room._instance
        if instance is None or instance.stage is not Stage.READY:
            stage = instance.stage.value if instance else "unknown"
            silent = instance.silent() if instance else ""
            cause = f"prefill instance {instance.key if instance else ''} is still {stage}"
            return (
                f"{cause}; no answer from {silent}" if silent else cause
            ), "is prefill running, and the address right?"
        if not room._accepted:
            return "the engine never accepted it", "call accept() once memory is allocated"
        missing = [name for name, writer in room._writers.items() if writer.finished is None]
        return f"not finished: {', '.join(missing) or 'hooks'}", ""

    def _use(self, room: Receiving, writer: Writer) -> Use:
        return Use(sender=self._node.name, to=writer.source.name, room=room.room, generation=room.generation)

    def _context(self, room: Receiving, writer: Writer, component: str) -> ReceiveRoom:
        def fail(error: Exception) -> None:
            reason = reason_of(error, room=room.room, component=component, peer=writer.source.name)
            self._node.post(lambda: self.fail(room, reason))

        return ReceiveRoom(self._node, room, writer, component, self._fencing, fail)


def _granted(room: Receiving, writer: Writer) -> tuple[np.ndarray, np.ndarray]:
    """Whole items of the buffers that a writer writes to: addresses and lengths, sorted, disjoint, merged."""
    inventory = room._node.inventory
    lows, sizes = [], []
    for share in writer.plan.assignment.shares:
        if not writer.hooks[share.component].in_place:
            continue  # it writes to memory of the strategy's
        component = inventory.component(share.component)
        chosen = set(share.buffers)
        buffers = [buffer for buffer in component.buffers if buffer.name in chosen]
        ids = np.sort(room._items[share.component].ids)
        if not len(ids):
            continue
        base = np.array([inventory.regions[b.region].address + b.offset for b in buffers], np.uint64)
        stride = np.array([b.stride for b in buffers], np.uint64)
        nbytes = np.array([b.layout.nbytes for b in buffers], np.uint64)
        lows.append((base[:, None] + stride[:, None] * ids.astype(np.uint64)).ravel())
        sizes.append(np.repeat(nbytes, len(ids)))
    if not lows:
        return np.empty(0, np.uint64), np.empty(0, np.uint64)
    low, size = np.concatenate(lows), np.concatenate(sizes)
    order = np.argsort(low, kind="stable")
    low, end = low[order], np.maximum.accumulate((low + size)[order])
    first = np.flatnonzero(np.concatenate(([True], low[1:] > end[:-1])))
    last = np.append(first[1:], len(low)) - 1
    return low[first], end[last] - low[first]
