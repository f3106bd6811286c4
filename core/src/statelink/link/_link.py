"""The engine's side of Statelink: one object per rank."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from statelink._arguments import duration, shown, wait_time, words
from statelink._logs import logger
from statelink.errors import ConfigError, RoomError, TransferError
from statelink.plan import MAX_TOKENS, checked_content, checked_int
from statelink.wire import parse_endpoint

from ._control import Control
from ._exits import AtExit
from ._inspect import Inspection, snapshot
from ._room_table import RoomTable, closed, suspended, unfinished
from ._switch_interval import SwitchInterval
from .decode import DecodeRole, Receiving
from .peers import can_receive, can_send
from .prefill import PrefillRole, Sending, Wanted

if TYPE_CHECKING:
    from statelink.state import Inventory

    from ._context import Context
    from ._ready import Ready
    from ._room import Room
    from ._room_state import RoomState
    from .peers import Peer

__all__ = ["Link"]

log = logger("statelink.link")

END_SECONDS = 5.0
"""Seconds to wait for the end of a control thread that has just begun."""
MAX_ROOM = (1 << 64) - 1
MAX_NAME = 255
"""Most characters of an instance's name. No description has a longer one."""


class Link:
    """A rank's connection to its peers. Made by `statelink.open`; a context manager that closes itself.

    The configured role says what it may do: a ``prefill`` link sends, a ``decode`` link receives, and a link of the
    role ``both`` does both, over one registration of its memory. An id may then be sent and received at the same time.

    Thread-safe. It belongs to the process that opened it: in a forked child every call but `close` raises `ClosedError`
    (``closed.forked``). Nothing blocks but `close`, `suspend`, `resume` and `Room.wait`. The registered memory belongs
    to the engine and must outlive the link.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._table = RoomTable(context)
        self._changing = threading.RLock()
        """Lets one thread of the engine suspend, resume or close the link at a time. That thread's signal handlers may
        close it, too."""
        self._suspended = False
        self._closed = False
        self._clean: bool | None = None
        """Whether the link closed in time; ``None`` until it has closed."""
        self._ended = False
        """Whether it has closed, and no thread of it is left."""
        role = context.config.role
        self._prefill = PrefillRole(context, self._table) if can_send(role) else None
        self._decode = DecodeRole(context, self._table) if can_receive(role) else None
        self._control = Control(context, self._prefill, self._decode)
        self._inspection: Inspection | None = None
        self._at_exit = AtExit(self._end_rooms, self._close_at_exit)
        self._interval = SwitchInterval(context.config.switch_interval)
        try:
            if context.config.inspect:
                self._inspection = Inspection(context.name, self.snapshot)
                self._inspection.start()
            self._at_exit.note()
            self._control.start()
        except BaseException:
            self._at_exit.forget()
            self._interval.give_up()
            if self._inspection is not None:
                self._inspection.close()
            context.loop.stop(END_SECONDS)
            raise

    @property
    def name(self) -> str:
        """This link's name, unique among all processes ever started."""
        return self._context.name

    @property
    def address(self) -> str:
        """Where peers dial it, with its public key if it has one: what a router hands to decode."""
        return str(self._context.channel.endpoint)

    @property
    def backend(self) -> str:
        """Name of the backend."""
        return self._context.backend.name

    @property
    def inventory(self) -> Inventory:
        """This rank's components and regions."""
        return self._context.inventory

    @property
    def quiet_within(self) -> float | None:
        """Seconds after a room failed on decode in which its memory quiesces in any case; ``None`` without a bound.

        There is a bound where the memory's owner can stop writes alone (a fence of the backend, as of ``tcp``). Then
        only this process's own threads have work to do, and the bound is 'liveness'. Elsewhere a writer that is lost
        may write at any time, unless 'take_back_after' is set. For prefill's memory there is no bound.
        """
        return self._context.quiet_within if self._decode is not None else None

    def receive(
        self,
        room: int,
        peer: Peer,
        tokens: int | None = None,
        items: Mapping[str, Any] | None = None,
        *,
        prefix: int = 0,
        ready: Ready | None = None,
        deadline: float | None = None,
        content: bytes | None = None,
    ) -> Receiving:
        """On decode: expect a request's state. Needs no memory yet.

        No other decode instance may ask for this use of the id. If the room fails here before prefill's room belongs to
        it, prefill's room fails with the same reason, as after `decline`: also if prefill opens it later, and if the
        two sides refused each other when the instances connected, but not if a link refused the other's handshake.

        Args:
            room: The non-zero 64-bit id that both sides use for the request.
            peer: The prefill instance: its name, or the addresses of its ranks. Connecting happens in the background.
            tokens: N: positions of the request; prefill must state the same. When not given, prefill states it, and
                it must fit the number of pages that are accepted. Refused where components depend on more than that,
                as windows do, unless pages have one token: see `Receiving.accept`.
            items: If given, `Receiving.accept` is called with them at once.
            prefix: See `Receiving.accept`.
            ready: See `Receiving.accept`.
            deadline: Seconds that the room may take; the configured default when not given.
            content: See `send`.

        Raises:
            RoomError: The id is not valid or in use, too many rooms are open, the items are not what must arrive, or
                the number of tokens is needed (``room.tokens``).
            ConfigError: This link's role is ``prefill``, or ``peer`` is neither a name nor addresses.
            ClosedError: The link is closed.
        """
        role = self._decode
        if role is None:
            raise _not_this_role("receive()", "decode", self._context.config.role)
        where = _valid_peer(peer)
        known = 1 if tokens is None else tokens
        room, known, deadline = self._valid(room, known, deadline, content)
        tokens = None if tokens is None else known
        return role.receive(room, where, tokens, items, prefix, ready, deadline, content or b"")

    def send(
        self,
        room: int,
        tokens: int | None = None,
        *,
        deadline: float | None = None,
        content: bytes | None = None,
    ) -> Sending:
        """On prefill: open a room, whose state is then pushed. Decode need not be known, or have asked for the room.

        The room is for the first decode instance of which every rank has asked for it. A decode rank that gives the
        request up before that ends the room, unless another one has asked to `keep` it.

        Args:
            room: The non-zero 64-bit id that both sides use for the request.
            tokens: N: positions of the request; decode must state the same. When not given, prefill takes it from
                decode. Until then, each push names its ``span`` and whether it is the ``last``. The room fails if the
                last push does not end at decode's N.
            deadline: Seconds that the room may take; the configured default when not given.
            content: What the request is: 1 to 64 bytes, as `statelink.content_of` makes them. Decode states the same.
                If it states another one, or if one side alone states one, the room fails on both sides
                (``room.content``) before anything is pushed.

        Raises:
            RoomError: The id is not valid or in use, too many rooms are open, or the content is none.
            ConfigError: This link's role is ``decode``.
            ClosedError: The link is closed.
        """
        role = self._prefill
        if role is None:
            raise _not_this_role("send()", "prefill", self._context.config.role)
        known = 1 if tokens is None else tokens
        room, known, deadline = self._valid(room, known, deadline, content)
        return role.send(room, None if tokens is None else known, deadline, content or b"")

    def wanted(self, timeout: float = 0.0) -> list[Wanted]:
        """On prefill: rooms that decode asks for, and that this link has not opened. Each is named once.

        For an engine that serves requests of which only decode knows, such as those for what a prefix cache holds. It
        opens each of these rooms with `send`, and aborts at once what it cannot serve: decode then hears the reason. A
        room that nobody opens fails on decode at its deadline.

        From the first call on, rooms wait here for the next one, with those for which decode had asked earlier.

        Args:
            timeout: Seconds to wait for the first one. Does not wait by default.

        Raises:
            RoomError: ``timeout`` is no number.
            ConfigError: This link's role is ``decode``.
            ClosedError: The link is closed.
        """
        if self._prefill is None:
            raise _not_this_role("wanted()", "prefill", self._context.config.role)
        self._check_open()
        return self._prefill.wanted(wait_time(timeout))

    def decline(self, room: int, peer: Peer, why: str = "the engine declined it") -> None:
        """On decode: tell a prefill instance that this side will not receive a room, which it never opened.

        Prefill's room fails with this reason, even if prefill opens it later, unless it belongs to another instance.
        Does not block: connecting happens in the background. An instance that cannot be reached within the configured
        deadline is not told.

        Args:
            room: The id that prefill uses for the request.
            peer: The prefill instance: its name, or the addresses of its ranks.
            why: The cause, for the reason on prefill (``room.declined``).

        Raises:
            RoomError: The id is not valid, or this side has opened the room: abort it then.
            ConfigError: This link's role is ``prefill``, or ``peer`` is neither a name nor addresses.
            ClosedError: The link is closed.
        """
        if self._decode is None:
            raise _not_this_role("decline()", "decode", self._context.config.role)
        where = _valid_peer(peer)
        room, _, _ = self._valid(room, 1, None)
        if self._suspended:
            raise suspended(self._context)
        self._decode.decline(room, where, words(why))

    def keep(self, room: int, peer: Peer, seconds: float) -> None:
        """On decode: ask a prefill instance to keep a request's state, while the request waits for memory here.

        For engines that know a request long before they have memory for it, and so open its room late. Prefill's room
        then fails no earlier than ``seconds`` from this call, or the time that prefill's engine itself gave the room
        last (``deadline`` or `Room.extend`), counted from the message, if that is less. Call it again, in time, for
        as long as the request waits. It has no effect if prefill's room is not open, has ended, or belongs to another
        decode instance. So the call before prefill's opens nothing, and the next one counts.
        Does not block: connecting happens in the background.

        Args:
            room: The id that prefill uses for the request.
            peer: The prefill instance: its name, or the addresses of its ranks.
            seconds: Above zero, and finite.

        Raises:
            RoomError: A number is not valid, or this side has opened the room.
            ConfigError: This link's role is ``prefill``, or ``peer`` is neither a name nor addresses.
            ClosedError: The link is closed.
        """
        if self._decode is None:
            raise _not_this_role("keep()", "decode", self._context.config.role)
        where = _valid_peer(peer)
        room, _, _ = self._valid(room, 1, None)
        try:
            seconds = duration(seconds, f"the time to keep room {room}", endless=False)
        except RoomError as error:
            hint = "prefill must know when decode is gone"
            who = {"backend": self.backend, "link": self.name}
            raise RoomError(error.reason.what, cause=error.reason.cause, hint=hint, code=error.code, **who) from None
        if self._suspended:
            raise suspended(self._context)
        self._decode.keep(room, where, seconds)

    def siblings(self, addresses: Sequence[str]) -> None:
        """Name the other ranks of this link's own instance, instead of the option ``siblings``.

        For ranks that listen on ports that the system chose, and learn each other's addresses once all are open. On
        decode, it counts for prefill instances that are looked up from now on: call it before the first `receive`. On
        prefill, only `Sending.poll_all` needs it. Does not block.

        Args:
            addresses: `address` of every other rank, in any order.

        Raises:
            ConfigError: One is no address, or this link's own.
            ClosedError: The link is closed.
        """
        self._check_open()
        given: object = addresses  # without a type checker, an engine may pass anything
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise ConfigError("siblings are no list of addresses", cause=f"got {shown(given)}", code="config.peer")
        given = tuple(given)
        if not all(isinstance(each, str) for each in given):
            raise ConfigError("siblings are no list of addresses", cause=f"got {shown(given)}", code="config.peer")
        others = [str(parse_endpoint(each)) for each in given]
        if self.address in others:
            raise ConfigError(
                "a link is named as its own sibling",
                cause=f"{self.address.partition('@')[0]} is its own address",
                hint="name the other ranks only",
                code="config.peer",
            )
        if self._decode is not None:
            self._decode.set_siblings(others)
        if self._prefill is not None:
            self._prefill.set_siblings(others)

    @property
    def suspended(self) -> bool:
        """Whether the link is suspended: its memory is not registered, and no room can be opened."""
        return self._suspended

    def suspend(self, timeout: float = 30.0) -> None:
        """Unregister the memory, which the engine may then unmap or give to others. Blocks.

        For an engine that gives its memory away for a while and gets it back at the same addresses. The link keeps its
        name and address. It tells its peers, and forgets them. Rooms of peers that have asked this link fail; others
        wait, until their deadlines. Until `resume`, calls that open or decline rooms raise `ClosedError`
        (``closed.suspended``). Does nothing if the link is suspended.

        Args:
            timeout: Seconds to wait for proof that the memory of ended rooms is quiet, and for the backend.

        Raises:
            RoomError: A room has not ended (see `Room.abort`), or there was no proof in time that nothing touches its
                memory, also if it was taken back (``room.unfinished``). Or the link's control thread is late, or
                ``timeout`` is no number. The link goes on as before.
            TransferError: The backend could not unregister the memory in time. The memory may still be registered, and
                the link is suspended: only `resume` and `close` help.
            ClosedError: The link is closed.
        """
        until = time.monotonic() + wait_time(timeout)
        with self._changing:
            self._check_open()
            if self._suspended:
                return
            self._table.shut()
            told = False
            try:
                kept = []
                for state, room in self._table.all():
                    room.wait(max(0.0, until - time.monotonic()), quiesced=True)
                    if not state.memory.quiesced:
                        kept.append(state.room)
                told = not kept and self._control.suspend(max(0.5, until - time.monotonic()))
            finally:
                if not told:
                    self._table.unshut()
            if not told:
                kept = kept or [state.room for state in self._table.unproven()]
                hint = "wait longer; if nobody can say when memory is quiet, close this link and open another one"
                raise unfinished(self._context, kept, "have ended, and transfers of theirs may be in flight", hint)
            self._suspended = True
            self._context.deregister(max(0.5, until - time.monotonic()))

    def resume(self) -> None:
        """Register the memory again, at the same addresses. Blocks; does nothing unless suspended.

        Peers that asked for rooms meanwhile are answered, and rooms can be opened again.

        Raises:
            StatelinkError: The memory is not what the inventory says, or the backend does not start or register it, or
                the link's control thread is late. The link stays suspended; call this again once the cause is gone.
            ClosedError: The link is closed.
        """
        with self._changing:
            self._check_open()
            if self._suspended:
                made = self._context.register()
                if not self._control.resume(lambda: self._context.use(*made)):
                    self._context.discard(made[0])
                    raise TransferError(
                        "the link cannot be resumed",
                        cause="its control thread has not taken the registered memory in time",
                        hint="call resume() again; the log says whether a job of that thread failed",
                        backend=self.backend,
                        link=self.name,
                    )
                self._suspended = False
                self._table.unshut()

    def rooms(self) -> list[Room]:
        """Rooms that have not ended, or whose memory has not quiesced: for an engine that gives all of them up."""
        self._context.check_process()
        return [room for _, room in self._table.all()]

    def changes(self, timeout: float | None = 0.0) -> list[Room]:
        """Rooms whose status or quiescence changed since the last call.

        An engine that calls this has to go on calling it: if more than twice ``max_rooms`` changed rooms wait, the
        oldest are dropped and counted. Of the rooms that changed before the first call, the last 4096 are kept.

        Args:
            timeout: Seconds to wait for the first change; ``None`` waits for as long as it takes. Does not wait by
                default.

        Raises:
            RoomError: ``timeout`` is no number.
        """
        if type(timeout) is not float or timeout:
            timeout = None if timeout is None else wait_time(timeout)
        if self._context.forked:
            self._context.check_process()
        return self._table.changes.take(timeout)

    def snapshot(self) -> dict[str, Any]:
        """Peers, rooms, the memory that rooms hold, queues and dropped frames, as plain values; see docs/operate.md."""
        self._context.check_process()
        return snapshot(self._context, self._table, self._control)

    def _valid(
        self, room: int, tokens: int, deadline: float | None, content: bytes | None = None
    ) -> tuple[int, int, float | None]:
        if self._closed or self._context.forked:
            self._check_open()
        try:
            if type(room) is not int or not 0 < room <= MAX_ROOM:
                room = checked_int(room, "a room id", 1, MAX_ROOM, code="room.id")
            if type(tokens) is not int or not 0 < tokens <= MAX_TOKENS:
                tokens = checked_int(tokens, f"the number of tokens of room {room}", 1, MAX_TOKENS)
            if deadline is not None:
                deadline = duration(deadline, f"the deadline of room {room}")
            if content is not None:
                checked_content(content)
        except RoomError as error:
            reason = error.reason
            who = {"backend": self.backend, "link": self.name}
            raise RoomError(reason.what, cause=reason.cause, hint=reason.hint, code=reason.code, **who) from None
        return room, tokens, deadline

    def _check_open(self) -> None:
        if self._context.forked:
            self._context.check_process()
        if self._closed:
            raise closed(self._context)

    def close(self, timeout: float = 5.0) -> bool:
        """Fail rooms that have not ended, wait for transfers, say goodbye, and free everything. May be called twice.

        The rooms fail with ``peer.lost``, on both sides. In a forked child it touches nothing: the link belongs to the
        parent process.

        Args:
            timeout: Seconds to wait, about, for transfers and threads to end.

        Returns:
            Whether everything ended in time. If not, something may still touch the memory of rooms that have not
            quiesced, and of rooms whose memory was taken back without proof. A thread that calls this while another one
            closes the link waits for that one, and returns the same.

        Raises:
            RoomError: ``timeout`` is no number. The link stays open.
        """
        timeout = wait_time(timeout)
        self._closed = True
        if self._context.forked:
            # Threads, sockets and registered memory belong to the parent process, and a thread of it may hold a lock.
            return self._clean is not False
        with self._changing:
            if self._clean is not None:
                return self._clean
            clean = self._clean = self._close(timeout)
        if self._ended:
            self._at_exit.forget()
        self._context.tell("statelink_link_closed", link=self)
        return clean

    def _end_rooms(self) -> list[tuple[RoomState, Room]]:
        """Begin to close: fail the rooms, and let none be opened. Returns the rooms."""
        self._closed = True
        self._table.end()
        entries = self._table.all()
        for state, _ in entries:
            self._context.post_job(state.link_closes)
        return entries

    def _close_at_exit(self, timeout: float) -> bool:
        """Close within about ``timeout`` seconds, whatever other threads do with the link meanwhile."""
        until = time.monotonic() + timeout
        if not self._changing.acquire(timeout=timeout):
            return False
        try:
            self.close(max(0.5, until - time.monotonic()))
            return self._ended
        finally:
            self._changing.release()

    def _close(self, timeout: float) -> bool:
        entries = self._end_rooms()
        until = time.monotonic() + timeout
        for _, room in entries:
            room.wait(max(0.0, until - time.monotonic()), quiesced=True)
        remaining = max(0.5, until - time.monotonic())
        ended = self._ended = self._control.stop(remaining)
        proven = all(state.memory.proven for state in (*(each for each, _ in entries), *self._table.unproven()))
        self._interval.give_up()
        if self._inspection is not None:
            self._inspection.close()
        return ended and proven

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *exc: object) -> None:
        if not self.close():
            log.warning("%r did not end in time: memory of rooms that are not quiesced may still be touched", self)

    def __repr__(self) -> str:
        return f"<Link {self.name} over {self.backend} at {self.address}>"


