"""A worker's side: the link, and the rooms of requests that are under way.

vLLM calls everything here from the worker's main thread, in each step. Nothing blocks but `open` and `close`, and
`WorkerSide.results` for a moment in a step that runs no model.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import statelink
from statelink import Status
from statelink.errors import RoomError, StatelinkError

from ._chunks import EarlyRoom, EarlyRooms
from ._messages import FromWorker, Receive, Send, Tables, ToWorker
from ._offers import ENDED, Offer
from ._stats import TransferStats, declined

if TYPE_CHECKING:
    from statelink import Link, LinkConfig, Room
    from statelink.state import Inventory

    from ._inventory import Group
    from ._leftovers import Leftovers

__all__ = ["Results", "WorkerSide"]

log = logging.getLogger("vllm.statelink")

ABORT_SECONDS = 10.0
"""Most seconds that the end of a room is waited for which was given up. The link's own thread ends it, at once."""
REST_SECONDS = 3e-3
"""Seconds for which a step without a model waits for state at most. Otherwise vLLM would sleep a millisecond, run
another such step, and hear of state that comes meanwhile a millisecond or two late. A request that arrives meanwhile
waits as long, so this is no longer than what the state of a short prompt takes."""


class Results(NamedTuple):
    """Requests that vLLM need not wait for any more.

    Attributes:
        sent: Their blocks are not read any more.
        received: Their state is here, or they have failed.
        failed: Those of ``received`` that failed.
    """

    sent: set[str]
    received: set[str]
    failed: set[str]


