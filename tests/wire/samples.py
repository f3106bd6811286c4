"""One full message of every kind, with every optional field set."""

from __future__ import annotations

from typing import Any

import numpy as np

from statelink import state, wire
from statelink.backend import Moved
from statelink.errors import Reason
from statelink.plan import Assignment, Box, Share

REASON = Reason("room.deadline", "the room ran out of time", {"room": "7", "peer": "decode.0-ab"}, "30 s", "wait")
LINK: Any = {"sender": "decode.0-ab", "to": "prefill.1-cd"}
USE: Any = {**LINK, "room": (1 << 64) - 1, "generation": (1 << 63) - 1}


def card() -> wire.Handshake:
    """A card whose inventory has every struct that an inventory can have."""
    pages = {layer: (_pointer(2 * layer, (8, 4, 2, 3)), _pointer(2 * layer + 1, (8, 4, 2, 3))) for layer in (0, 3)}
    described = [
        state.kv_pages(pages, heads=4, tp=(1, 2), optional=True, format="nvfp4"),
        state.kv_pages({1: (_pointer(20, (6, 4, 2, 3)), _pointer(21, (6, 4, 2, 3)))}, heads=2, window=9),
        state.kv_pages({8: (_pointer(22, (6, 4, 2, 3)), _pointer(23, (6, 4, 2, 3)))}, heads=2, attention_chunk=64),
        state.mamba_slots(
            conv={2: _pointer(30, (5, 8, 3))},
            ssm={2: _pointer(31, (5, 2, 2, 2))},
            conv_groups=(4, 4, 8),
            heads=4,
            tp=(1, 2),
        ),
        state.index_pages({4: _pointer(40, (7, 4, 2)), 5: np.zeros((0, 4, 2), np.uint8)}),
        state.aux_rows({"tokens": _pointer(50, (9, 4))}, replicated=True),
    ]
    inventory = state.describe(
        "decode", described, rank=1, ranks=2, axes={"tp": (1, 2), "pp": (0, 1)}, model="rev-1+lora"
    )
    return wire.Handshake(
        link=LINK["sender"],
        protocol=(1, 1),
        version="0.1.0",
        role="decode",
        backend="tcp",
        kinds=tuple(state.state_type(name) for name in ("aux", "chunked_local", "dsa", "kv", "mamba", "swa")),
        strategies={"kv": "direct"},
        descriptor=b"\x00\xffdescriptor",
        inventory=inventory,
        process=wire.ProcessId(pid=4711, start=99, pid_namespace=4026531836, boot="0c1f"),
        registration=7,
    )


def _pointer(number: int, shape: tuple[int, ...]) -> state.Memory:
    return state.Memory.pointer((number + 1) << 57, shape, "uint8", 1)


def messages() -> dict[str, wire.Message]:
    """By kind."""
    box = Box((0, 1), (4, 2))
    raw = wire.write_handshake(card())
    made = (
        wire.Hello(**LINK, handshake=raw),
        wire.Welcome(**LINK, handshake=raw),
        wire.Refuse(**LINK, reason=REASON),
        wire.Attach(
            **LINK,
            assignment=Assignment(1, 0, (Share("kv", ("layers.0.k", "layers.0.v"), (box, box)),)),
            same_host=True,
            destinations=1 << 16,
            digest=b"\x01" * 16,
        ),
        wire.Attached(**LINK, digest=b"\x01" * 16, transport="tcp", connecting=True),
        wire.Request(
            **USE,
            tokens=1 << 40,
            prefix=64,
            items={"kv": wire.ItemList(4, b"\x01\x00\x00\x00\x00\x00\x00\x00" * 3)},
            prepared={"kv": b"ring"},
            elsewhere=["kv"],
            lifetime_ms=120_000,
            unmet=(wire.Unmet(0, 0), wire.Unmet((1 << 62) + 5, 1500)),
            least=(1 << 40) - 63,
            content=b"\x02" * 64,
            landing=True,
        ),
        wire.Chunk(**USE, number=3, granules={"kv": (4, 9)}, layers=(0, 12), nbytes=1 << 40),
        wire.Finished(
            **USE,
            digest=b"\x01" * 16,
            moved={"kv": Moved(1 << 40, 77)},
            chunks=4,
            granules={"kv": (4, 9)},
            layers=(0, 12),
            digests={"kv": b"\x03" * 16},
            transport="tcp",
            tokens=1 << 40,
            landing=True,
        ),
        wire.Received(**USE),
        wire.Failed(**USE, reason=REASON, met=(1 << 63) - 1, ended_ms_ago=1500),
        wire.Drained(**USE, met=(1 << 63) - 1),
        wire.Keep(**LINK, room=(1 << 64) - 1, lease_ms=120_000),
        wire.Note(**USE, component="kv", payload=b"\x00" * 100),
        wire.Inquire(**LINK, room=(1 << 64) - 1),
        wire.Standing(**LINK, room=(1 << 64) - 1, status=4),
        wire.Ping(**LINK),
        wire.Pong(**LINK),
        wire.Unknown(**USE),
        wire.Bye(**LINK, drained=True, registration=7, suspended=True),
    )
    return {type(message).__name__.lower(): message for message in made}
