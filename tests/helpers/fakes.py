"""Peers that speak the protocol by hand, and can therefore say at any time what no link would say."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
import zmq
from tests.helpers.expect import Case, positions
from tests.helpers.peers import cut, handshake_of, routing_id
from tests.helpers.pools import Component, Index, Kv, Memory

from statelink import wire
from statelink.backend import Backend, BackendContext
from statelink.plan import compile_pair, route
from statelink.registry import load_backend
from statelink.state import Region

if TYPE_CHECKING:
    from pathlib import Path

    from statelink.plan import PairPlan

Spoken = TypeVar("Spoken", bound=wire.Message)
_numbers = itertools.count(1)


class Fake:
    """What both kinds have: memory of their own, a real backend to reach it, and a bare socket.

    Args:
        folder: Where the memory lies.
        role: ``prefill`` or ``decode``.
        pools: What it holds.
        ring: Bytes of a ring that everything is staged in; not staged if 0.
    """

    def __init__(self, folder: Path, role: str, pools: Sequence[Component], ring: int = 0) -> None:
        self.name = f"fake.{role}-{next(_numbers)}"
        self.memory = Memory(folder / self.name, pools)
        kind = load_backend("tcp")
        options: Any = msgspec.convert({}, kind.Options)
        self.backend: Backend = kind(BackendContext(options=options, link=self.name))
        inventory = self.memory.inventory(self.name)
        self.ring = np.zeros(ring, np.uint8)
        self.ring_region = len(inventory.regions)
        if ring:
            brings = Region(self.ring.ctypes.data, ring, "dram")
            inventory = msgspec.structs.replace(inventory, regions=(*inventory.regions, brings))
        self.backend.register(inventory.regions)
        strategies = {each.name: "staged" if ring else "direct" for each in inventory.components}
        descriptor = self.backend.descriptor()
        self.card = handshake_of(self.name, role, inventory, descriptor=descriptor, strategies=strategies)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.heard: list[wire.Message] = []
        self.theirs: wire.Handshake | None = None

    @property
    def peer(self) -> str:
        """Link name of the other side."""
        assert self.theirs is not None
        return self.theirs.link

    def close(self) -> None:
        self.context.destroy(linger=0)
        self.backend.close()

    def _listen(self, timeout: float) -> None:
        raise NotImplementedError

    def hear(self, kind: type[Spoken], room: int | None = None, timeout: float = 100.0) -> Spoken:
        """The next message of a kind that the other side sends, of one room if it matters; those before it are lost."""
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            while self.heard:
                message = self.heard.pop(0)
                if isinstance(message, kind) and room in (None, getattr(message, "room", None)):
                    return message
            self._listen(0.05)
        raise AssertionError(f"no {kind.__name__.lower()} came within {timeout:g} s")

    def silent(self, kind: type[wire.Message], seconds: float = 0.3) -> bool:
        """Whether no message of a kind comes for a while."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._listen(0.02)
        return not any(isinstance(message, kind) for message in self.heard)


class FakeDecode(Fake):
    """A decode rank that asks by hand."""

    def __init__(self, folder: Path, address: str, pools: Sequence[Component], ring: int = 0) -> None:
        super().__init__(folder, "decode", pools, ring)
        self.address = address
        self._socket = self.context.socket(zmq.DEALER)
        self._socket.routing_id = routing_id(self.name)
        self._socket.connect(address)

    def say(self, message: wire.Message) -> None:
        for frames in cut(wire.encode(message)):
            self._socket.send_multipart(frames)

    def _listen(self, timeout: float) -> None:
        while self._socket.poll(int(timeout * 1000)):
            timeout = 0
            self.heard.append(wire.decode(self._socket.recv_multipart()))

    def greet(self) -> None:
        self.say(wire.Hello(sender=self.name, handshake=wire.write_handshake(self.card)))
        self.theirs = wire.read_handshake(self.hear(wire.Welcome).handshake)

    def plan(self) -> tuple[wire.Attach, PairPlan]:
        """The right part for prefill, and what it compiles to."""
        assert self.theirs is not None
        (assignment,) = route([self.theirs.inventory], [self.card.inventory])
        plan = compile_pair(self.theirs.inventory, self.card.inventory, assignment)
        attach = wire.Attach(sender=self.name, to=self.peer, assignment=assignment, destinations=1, digest=plan.digest)
        return attach, plan

    def attach(self) -> PairPlan:
        self.greet()
        assert self.theirs is not None
        attach, plan = self.plan()
        self.backend.connect(self.peer, self.theirs.descriptor, self.theirs.inventory.regions)
        self.say(attach)
        assert self.hear(wire.Attached).digest == plan.digest
        return plan

    def request(self, case: Case, generation: int, **changes: Any) -> wire.Request:
        """What a decode link would ask; everything is granted to whoever writes for it."""
        spans = sorted((region.address, region.nbytes) for region in self.card.inventory.regions)
        low, sizes = np.array(spans, np.uint64).T.copy()
        grant: Any = self.backend
        grant.grant(self.peer, case.room, generation, low, sizes)
        items: dict[str, wire.ItemList] = {}
        for pool in self.memory.pools:
            ids = np.array(case.target[pool.name], np.int64)
            first = 0
            if isinstance(pool, (Kv, Index)):
                first = positions(pool, case.tokens, case.prefix)[0] // pool.page
            items[pool.name] = wire.ItemList(first, ids.astype("<i8").tobytes())
        items.update(changes.pop("items", {}))
        usual: dict[str, Any] = {
            "sender": self.name,
            "to": self.peer,
            "room": case.room,
            "generation": generation,
            "tokens": case.tokens,
            "prefix": case.prefix,
            "items": {name: given for name, given in items.items() if given is not None},
        }
        return wire.Request(**{**usual, **changes})


class FakePrefill(Fake):
    """A prefill rank that answers by hand."""

    def __init__(self, folder: Path, pools: Sequence[Component], ring: int = 0) -> None:
        super().__init__(folder, "prefill", pools, ring)
        self._socket = self.context.socket(zmq.ROUTER)
        self._socket.router_mandatory = True
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self._dialled = b""
        self.plan: PairPlan | None = None

    def say(self, message: wire.Message) -> None:
        self._socket.send_multipart([self._dialled, *wire.encode(message)])

    def say_raw(self, frames: list[bytes]) -> None:
        self._socket.send_multipart([self._dialled, *frames])

    def _listen(self, timeout: float) -> None:
        while self._socket.poll(int(timeout * 1000)):
            timeout = 0
            self._dialled, *frames = self._socket.recv_multipart()
            self.heard.append(wire.decode(frames))

    def welcome(self, **changes: Any) -> None:
        """Answer a hello."""
        self.theirs = wire.read_handshake(self.hear(wire.Hello).handshake)
        card = msgspec.structs.replace(self.card, **changes)
        self.say(wire.Welcome(sender=self.name, to=self.peer, handshake=wire.write_handshake(card)))

    def attached(self, **changes: Any) -> None:
        """Answer all of a handshake."""
        self.welcome()
        assert self.theirs is not None
        attach = self.hear(wire.Attach)
        self.plan = compile_pair(self.card.inventory, self.theirs.inventory, attach.assignment)
        assert self.plan.digest == attach.digest
        usual: dict[str, Any] = {"sender": self.name, "to": self.peer, "digest": attach.digest}
        self.say(wire.Attached(**{**usual, **changes}))
