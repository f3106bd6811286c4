"""Backends whose bytes are wrong, missing, too many or too late."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from statelink.backend import BackendContext, Batch, Blocks, Outcome, Region, RegionTable, SubmitMode, Transfer
from statelink.errors import TransferError
from statelink.tcp import TcpBackend

from ._base import Ungranted, Wrong
from ._grants import GrantsAll

U64 = Any


class Early(Wrong):
    def submit(self, peer: str, batch: Batch) -> Transfer:
        super().submit(peer, batch)
        return Transfer(Outcome(True))


class DropsLast(Wrong):
    def submit(self, peer: str, batch: Batch) -> Transfer:
        if batch.blocks.count > 1:
            batch = batch._replace(blocks=batch.blocks[:-1])
        return super().submit(peer, batch)


class DropsLastOfLarge(Wrong):
    """Leaves out the last byte of a batch of more than 40 MiB."""

    def submit(self, peer: str, batch: Batch) -> Transfer:
        if batch.blocks.total > 40 << 20:
            shorter = batch.blocks.nbytes.copy()
            shorter[-1] -= np.uint64(1)
            batch = batch._replace(blocks=dataclasses.replace(batch.blocks, nbytes=shorter))
        return super().submit(peer, batch)


class LosesOneIn200(Wrong):
    """Says of each 200th batch that it was moved, and does not move it."""

    number = 0

    def submit(self, peer: str, batch: Batch) -> Transfer:
        self.number += 1
        return Transfer(Outcome(True)) if self.number % 200 == 0 else super().submit(peer, batch)


class SkipsZeros(Wrong):
    """Leaves out blocks of zeros, as if the target's memory were new."""

    def register(self, regions: Sequence[Region]) -> None:
        super().register(regions)
        self.table = RegionTable(regions, self.name)

    def submit(self, peer: str, batch: Batch) -> Transfer:
        blocks = batch.blocks
        self.table.check("here", blocks.source, blocks.nbytes, blocks.source_region)
        rows = zip(blocks.source.tolist(), blocks.nbytes.tolist(), strict=True)
        full = [at for at, (source, nbytes) in enumerate(rows) if any(ctypes.string_at(source, nbytes))]
        if not full:
            return Transfer(Outcome(True))
        left = Blocks.concatenate([blocks[at : at + 1] for at in full])
        return super().submit(peer, batch._replace(blocks=left))


class TooFar(GrantsAll):
    """Writes one byte too far."""

    def submit(self, peer: str, batch: Batch) -> Transfer:
        longer = batch.blocks.nbytes.copy()
        longer[-1] += np.uint64(longer[-1] > 50)
        try:
            return super().submit(peer, batch._replace(blocks=dataclasses.replace(batch.blocks, nbytes=longer)))
        except TransferError:
            return super().submit(peer, batch)


class TooFarByPages(GrantsAll):
    """Writes one byte too far, if all blocks are pages."""

    def submit(self, peer: str, batch: Batch) -> Transfer:
        if (batch.blocks.nbytes == 4096).all():
            longer = batch.blocks.nbytes + np.uint64(1)
            batch = batch._replace(blocks=dataclasses.replace(batch.blocks, nbytes=longer))
        return super().submit(peer, batch)


class ForgetsOffset(Ungranted):
    """Writes each block to the beginning of its region."""

    name = "wrong-forgets-offset"

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.begins: dict[str, U64] = {}

    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        super().connect(peer, descriptor, regions)
        self.begins[peer] = np.array([region.address for region in regions], np.uint64)

    def submit(self, peer: str, batch: Batch) -> Transfer:
        if peer in self.begins:
            target = self.begins[peer][batch.blocks.target_region]
            batch = batch._replace(blocks=dataclasses.replace(batch.blocks, target=target))
        return super().submit(peer, batch)


class Sends(Ungranted):
    """Reports a batch as done when it is sent. Several blocks arrive later."""

    name = "wrong-sends"

    def submit(self, peer: str, batch: Batch) -> Transfer:
        if batch.blocks.count == 1:
            super().submit(peer, batch)
        else:
            threading.Timer(0.05, self.send, [peer, batch]).start()
        return Transfer(Outcome(True))

    def send(self, peer: str, batch: Batch) -> None:
        with contextlib.suppress(TransferError):
            super().submit(peer, batch)


class ReturnsNothing(Wrong):
    def submit(self, peer: str, batch: Batch) -> Transfer:
        super().submit(peer, batch)
        return None  # type: ignore[return-value]


class Unchecked(Wrong):
    """Takes whatever it is told to move to a peer that it knows."""

    def submit(self, peer: str, batch: Batch) -> Transfer:
        try:
            return super().submit(peer, batch)
        except TransferError as error:
            if "not connected" in str(error):
                raise
            return Transfer(Outcome(True))


class SharesStaging(Wrong):
    """Says that calls may overlap, and copies each batch through one buffer, without a lock."""

    capabilities = dataclasses.replace(
        TcpBackend.capabilities, submit_mode=SubmitMode.BLOCKING, stalled_peers=0, max_transfers=1, max_bytes=1 << 20
    )

    def register(self, regions: Sequence[Region]) -> None:
        self.buffer = np.zeros(1 << 20, np.uint8)
        staging = [Region(self.buffer.ctypes.data, self.buffer.nbytes)] if regions else []
        self.table, self.place = RegionTable(regions, self.name), len(regions)
        super().register([*regions, *staging])

    def submit(self, peer: str, batch: Batch) -> Transfer:
        blocks = batch.blocks
        self.table.check("here", blocks.source, blocks.nbytes, blocks.source_region)
        if blocks.total > len(self.buffer):
            return super().submit(peer, batch)
        staged = np.cumsum(blocks.nbytes) - blocks.nbytes + np.uint64(self.buffer.ctypes.data)
        for source, to, nbytes in zip(blocks.source.tolist(), staged.tolist(), blocks.nbytes.tolist(), strict=True):
            ctypes.memmove(to, source, nbytes)
        time.sleep(0.005)  # what other threads submit overwrites it meanwhile
        places = np.full(blocks.count, self.place, np.uint32)
        blocks = dataclasses.replace(blocks, source=staged, source_region=places)
        made = super().submit(peer, batch._replace(blocks=blocks))
        while made.outcome is None:
            time.sleep(0)
        return made


class OneRoom(Ungranted):
    """Says that a batch may carry several rooms, and refuses one that names none."""

    name = "wrong-one-room"
    capabilities = dataclasses.replace(Ungranted.capabilities, joins_rooms=True)

    def submit(self, peer: str, batch: Batch) -> Transfer:
        if not batch.room:
            raise TransferError("a batch needs its room")
        return super().submit(peer, batch)
