"""Messages of every kind that are as long as asked for, and made to take as long as possible to decode and check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from tests.wire.samples import card

from statelink import state, wire
from statelink.plan import compile_pair
from statelink.wire import KINDS, RENDEZVOUS_KINDS

Tree = dict[str, Any]
LINK: Tree = {"sender": "d", "to": "p"}
USE: Tree = {**LINK, "room": 1, "generation": 1}
REQUEST: Tree = {**USE, "tokens": 1, "prefix": 0}
SAME_HASH = (1 << 61) - 1
"""Python's hash of an integer is what is left of it after division by this."""


def _fill(entry: Callable[[int], Any], nbytes: int) -> list[Any]:
    """As many entries as are about so long when they are encoded."""
    each = max(1, len(msgspec.msgpack.encode([entry(number) for number in range(1000, 1016)])) // 16)
    return [entry(number) for number in range(max(1, nbytes // each))]


def _card(nbytes: int, **changes: Any) -> Tree:
    tree: Tree = msgspec.msgpack.decode(bytes(wire.write_handshake(card())))
    for name, value in changes.items():
        (tree["inventory"] if name in tree["inventory"] else tree)[name] = value
    return {**LINK, "handshake": tree}


def _buffers(layout: Callable[[int], Tree], nbytes: int, **changes: Any) -> Tree:
    """A card with one component, whose buffers have these layouts."""

    def buffer(number: int) -> Tree:
        usual = {"name": f"b{number}", "region": 0, "offset": number << 40, "stride": 0, "count": 1}
        given = {name: value(number) for name, value in changes.items()}
        return {**usual, "layout": layout(number), **given}

    made = {"name": "aux", "type": "aux", "buffers": _fill(buffer, nbytes)}
    regions = [{"address": 1, "nbytes": (1 << 64) - 2}]
    return _card(nbytes, components=[made], regions=regions)


def _layout(slabs: list[Tree], shape: tuple[int, ...]) -> Tree:
    axes = [f"a{axis}" for axis in range(len(shape))]
    return {"dtype": "u1", "itemsize": 1, "shape": shape, "axes": axes, "slabs": slabs}


def _shattered(slabs: int, pieces: int) -> Callable[[int], Tree]:
    """Layouts that differ, of so many slabs, which interleave and have so many contiguous pieces each."""

    def made(number: int) -> Tree:
        stride = 2 * slabs + number
        boxes = [
            {"start": (each * pieces,), "stop": ((each + 1) * pieces,), "offset": 2 * each, "strides": (stride,)}
            for each in range(slabs)
        ]
        return _layout(boxes, (slabs * pieces,))

    return made


def _one_hash(number: int) -> Tree:
    """Layouts that differ and have one hash: strides of axes of one element may be anything."""
    strides = [number // 8**axis % 8 * SAME_HASH for axis in range(8)]
    return _layout([{"start": (0,) * 8, "stop": (1,) * 8, "offset": 0, "strides": strides}], (1,) * 8)


def _row(number: int) -> Tree:
    return _layout([{"start": (0,), "stop": (1,), "offset": 0, "strides": (1,)}], (1,))


def _assigned(nbytes: int, share: Callable[[int], Tree]) -> Tree:
    assignment = {"source": 0, "target": 0, "shares": _fill(share, nbytes)}
    return {**LINK, "assignment": assignment, "destinations": 1, "digest": b""}


BOXES = [{"start": (each,), "stop": (each + 1,)} for each in range(64)]


def _reason(nbytes: int) -> Tree:
    text = "x" * min(8192, nbytes // 40)
    return {"code": "c", "what": text, "who": {f"{n}": text for n in range(32)}, "cause": text, "hint": text}


def _of_names(entry: Any, nbytes: int) -> Tree:
    return {f"{number:<200}": entry for number in range(min(1024, max(1, nbytes // 220)))}


CASES: dict[str, Callable[[int], Tree]] = {
    "hello: 64 slabs": lambda n: _buffers(_shattered(64, 1024), n),
    "hello: 2 slabs": lambda n: _buffers(_shattered(2, 1 << 15), n),
    "hello: few pieces": lambda n: _buffers(_shattered(64, 1), n),
    "hello: layouts of one hash": lambda n: _buffers(_one_hash, n),
    "hello: tangled buffers": lambda n: _buffers(
        _row, n, offset=lambda k: k, stride=lambda k: 1 << 20, count=lambda k: 1 << 20
    ),
    "hello: nested buffers": lambda n: _buffers(_row, n, offset=lambda k: k, stride=lambda k: 1 << 20),
    "hello: regions": lambda n: _card(n, regions=_fill(lambda k: {"address": 1, "nbytes": 1}, n)),
    "hello: components": lambda n: _card(
        n, components=_fill(lambda k: {"name": f"c{k}", "type": "aux", "buffers": []}, n)
    ),
    "hello: axes": lambda n: _card(n, axes={f"{k:<40}": {"index": 0, "size": 1} for k in range(n // 60)}),
    "hello: kinds": lambda n: _card(n, kinds=[msgspec.to_builtins(state.state_type("kv"))] * (n // 150)),
    "hello: strategies": lambda n: _card(n, strategies=_of_names("direct", n)),
    "hello: a descriptor": lambda n: _card(n, descriptor=bytes(n)),
    "hello: nested": lambda n: {**LINK, "handshake": {"x": [[[[[]]]]] * (n // 6)}},
    "welcome: 2 slabs": lambda n: _buffers(_shattered(2, 1 << 15), n),
    "attach: shares": lambda n: _assigned(n, lambda k: {"component": "aux", "buffers": [], "boxes": []}),
    "attach: boxes": lambda n: _assigned(n, lambda k: {"component": "aux", "buffers": [f"b{k}"], "boxes": BOXES}),
    "attach: buffers": lambda n: _assigned(
        n, lambda k: {"component": "aux", "buffers": [f"b{k}"], "boxes": [{"start": (0,), "stop": (64,)}]}
    ),
    "request: indices": lambda n: {**REQUEST, "items": {"kv": {"first": 0, "ids": bytes(n // 8 * 8)}}},
    "request: names": lambda n: {**REQUEST, "items": _of_names({"first": 0, "ids": b""}, n)},
    "request: prepared": lambda n: {**REQUEST, "prepared": {f"c{k}": bytes(64 << 10) for k in range(n >> 16)}},
    "request: elsewhere": lambda n: {**REQUEST, "elsewhere": ["x" * 200] * min(1024, n // 200)},
    "chunk": lambda n: {**USE, "number": 0, "granules": _of_names((0, 1), n)},
    "finished": lambda n: {
        **USE,
        "digest": b"",
        "chunks": 1,
        "moved": _of_names({"nbytes": 1, "blocks": 1}, n // 2),
        "digests": _of_names(bytes(16), n // 2),
    },
    "failed": lambda n: {**USE, "reason": _reason(n)},
    "refuse": lambda n: {**LINK, "reason": _reason(n)},
    "note": lambda n: {**USE, "component": "kv", "payload": bytes(min(n, 64 << 10))},
    "resolved": lambda n: {**LINK, "instance": "p", "addresses": ["tcp://127.0.0.1:1"] * min(4096, n // 18)},
    "browsed": lambda n: {
        **LINK,
        "listed": [{"instance": "p", "rank": 0, "ranks": 1, "address": "x" * 200, "link": "y"}] * min(1024, n // 250),
    },
    # Those that follow hold nothing that can be long but names.
    "attached": lambda n: {**LINK, "digest": b"", "transport": "x" * min(n, 256)},
    **dict.fromkeys(
        ("received", "drained", "inquire", "keep", "standing"), lambda n: {**USE, "sender": "x" * min(n, 512)}
    ),
    **dict.fromkeys(("ping", "pong", "unknown", "bye"), lambda n: {"sender": "x" * min(n, 512)}),
    "register": lambda n: {**LINK, "instance": "x" * min(n, 512), "rank": 0, "ranks": 1, "address": "x"},
    "registered": lambda n: {**LINK, "lifetime": 1.0},
    **dict.fromkeys(("resolve", "browse"), lambda n: {**LINK, "instance": "x" * min(n, 512)}),
}
"""By kind and what is special about it: a message of about so many bytes, or as many as it can have."""


_rows = {f"b{number}": state.Memory.pointer((number + 1) << 30, (1, 64), "uint8", 1) for number in range(4096)}
_here = state.describe("p", [state.aux_rows(_rows)])


def read(name: str, frames: list[bytes]) -> None:
    """What a link does with a message before it knows whether it is right, on whatever thread."""
    message = wire.decode(frames, {**KINDS, **RENDEZVOUS_KINDS})
    if isinstance(message, (wire.Hello, wire.Welcome)):
        wire.read_handshake(message.handshake)
    elif isinstance(message, wire.Attach):
        compile_pair(_here, _here, message.assignment)
    elif isinstance(message, wire.Request):
        for items in message.items.values():
            wire.unpack_items(items)
