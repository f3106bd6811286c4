"""The sockets of one link: one that listens, and one for each peer that it dials. One thread owns them."""

from __future__ import annotations

import itertools
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from statelink._logs import logger
from statelink.backend import Tally, close_in_children
from statelink.errors import ConfigError, WireError

from ._codec import MAX_FRAME, SMALL_MESSAGE_BYTES, decode, encode, limit_of
from ._dialling import Dialling, Trouble
from ._frames import PART, Frames, Parts, Watch, cut
from ._hosts import is_interface, numeric, only_this_host
from ._keys import key_to_url
from ._messages import KINDS, Hello
from ._open_files import check_descriptors, check_dials
from ._rendezvous import MAX_RANKS
from ._security import Endpoint, Gate, check_dial, check_listen, host_of, key_of, may_say, parse_endpoint, unbound

if TYPE_CHECKING:
    from ._keys import Keys
    from ._messages import Message
    from ._security import ListenAddress

__all__ = ["Channel"]

log = logger("statelink.wire")

QUEUE = 100_000
"""Messages that may wait for one peer. If there are more, the peer counts as unreachable."""
UNREAD_MESSAGES = 128
"""Messages that ZeroMQ holds for one connection before it stops reading from it: together at most 32 MiB."""
UNFINISHED = 128 << 20
"""Most bytes of unfinished messages in parts, of all peers together that have introduced themselves."""
UNFINISHED_UNINTRODUCED = 32 << 20
"""The same limit for all other peers together. It has space for at least two handshakes."""
MOST_SOCKETS = 4 * MAX_RANKS
"""Most sockets of ZeroMQ. A connection has three until a message comes, and all ranks of an instance may be silent. The
library's own limit, 1,023, would allow 340 ranks."""
MAX_ROUTES = 65536
"""Most peers whose connections are remembered for answers."""
HANDSHAKE_MS = 5000
"""Milliseconds for the set-up of a connection. A connection that is not ready by then is closed."""
MARK = "#"
"""Separates a link's name from what tells its connections apart, in a routing id."""
_MARK = MARK.encode()
BURST_MESSAGES = 256
"""Most messages taken from one socket before other sockets, timers and jobs get their turn."""
TURN_BYTES = 4 << 20
"""Most bytes taken from one socket before the others get their turn."""
TURN_SECONDS = 0.01
"""Seconds for which messages of one socket are handled before the others get their turn."""


