"""A network in memory, with the faults of a real one, and the channel that a link sees of it.

Every message passes through the real codec. Order, loss and repetition are the world's to choose.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from statelink import wire
from statelink.wire import parse_endpoint

if TYPE_CHECKING:
    from .process import Process

__all__ = ["Connection", "Network", "SimChannel"]

Frames = list[bytes]


class Connection:
    """What one process dialled. It outlives whoever listens, as the real sockets do.

    Attributes:
        dialer: The process that dialled.
        address: What it dialled.
        there: Frames on their way to the listener.
        back: Frames on their way to the dialer.
    """

    def __init__(self, dialer: Process, address: str) -> None:
        self.dialer = dialer
        self.address = address
        self.there: list[Frames] = []
        self.back: list[Frames] = []
        self.open = True


class Network:
    """All connections, and who listens where."""

    def __init__(self) -> None:
        self.connections: list[Connection] = []
        self.listening: dict[str, Process] = {}
        self.cut: set[str] = set()
        """Addresses that nobody reaches for the moment."""

    def dial(self, dialer: Process, address: str) -> Connection:
        connection = Connection(dialer, address)
        self.connections.append(connection)
        return connection

    def forget(self, process: Process) -> None:
        """A process has ended: what it dialled is closed, and nobody listens where it did."""
        for connection in self.connections:
            if connection.dialer is process:
                connection.open = False
            elif connection.address == process.address:
                connection.back.clear()
        self.connections = [each for each in self.connections if each.open]
        if self.listening.get(process.address) is process:
            del self.listening[process.address]

    def deliverable(self) -> Iterator[tuple[Connection, list[Frames], Process]]:
        """Queues that have something for a process that lives."""
        for connection in self.connections:
            if connection.address in self.cut:
                continue
            listener = self.listening.get(connection.address)
            if connection.there and listener is not None and not listener.paused:
                yield connection, connection.there, listener
            if connection.back and not connection.dialer.paused:
                yield connection, connection.back, connection.dialer


class SimChannel:
    """What `statelink.wire.Channel` is to a link, over a `Network`."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process
        self._dialled: dict[str, Connection] = {}
        self._routes: dict[str, Connection] = {}
        self.name = process.name
        self.host = "127.0.0.1"
        self.endpoint = parse_endpoint(process.address)
        self.dropped: Counter[str] = Counter()
        self.inbox: deque[tuple[Connection, Frames]] = deque()

    allowed: tuple[str, ...] = ()

    def key_of(self, name: str) -> str:
        return ""

    def start(self, descriptor: int, knows: Callable[[str], bool]) -> None:
        pass

    def undialled(self, addresses: Iterable[str]) -> list[str]:
        return [address for address in dict.fromkeys(addresses) if address not in self._dialled]

    def dial(self, endpoint: wire.Endpoint) -> None:
        if str(endpoint) not in self._dialled:
            self._dialled[str(endpoint)] = self._network.dial(self._process, str(endpoint))

    def redial(self, endpoint: wire.Endpoint) -> None:
        self.hang_up(str(endpoint))
        self.dial(endpoint)

    def trouble(self, address: str) -> wire.Trouble | None:
        return wire.Trouble.NO_ANSWER

    noted_trouble = trouble

    def hint(self, trouble: wire.Trouble) -> str:
        return trouble.hint

    def hang_up(self, address: str) -> None:
        connection = self._dialled.pop(address, None)
        if connection is not None:
            connection.open = False
            self._network.connections.remove(connection)

    def send(self, message: wire.Message, address: str | None = None) -> bool:
        frames = wire.encode(message)
        if address is not None:
            dialled = self._dialled.get(address)
            if dialled is not None:
                dialled.there.append(frames)
            return dialled is not None
        route = self._routes.get(message.to)
        if route is None or not route.open:
            return False
        route.back.append(frames)
        return True

    def receive(self, timeout: float | None) -> Iterator[tuple[wire.Message, str | None]]:
        while self.inbox:
            connection, frames = self.inbox.popleft()
            message = wire.decode(frames)
            if connection.dialer is self._process:
                if connection.open:
                    yield message, connection.address
            else:
                self._routes[message.sender] = connection
                yield message, None

    def close(self) -> None:
        for address in list(self._dialled):
            self.hang_up(address)