class WorkerSide:
    """Sends and receives.

    Args:
        config: The link's configuration.
        inventory: What this rank holds.
        groups: How block tables become indices.
        leftovers: Zeroes blocks that are received in part.
        ready: Makes an event that is true once all that was launched before this moment is computed, or ``None`` where
            it is.
        number: The number of a layer in the whole model, by its name; ``None`` if no layer is sent before all of them
            are computed.

    Raises:
        StatelinkError: The link cannot be opened.
    """

    def __init__(
        self,
        config: LinkConfig,
        inventory: Inventory,
        groups: tuple[Group, ...],
        leftovers: Leftovers,
        ready: Callable[[], Any] = lambda: None,
        number: Callable[[str], int] | None = None,
    ) -> None:
        self.link: Link = statelink.open(config, inventory)
        self._has_siblings = inventory.ranks > 1 and config.role != "prefill"
        self._groups = groups
        self._leftovers = leftovers
        self._deadline = config.deadline
        self._early = EarlyRooms(self.link, groups, config.deadline, ready, number)
        self._ready = ready
        self._sending: dict[str, Offer] = {}
        self._receiving: dict[str, Room] = {}
        self._patience = config.liveness
        self._until: dict[str, float] = {}
        """When a request is given up whose other server has not said a word of its room, by when it would have."""
        self._items_of: dict[str, Mapping[str, Any]] = {}
        self._unquiet: dict[str, Room] = {}
        """Failed requests that vLLM was told of, and whose memory may still be written."""
        self._results = Results(set(), set(), set())
        self._said = FromWorker()
        self._stats = TransferStats()
        self._idle = False

    @property
    def settled(self) -> bool:
        """Whether nothing is left of any request."""
        return not (self._sending or self._receiving or self._unquiet or self._items_of or self._early)

    def prepare(self, step: ToWorker) -> None:
        """Take what the step computes of prompts. Called before the model runs."""
        for name in step.withdraw:
            self._early.withdraw(name)
        for name, each in step.open.items():
            self._early.open(name, each)
        self._early.begin(step.chunks)
        self._early.go_on()

    def layer(self, name: str) -> None:
        """A layer of attention is launched. Sends the layers up to it, where they make up a group."""
        self._early.layer(name)

    def computed(self) -> None:
        """All layers are launched. Sends what was not sent of them. Does nothing if it was called in this step."""
        self._early.computed()

    def failed(self) -> None:
        """The forward pass has failed: what was sent of it must not be used."""
        self._early.failed()

    def begin(self, step: ToWorker) -> None:
        """Begin what the scheduler asks for. What cannot begin fails alone."""
        self._idle = step.idle
        if step.addresses and self._has_siblings:
            self.link.siblings([each for each in step.addresses if each != self.link.address])
        for name, send in step.send.items():
            try:
                self._send(name, send)
            except StatelinkError as error:
                # Where there is nothing to send, the room may have ended already, and decode then knows.
                level = logging.WARNING if send.tables else logging.DEBUG
                log.log(level, "the state of request %s cannot be sent: %s", name, error.reason.coded)
                offer = self._sending.get(name)
                if send.tables and (offer is None or not offer.rooms):
                    self._sending.pop(name, None)
                    self._results.sent.add(name)
        for name, receive in step.receive.items():
            try:
                self._receive(name, receive)
            except StatelinkError as error:
                if not receive.tables:
                    # vLLM names a client that leaves while state is loaded twice. Then the other one tells prefill.
                    level = logging.DEBUG if error.code == "room.in_use" else logging.WARNING
                    log.log(level, "prefill is not told that it need not send request %s: %s", name, error.reason.coded)
                else:
                    log.warning(
                        "the state of request %s cannot be received, and kv_load_failure_policy decides whether its "
                        "prompt is computed here: %s",
                        name,
                        error.reason.coded,
                    )
                    self._results.received.add(name)
                    self._results.failed.add(name)
                    # Otherwise prefill would hold the request's blocks until its deadline. If the link is closed, no
                    # peer is named, or another request has the room, this fails, and prefill holds them until then.
                    # The room of another request is not this one's to decline.
                    if not receive.for_another:
                        why = filter(None, ("decode cannot receive it", error.reason.what, error.reason.cause))
                        with contextlib.suppress(StatelinkError):
                            self.link.decline(receive.room, receive.peer, ": ".join(why))
        for name, keep in step.keep.items():
            try:
                self.link.keep(keep.room, keep.peer, keep.seconds)
            except StatelinkError as error:
                log.warning("prefill is not asked to keep request %s: %s", name, error.reason.coded)
        for name, seconds in step.extend.items():
            offer = self._sending.get(name)
            if offer is not None:
                offer.extend(seconds)
        for name in step.repeated:
            offer = self._sending.get(name)
            if offer is not None:  # a decode that has claimed it has got this answer, and not the other one
                offer.abort_unclaimed("a router sent the request again")
        for name, cause in step.unclaimed.items():
            offer = self._sending.get(name)
            if offer is None:  # it has just ended
                continue
            if offer.claimed:
                self._said.claimed.add(name)
            elif cause:
                offer.abort_unclaimed(cause)
        self._results.received.update(step.again)
        for name in step.abort:
            room = self._receiving.get(name)
            if room is not None:
                room.abort("vLLM aborted the request on decode")

    def _send(self, name: str, job: Send) -> None:
        early = self._early.close(name)
        if early is not None and not job.tables:
            early.room.abort(job.why)
            return
        if not job.tables:
            self.link.send(job.room, job.tokens, content=job.content or None).abort(job.why)
            return
        offer = self._sending[name] = Offer(held=job.hold > 0)
        ready = self._ready() if job.running else None
        for each in (job, *job.shorter):
            self._offer(offer, each, early if each is job else None, ready)

    def _offer(self, offer: Offer, job: Send, early: EarlyRoom | None, ready: Any) -> None:
        if early is None:
            room = self.link.send(job.room, job.tokens, deadline=job.hold or None, content=job.content or None)
        else:
            room = early.room
        offer.rooms.append(room)
        try:
            if early is None:
                room.push(self._items(job.tables, job.tokens, 0), ready=ready)
            else:
                room.extend(job.hold or self._deadline)  # as long as that of a room that is opened now
                self._early.finish(early, job)
        except StatelinkError as error:
            room.abort(f"prefill cannot push: {error}")
            raise

    def _receive(self, name: str, job: Receive) -> None:
        if not job.tables:
            self.link.decline(job.room, job.peer, job.why)
            return
        if job.for_another:
            raise RoomError(
                "prefill's answer is for another request",
                cause=f"content {job.answered.hex()} in 'kv_transfer_params', {job.content.hex()} on decode",
                hint="look at the router, which may have mixed two answers up, and at tokenizers and chat templates",
                room=job.room,
                code="room.content",
            )
        items = self._items(job.tables, job.tokens, job.prefix)
        ready = self._leftovers.zero(items)
        room = self.link.receive(
            job.room,
            job.peer,
            job.tokens,
            items,
            prefix=job.prefix,
            ready=ready,
            content=job.content or None,
        )
        self._receiving[name] = room
        if job.history:
            self._until[name] = time.monotonic() + self._patience
        self._items_of[name] = items

    def _items(self, tables: Tables, tokens: int, prefix: int) -> Mapping[str, Any]:
        return {group.component.name: group.indices(tables[group.table], tokens, prefix) for group in self._groups}

    def results(self) -> Results:
        """What has ended since the last call. Each request is named once.

        In a step that is idle, this waits up to `REST_SECONDS` for the oldest request that is received, or else sent,
        if nothing has ended.
        """
        made, self._results = self._results, Results(set(), set(), set())
        rooms = self._receiving.values() or [room for offer in self._sending.values() for room in offer.rooms]
        if self._idle and rooms and not any(made) and not any(room.status in ENDED for room in rooms):
            next(iter(rooms)).wait(REST_SECONDS, quiesced=True)
        for name, offer in list(self._sending.items()):
            if offer.over:
                del self._sending[name]
                made.sent.add(name)
                self._over("sent", name, offer.taken, unwanted=offer.unwanted)
        for name in [name for name, until in self._until.items() if until <= time.monotonic()]:
            del self._until[name]
            if self._receiving[name].status is Status.BOOTSTRAPPING:
                self._receiving[name].abort("the other server does not have the state any more")
        for name, room in list(self._receiving.items()):
            if room.status is Status.SUCCEEDED and room.quiesced:
                made.received.add(name)
                self._lacking(name, room)
            elif room.status is Status.FAILED:
                made.received.add(name)
                made.failed.add(name)
                if not room.quiesced:
                    self._unquiet[name] = room
                    self._said.unquiet[name] += 1
            else:
                continue
            del self._receiving[name], self._items_of[name]
            self._until.pop(name, None)
            self._over("received", name, room)
        for name, room in list(self._unquiet.items()):
            if room.quiesced:
                del self._unquiet[name]
                self._said.quiet[name] += 1
        return made

    def _lacking(self, name: str, room: Room) -> None:
        """Note the blocks of a request that vLLM may not keep for others."""
        moved, items = room.report.moved, self._items_of[name]
        blocks: set[int] = set()
        for group in self._groups:
            component = group.component.name
            if component in moved:
                blocks |= group.lacking(items[component], moved[component].nbytes)
        if blocks:
            self._said.lacking[name] = blocks

    def said(self) -> FromWorker | None:
        """What the scheduler has to know besides `results`; called after it."""
        self._early.go_on()
        made, self._said = self._said, FromWorker()
        made.settled = self._early.settled()
        return made or None

    def stats(self) -> TransferStats | None:
        """What was moved since the last call."""
        made, self._stats = self._stats, TransferStats()
        return None if made.is_empty() else made

    def _over(self, what: str, name: str, room: Room, *, unwanted: bool = False) -> None:
        unwanted = unwanted or declined(room)
        self._stats.record(room, unwanted=unwanted)
        if room.status is Status.SUCCEEDED:
            log.debug("%s request %s: %s", what, name, room.report)
        elif unwanted:
            log.info("request %s was not %s: %s", name, what, room.reason)
        elif what == "sent" and room.reason is not None and room.reason.code == "room.unclaimed":
            log.debug(
                "request %s was not %s: %s", name, what, room.reason
            )  # the scheduler's side warns of them together
        else:
            why = "" if room.reason is None else room.reason.coded
            log.warning("request %s could not be %s: %s", name, what, why)

    def suspend(self) -> None:
        """Give the memory up, before vLLM takes it away. Blocks until nothing touches it.

        vLLM has ended its requests. What is left are rooms whose other side has not come: they are given up.

        Raises:
            StatelinkError: Something may still read or write the memory.
        """
        left = self.link.rooms()
        for room in left:
            room.abort("this server goes to sleep")
        for room in left:
            room.wait(ABORT_SECONDS)
        self.link.suspend()

    def resume(self) -> None:
        """Register the memory again, at the same addresses. Blocks.

        Raises:
            StatelinkError: The memory is not what it was.
        """
        self.link.resume()

    def close(self) -> None:
        """Close the link. Blocks until its threads have ended."""
        if not self.link.close():
            log.warning("the link did not end in time: memory that vLLM frees may still be touched")