class _Listening:
    """The socket on which ZeroMQ listens. ZeroMQ opens and closes it.

    Attributes:
        descriptor: Its descriptor; below zero if there is none.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def fileno(self) -> int:
        """Its descriptor."""
        return self.descriptor


class Channel:
    """Listens, dials, sends and receives. Every method belongs to the thread that made the object.

    Decode dials prefill. Answers come back over the same connection, so prefill need not know where decode listens.

    Args:
        name: This link's name, as `link_name` makes it; peers see it in the routing id.
        listen: Where to listen; port 0 picks a free port. Of a range, the first free one is taken. If empty, the link
            does not listen, and nobody can dial it.
        advertise: Host under which peers reach it; the listening host when empty.
        keys: CURVE keys; ``None`` for none.
        insecure: Whether to listen beyond loopback without keys.
        max_frame: Most bytes of a frame that comes in. A peer that sends a larger one is disconnected.
        kinds: The kinds of messages that may come.

    Raises:
        ConfigError: It would listen beyond loopback without keys, the address cannot be bound, or the process has too
            few file descriptors left.
    """

    def __init__(
        self,
        name: str,
        listen: str,
        *,
        advertise: str,
        keys: Keys | None,
        insecure: bool,
        max_frame: int = MAX_FRAME,
        kinds: Mapping[bytes, type[Message]] = KINDS,
    ) -> None:
        where = check_listen(listen or "tcp://127.0.0.1:0", advertise=advertise, keys=keys, insecure=insecure)
        check_descriptors()
        self.name = name
        self._knows: Callable[[str], bool] = lambda name: True
        self.dropped = Tally()
        self._keys = keys
        self._max_frame = max_frame
        self._kinds = kinds
        self._parts, self._unintroduced = Parts(UNFINISHED), Parts(UNFINISHED_UNINTRODUCED)
        self._dialled: dict[str, zmq.Socket[Any]] = {}
        self._unheard: dict[str, Dialling] = {}
        self._routes: OrderedDict[str, bytes] = OrderedDict()
        self._latest: tuple[bytes, str] = b"", ""
        """Routing id and sender of the latest message of a peer that dialled this link: its route is noted."""
        self._frames, self._watch = Frames(named=keys is not None), Watch()
        self.bound, self.endpoint = "", Endpoint("")
        self._listening = _Listening(-1)
        self._context: zmq.Context[Any] = zmq.Context()
        try:
            self._open(where, listen=bool(listen), advertise=advertise, insecure=insecure)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def _open(self, where: ListenAddress, *, listen: bool, advertise: str, insecure: bool) -> None:
        keys = self._keys
        if listen:  # a link; a client of the rendezvous server dials one address, and saves the memory of the table
            self._context.max_sockets = MOST_SOCKETS
        self._gate = Gate(self._context, keys.allow) if keys else None
        self._router = self._socket(zmq.ROUTER)
        if keys is not None:
            self._router.curve_server = True
            self._router.curve_secretkey = keys.secret.encode()
        self._router.router_mandatory = True
        if self._gate is not None:
            self._watch.add(self._gate.socket)
        if not listen:
            return
        self._watch.add(self._router)
        self._bind(where)
        bound = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.bound = numeric(host_of(bound))
        if keys is None and not insecure and not only_this_host(self.bound):
            # The interface or name had another address when it was checked.
            check_listen(bound, advertise=advertise, keys=keys, insecure=insecure)
        host = advertise or (self.bound if is_interface(where.host) else where.host)
        port = bound.rpartition(":")[2]
        self.endpoint = Endpoint(
            f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}", keys.public if keys else ""
        )

    def _bind(self, where: ListenAddress) -> None:
        """Listen there, at the first free port of a range, and not in children that are forked from this process."""
        monitor = self._router.get_monitor_socket(zmq.EVENT_LISTENING)
        try:
            where.ports.first_free(lambda port: self._router.bind(where.at(port)))
            self._listening = _Listening(recv_monitor_message(monitor, zmq.NOBLOCK)["value"])
        except zmq.ZMQError as error:
            raise unbound(where, error) from error
        finally:
            self._router.disable_monitor()
            monitor.close()
        close_in_children(self._listening)

    def _socket(self, kind: int) -> zmq.Socket[Any]:
        socket: zmq.Socket[Any] = self._context.socket(kind)
        socket.linger = 200
        socket.maxmsgsize = self._max_frame
        socket.handshake_ivl = HANDSHAKE_MS
        socket.sndhwm, socket.rcvhwm = QUEUE, UNREAD_MESSAGES
        socket.ipv6 = True
        return socket

    @property
    def allowed(self) -> tuple[str, ...]:
        """Public keys of the links that may connect. Callable from any thread."""
        return self._keys.allow if self._keys is not None else ()

    def key_of(self, name: str) -> str:
        """The public key of a link that has sent a message under this name; empty without security."""
        return key_of(name) if self._keys is not None else ""

    def count(self, error: WireError) -> None:
        """Count a frame that a peer should not have sent, and log some of them."""
        if self.dropped.note(error.code):
            log.warning("dropped a frame (%d of this kind): %s", self.dropped[error.code], error)

    @property
    def refused(self) -> int:
        """Number of connections that were refused because of their key."""
        return self._gate.refused if self._gate else 0

    def start(self, descriptor: int, knows: Callable[[str], bool] = lambda name: True) -> None:
        """Call before the first `receive`.

        Args:
            descriptor: When this file descriptor becomes readable, `receive` returns early.
            knows: Whether a peer that dialled this link, by its name, has introduced itself. Others may send a `Hello`,
                and no other large message.
        """
        self._watch.add(descriptor)
        self._knows = knows

    def redial(self, endpoint: Endpoint) -> None:
        """Replace a connection by a new one. Messages that wait in the old one are lost.

        Raises:
            ConfigError: As `dial`.
        """
        trouble = self.trouble(str(endpoint))
        self.hang_up(str(endpoint))
        self.dial(endpoint, trouble)

    def undialled(self, addresses: Iterable[str]) -> list[str]:
        """Those addresses to which no connection is open or being set up, each once.

        Raises:
            ConfigError: The process has too few file descriptors left to dial them all. Nothing was opened.
        """
        missing = [address for address in dict.fromkeys(addresses) if address not in self._dialled]
        if missing:
            check_dials(len(missing))
        return missing

    def dial(self, endpoint: Endpoint, before: Trouble | None = None) -> None:
        """Open a connection in the background. It is repaired by itself when the other side comes back.

        Args:
            endpoint: Where to.
            before: What was wrong with an earlier connection to this endpoint, if there was one.

        Raises:
            ConfigError: Only one side has keys, or the peer's is not allowed.
        """
        address = str(endpoint)
        if address in self._dialled:
            return
        check_dial(endpoint, self._keys)
        try:
            socket = self._socket(zmq.DEALER)
        except zmq.ZMQError as error:  # the process has no file descriptor left
            raise ConfigError(f"cannot dial {endpoint.address}", cause=str(error)) from error
        # Each connection has an id of its own, so that a new connection is not mistaken for an earlier one. Nobody can
        # foresee it: the other side ignores a connection whose id another one has.
        socket.setsockopt_string(zmq.ROUTING_ID, f"{self.name}{MARK}{secrets.token_urlsafe(8)}")
        socket.reconnect_ivl, socket.reconnect_ivl_max = 50, 1000
        dialling: Dialling | None = None
        try:
            if self._keys is not None:
                socket.curve_serverkey = endpoint.key.encode()
                socket.curve_secretkey = self._keys.secret.encode()
                socket.curve_publickey = self._keys.public.encode()
            dialling = Dialling(socket, endpoint.address, before)
            socket.connect(endpoint.address)
        except (zmq.ZMQError, ValueError) as error:
            if dialling is not None:
                dialling.close()
            socket.close(linger=0)
            raise ConfigError(f"cannot dial {endpoint.address}", cause=str(error)) from error
        self._dialled[address], self._unheard[address] = socket, dialling
        self._watch.add(socket)

    def trouble(self, address: str) -> Trouble | None:
        """Why no message has come over the connection to ``address``; ``None`` once one has come."""
        dialling = self._unheard.get(address)
        return None if dialling is None else dialling.trouble()

    def noted_trouble(self, address: str) -> Trouble | None:
        """What `trouble` last returned for an address. Any thread."""
        dialling = self._unheard.get(address)
        return None if dialling is None else dialling.noted

    def hint(self, trouble: Trouble) -> str:
        """What to look at, with this link's public key if that is what the other side lacks."""
        return f"{trouble.hint}: {self._keys.public}" if trouble is Trouble.KEY and self._keys else trouble.hint

    def _heard(self, address: str) -> None:
        """A message has come, or the connection is closed: stop watching its set-up."""
        dialling = self._unheard.pop(address, None)
        if dialling is not None:
            dialling.close()

    def hang_up(self, address: str) -> None:
        """Close a dialled connection. Messages that wait in it are lost."""
        socket = self._dialled.pop(address, None)
        if socket is not None:
            self._parts.forget(address)
            self._heard(address)
            self._watch.remove(socket)
            socket.close(linger=0)

    def send(self, message: Message, address: str | None = None) -> bool:
        """Queue a message. Returns whether that was possible; if not, it is logged why.

        It is not, where there is no such connection, where that takes no more messages, or if the message is too large.

        Args:
            message: The message.
            address: Where this link dialled the receiver; ``None`` if the receiver dialled this link.
        """
        try:
            frames = encode(message)
            socket = self._router if address is None else self._dialled[address]
            route = [self._routes[message.to]] if address is None else []
            for each in (frames,) if len(frames[1]) <= PART else cut(frames):
                self._frames.send(socket, route + each)
        except (zmq.ZMQError, KeyError) as error:
            log.debug("a message could not be sent to %s: %s", message.to, error)
            return False
        except WireError as error:
            log.error("%s", error.reason.coded)
            return False
        return True

    def receive(self, timeout: float | None) -> Iterable[tuple[Message, str | None]]:
        """Wait for messages: each, with the address that was dialled (``None`` if the peer dialled this link).

        Each is taken when the caller asks for it.

        A frame that is no message is counted in ``dropped`` and logged. It changes nothing.

        Args:
            timeout: Most seconds to wait; ``None`` waits until something comes.
        """
        ready = self._watch.wait(timeout)
        if not ready:
            return ()
        if self._gate is not None and self._gate.socket in ready:
            self._gate.answer()
        found = [self._drain(self._router, None)] if self._router in ready else []
        if self._dialled:
            found += [self._drain(socket, address) for address, socket in self._dialled.items() if socket in ready]
        return itertools.chain.from_iterable(found)

    def _drain(self, socket: zmq.Socket[Any], address: str | None) -> Iterator[tuple[Message, str | None]]:
        """Messages from one socket, up to the limits of one turn.

        The time in which a message is handled counts, too.
        """
        until = time.monotonic() + TURN_SECONDS
        dialled = "" if address is None else parse_endpoint(address).key
        nbytes = 0
        for number in range(BURST_MESSAGES):
            if socket.closed or (number and (nbytes > TURN_BYTES or time.monotonic() > until)):
                return
            taken = self._frames.receive(socket)
            if taken is None:
                return
            frames, user, length = taken
            nbytes += length
            routing = frames.pop(0) if address is None and frames else None
            try:
                if len(frames) != 2 or length > SMALL_MESSAGE_BYTES:
                    whole = self._whole(frames, routing, address)
                    if whole is None:
                        continue
                    frames = whole
                message = decode(frames, self._kinds)
                if routing is None:
                    if dialled:
                        _check_name(message.sender, dialled)
                elif user or (routing, message.sender) != self._latest:
                    self._note_route(routing, message, user)
                if address in self._unheard:
                    self._heard(address)
            except WireError as error:
                self.count(error)
                if address in self._unheard:
                    self._unheard[address].dropped(error.code)
                continue
            yield message, address

    def _whole(self, frames: list[bytes], routing: bytes | None, address: str | None) -> list[bytes] | None:
        """The frames of a complete message; ``None`` if parts are missing. Two frames that are small are complete."""
        kind = self._kinds.get(frames[0]) if frames else None
        if kind is None:
            return frames  # the decoder refuses them
        parts = self._parts
        if routing is not None and not self._knows(routing.rpartition(_MARK)[0].decode(errors="replace")):
            parts = self._unintroduced
            if kind is not Hello and (len(frames) > 2 or sum(map(len, frames)) > SMALL_MESSAGE_BYTES):
                what = "a peer that has not introduced itself sent a large message"
                raise WireError(what, cause=f"of kind {frames[0].decode()}", code="wire.unintroduced")
        if len(frames) != 3:
            return frames
        return parts.add(routing if address is None else address, frames, limit_of(kind))

    def _note_route(self, routing: bytes, message: Message, key: str) -> None:
        """Remember the connection over which a peer spoke last. Answers go there."""
        if routing.rpartition(_MARK)[0] != message.sender.encode():
            raise WireError("the sender is not who is connected", cause=message.sender[:80], code="wire.sender")
        if key:
            _check_name(message.sender, key)
        self._latest = routing, message.sender
        self._routes[message.sender] = routing
        self._routes.move_to_end(message.sender)
        if len(self._routes) > MAX_ROUTES:
            self._routes.popitem(last=False)

    def close(self) -> None:
        """Close every socket. May be called twice."""
        for address in list(self._dialled):
            self._heard(address)
            socket = self._dialled.pop(address)
            socket.close()
        if self._gate is not None:
            self._gate.socket.close()
        self._listening.descriptor = -1  # before ZeroMQ closes it, and its number belongs to another file
        self._router.close()
        self._frames.close()
        self._context.destroy(linger=200)


def _check_name(name: str, key: str) -> None:
    """Drop a message under a name that the holder of the connection's key cannot have, such as that of another link."""
    if not may_say(name, key):
        cause = f"the holder of {key_to_url(key)} says to be {name[:160]}"
        raise WireError("the sender's name is not one of its key's", cause=cause, code="wire.sender")
