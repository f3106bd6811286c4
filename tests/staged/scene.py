"""One request between two hooks of a staged component, and what they say to each other, as bytes of the protocol."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from statelink import plan, state
from statelink.backend import ReceiveHook, SendHook
from statelink.registry import load_backend
from statelink.staged import Staged

if TYPE_CHECKING:
    from statelink.plan import Move, Tile

Said = tuple[Any, ...]


def ask(number: int, nbytes: int) -> Said:
    """Prefill has a parcel to move."""
    return "ask", number, nbytes


def granted(number: int, offset: int) -> Said:
    """Decode grants space for it in its ring."""
    return "granted", number, offset


def written(number: int, layers: tuple[int, int] | None, tiles: Any) -> Said:
    """Prefill has written it."""
    return "written", number, layers, tiles


def ring_at(region: int, address: int, nbytes: int) -> bytes:
    """Decode's ring, as it travels with the request."""
    return raw((region, address, nbytes))


def raw(said: Said | bytes) -> bytes:
    """What is said, whatever it is, as a payload."""
    return said if isinstance(said, bytes) else msgspec.msgpack.encode(said)


def read(payload: bytes) -> Said:
    """What a payload says."""
    return tuple(msgspec.msgpack.decode(payload))


def gathered(move: Move, tiles: Iterable[Tile]) -> npt.NDArray[np.uint8]:
    """The source's bytes of a parcel, one tile after the other."""
    found = bytearray()
    for tile in tiles:
        places = move.places(tile, "source")
        for address in places.addresses.tolist():
            for row in places.rows.tolist():
                found += ctypes.string_at(address + row * places.width, places.width)
    return np.frombuffer(found, np.uint8)


Hook = ReceiveHook | SendHook
WHOLE = {"in_use": 0, "waiting": 0, "quarantined": 0}
LAYERS, PAGES, HEADS, DIM = 2, 6, 2, 4
GRANULE = 4 * DIM
"""Bytes of a page of one tensor that one of two prefill ranks has: four tokens of one head."""
ASKED = 4 * GRANULE
"""Bytes of a page of all tensors."""


def pages(rank: int | None, fill: int) -> tuple[dict[int, Any], state.Described]:
    heads = HEADS if rank is None else 1
    arrays = {n: tuple(np.full((PAGES, 4, heads, DIM), fill, np.uint8) for _ in range(2)) for n in range(LAYERS)}
    share = {"heads": HEADS} if rank is None else {"heads": HEADS, "tp": (rank, 2)}
    return arrays, state.kv_pages(arrays, **share)  # type: ignore[arg-type]


class Context:
    """What a hook sees of its room; notes what it does."""

    room, generation, component = 7, 1, "kv"

    def __init__(self, expected: plan.Move, peer: str = "peer") -> None:
        self._expected = expected
        self.peer = peer
        self.told: Callable[[], object] = lambda: None
        """Called when it gets space."""
        self.said: list[Any] = []
        self.lent: list[tuple[int, int]] = []
        self.woken = 0

    def message(self, payload: bytes) -> None:
        self.said.append(read(payload))

    def wake(self) -> None:
        self.woken += 1
        self.told()

    def expected(self) -> plan.Move:
        return self._expected

    def grant(self, address: int, nbytes: int, then: Callable[[], None]) -> None:
        self.lent.append((address, nbytes))
        self.told()
        then()


class Scene:
    """A prefill rank with half of the heads, a decode rank, and a request of four pages."""

    def __init__(self, ring_bytes: int = 2048, *, block_seconds: float = 0.5) -> None:
        self.source, ours = pages(0, 1)
        _, beside = pages(1, 2)
        self.target, theirs = pages(None, 0)
        sources = [state.describe("p", [each], rank=n, ranks=2) for n, each in enumerate((ours, beside))]
        target = state.describe("d", [theirs])
        part = next(each for each in plan.route(sources, [target]) if each.source == 0)
        component = plan.compile_pair(sources[0], target, part).components["kv"]
        owed = plan.due(component.source, component.target, 16, 0)
        items = plan.required(component.target, 16, 0, [5, 1, 2, 4])
        self.move = plan.plan_move(component, plan.pushed(component.source, 16, 0, (0, 16), [0, 3, 4, 1]), items, owed)
        self.expected = plan.expected_move(component, items, owed)
        self.context = Context(self.expected)
        declared = dataclasses.replace(load_backend("tcp").capabilities, block_seconds=block_seconds)
        self.staged = Staged(declared, ring_bytes=ring_bytes, parcel_bytes=ASKED, modes={"kv": "auto"})
        (self.ring,) = self.staged.open(target, ["kv"])

    def receiver(self, context: Context | None = None) -> ReceiveHook:
        hook = self.staged.receiver()
        _, address, nbytes = read(hook.prepare(context or self.context))
        assert (address, nbytes) == (self.ring.address, self.ring.nbytes)
        return hook

    def sender(self, ring_bytes: int = 4096, context: Context | None = None) -> SendHook:
        hook = self.staged.sender()
        hook.open(context or self.context, ring_at(9, 1 << 40, ring_bytes))
        return hook

    def say(self, hook: Hook, *messages: Any) -> None:
        for each in messages:
            hook.message(self.context, raw(each))

    def end(self, hook: Hook) -> None:
        """The room fails, and nothing is on the move any more."""
        hook.abort(self.context)
        hook.released(self.context)
        assert self.space() == WHOLE

    def space(self) -> dict[str, int]:
        return {name: number for name, number in self.staged.snapshot().items() if name != "bytes"}

    def untouched(self) -> bool:
        return not any(array.any() for pair in self.target.values() for array in pair)
