"""A backend that reaches no other process, offers both operations and no fence, and is right."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from statelink.backend import (
    DIRECT,
    Backend,
    BackendContext,
    Batch,
    Capabilities,
    Fence,
    Outcome,
    Probe,
    Region,
    RegionTable,
    SubmitMode,
    Transfer,
)
from statelink.errors import TransferError
from statelink.tcp import TcpBackend

OPEN: dict[str, Honest] = {}
MARK = b"honest:"


class Honest(Backend):
    api_version = 1
    name = "honest"
    Options = type("Options", (msgspec.Struct,), {}, forbid_unknown_fields=True)
    capabilities = Capabilities(
        memory_kinds=frozenset({"dram"}),
        submit_mode=SubmitMode.BLOCKING,
        source=Fence.NONE,
        target=Fence.NONE,
        state_types=frozenset({"kv", "mamba"}),
        max_blocks=500,
    )
    strategies: ClassVar = {"kv": DIRECT, "mamba": DIRECT}

    def __init__(self, context: BackendContext) -> None:
        self.link = context.link
        self.regions: Sequence[Region] = ()
        self.peers: dict[str, Sequence[Region]] = {}
        OPEN[self.link] = self

    @classmethod
    def probe(cls, options: Any) -> Probe:
        return Probe(ok=True, reason="memory of this process")

    def register(self, regions: Sequence[Region]) -> None:
        for region in regions:
            if region.kind != "dram":
                raise TransferError(f"memory of kind {region.kind} cannot be registered")
        self.regions = tuple(regions)

    def descriptor(self) -> bytes:
        return MARK + self.link.encode() + b";"

    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        if descriptor != MARK + peer.encode() + b";" or not OPEN.keys() >= {peer, self.link}:
            raise TransferError("this is no descriptor of an open link")
        self.peers[peer] = tuple(regions)

    def submit(self, peer: str, batch: Batch) -> Transfer:
        if self.link not in OPEN or peer not in self.peers:
            raise TransferError("this peer is not connected", peer=peer)
        source, target = RegionTable(self.regions, self.name), RegionTable(self.peers[peer], self.name)
        blocks = batch.blocks
        source.check("on one side", blocks.source, blocks.nbytes, blocks.source_region)
        target.check("on the other", blocks.target, blocks.nbytes, blocks.target_region)
        if peer not in OPEN:
            return Transfer(Outcome(False, "the peer was closed"))
        for start, end, nbytes in zip(
            blocks.source.tolist(), blocks.target.tolist(), blocks.nbytes.tolist(), strict=True
        ):
            ctypes.memmove(end, start, nbytes)
        return Transfer(Outcome(True))

    def poll(self, transfers: Sequence[Transfer]) -> None:
        pass

    def disconnect(self, peer: str) -> None:
        self.peers.pop(peer, None)

    def close(self) -> None:
        if OPEN.get(self.link) is self:
            del OPEN[self.link]
        self.peers.clear()


class Anywhere(Honest):
    """Registers memory of any device."""

    name = "anywhere"
    capabilities = dataclasses.replace(Honest.capabilities, memory_kinds=frozenset({"cpu", "granite"}))

    def register(self, regions: Sequence[Region]) -> None:
        self.regions = tuple(regions)


class Bounded(TcpBackend):
    """The embedded backend, over a library that takes few blocks and few bytes at once, and refuses more."""

    name = "bounded"
    capabilities = dataclasses.replace(TcpBackend.capabilities, max_blocks=1000, max_bytes=8 << 20)

    def submit(self, peer: str, batch: Batch) -> Transfer:
        declared, blocks = self.capabilities, batch.blocks
        if blocks.count > declared.max_blocks or blocks.total > declared.max_bytes:
            raise TransferError(f"{blocks.count} blocks of {blocks.total} bytes are more than the library takes")
        return super().submit(peer, batch)