def _not_this_role(call: str, needed: str, role: str) -> ConfigError:
    return ConfigError(
        f"only {needed} may call {call}",
        cause=f"this link's role is {role!r}",
        hint=f"open the link with the role {needed!r} or 'both'",
        code="config.role",
    )


def _valid_peer(peer: Peer) -> Peer:
    """The peer that the engine names, checked as far as possible without a look-up.

    Raises:
        ConfigError: It is neither a name nor addresses.
    """
    one = isinstance(peer, str)
    names: tuple[Any, ...] = ()
    if type(peer) is tuple:
        names = peer
    elif isinstance(peer, Sequence):
        names = (peer,) if one else tuple(peer)
    try:
        right = _are_names(names, one)
    except TypeError:  # something that is no text, and that the cache cannot take as a key
        right = False
    if not right:
        raise ConfigError(
            f"a peer is {shown(peer)}",
            cause="the name of an instance, an address, or the addresses of all of its ranks are expected",
            code="config.peer",
        )
    return names[0] if one else names


@functools.lru_cache(maxsize=1024)
def _are_names(names: tuple[Any, ...], one: bool) -> bool:
    """Whether these are texts, and addresses where they have to be.

    The answers are cached, because an engine names the same few peers in all its requests.

    Args:
        names: The addresses of an instance, or its name.
        one: Whether it may be a name.

    Raises:
        ConfigError: One is no address.
    """
    if not names or not all(isinstance(name, str) and name.isprintable() and name for name in names):
        return False
    if not one or names[0].startswith("tcp://"):
        for address in ",".join(names).split(","):
            parse_endpoint(address)
        return True
    return len(names[0]) <= MAX_NAME
