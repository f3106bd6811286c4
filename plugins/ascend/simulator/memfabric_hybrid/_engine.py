"""The TransferEngine."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from . import _memory, _settings
from ._errors import failed
from ._logs import ERROR, TRACE, log, start
from ._native import U8, U32, U64, Addresses, Text, TransDataOpType, native, text_of
from ._sessions import Record, Session, address_of, find

__all__ = ["TransferEngine"]

GENERIC, INVALID = -1, -2000
SDMA, HOST_RDMA, HOST_TCP = 1, 2, 4
KINDS = (SDMA, HOST_RDMA, HOST_TCP, 8, 64, 128)
HOST_KINDS = (HOST_RDMA, HOST_TCP)
MOST_RANGES = 1048576
NO_HANDLE = "smem trans not initialized yet"


class _Known(NamedTuple):
    """A session that this engine connected to; kept when it dies."""

    record: Record
    since: float


class TransferEngine:
    """One side of transfers: a ``Prefill``, which connects when it first transfers, or a ``Decode``, which waits."""

    def __init__(self) -> None:
        self._session: Session | None = None
        self._server = False
        self._kind = SDMA
        self._nowhere = False
        self._recorded: list[tuple[list[int], list[int]]] = []
        self._ranges: list[tuple[int, int]] = []
        self._known: dict[str, _Known] = {}
        self._lock = threading.Lock()
        self._contacting = threading.Lock()
        """Held by one first contact: others wait for it, whomever they are to; what is connected already does not."""

    @native
    def initialize(
        self,
        store_url: Text,
        session_id: Text,
        role: Text,
        device_id: U32,
        data_op_type: TransDataOpType = TransDataOpType.SDMA,
        store_server_role: Text = "Decode",
        nic: Text = "",
    ) -> int:
        """Start, and listen; on a live engine, start again under another address."""
        if role is None:
            os.kill(os.getpid(), signal.SIGSEGV)
        if role not in ("Prefill", "Decode"):
            return GENERIC
        start()
        url = text_of(store_url)
        kind = int(data_op_type)
        if not _settings.has_npu() or kind not in KINDS or device_id >= _settings.devices():
            log(ERROR, "SMEM", "hybm core init failed: -1")
            log(ERROR, "ADAPTER", "Failed to init smem_trans, ret=-1")
            return GENERIC
        server = role == store_server_role
        if kind == HOST_RDMA and not _is_nic(nic or ""):
            return GENERIC
        if server and "://" in url and not url.startswith("tcp://"):
            return GENERIC
        name = text_of(session_id)
        address = address_of(name)
        if address is None and server:
            return failed(GENERIC, f"CreateParser failed, url: tcp://{name}")
        host, port = address or ("127.0.0.1", 0)
        if server and 0 < port < 1024:
            return INVALID
        try:
            session = Session(host, port, server)
        except OSError:
            return GENERIC
        self.destroy()
        _memory.invite()
        self._session, self._server, self._kind = session, server, kind
        log(TRACE, "SMEM", f"initialize, session: {session.name}")
        self._nowhere = address is None  # what a client is called shows when it connects
        return 0

    @native
    def get_rpc_port(self) -> int:
        """The port of the session; 0 before there is one."""
        return self._session.port if self._session else 0

    @native
    def register_memory(self, buffer_addr: U64, capacity: U64) -> int:
        """Publish a range."""
        return self._register([buffer_addr], [capacity])

    @native
    def batch_register_memory(self, buffer_addrs: Addresses, capacities: Addresses) -> int:
        """Publish ranges; those whose pages overlap become one."""
        if len(buffer_addrs) != len(capacities):
            return GENERIC
        return self._register(buffer_addrs, capacities)

    @native
    def unregister_memory(self, buffer_addr: U64) -> int:
        """Forget a range, which keeps nobody out who knew it."""
        if not buffer_addr:
            return failed(INVALID, "invalid address, which is null")
        if self._session is not None:
            self._session.withdraw(buffer_addr)
        return 0

    @native
    def transfer_sync_write(
        self, dest_session: Text, buffer: U64, peer_buffer: U64, length: U64, flags: U32 = 0
    ) -> int:
        """Copy local memory to a peer's."""
        return self._transfer(dest_session, [buffer], [peer_buffer], [length], flags, True)

    @native
    def transfer_sync_read(self, dest_session: Text, buffer: U64, peer_buffer: U64, length: U64, flags: U32 = 0) -> int:
        """Copy a peer's memory to local memory."""
        return self._transfer(dest_session, [buffer], [peer_buffer], [length], flags, False)

    @native
    def batch_transfer_sync_write(
        self, dest_session: Text, buffers: Addresses, peer_buffers: Addresses, lengths: Addresses, flags: U32 = 0
    ) -> int:
        """Copy pieces of local memory to a peer's."""
        return self._transfer(dest_session, buffers, peer_buffers, lengths, flags, True)

    @native
    def batch_transfer_sync_read(
        self, dest_session: Text, buffers: Addresses, peer_buffers: Addresses, lengths: Addresses, flags: U32 = 0
    ) -> int:
        """Copy pieces of a peer's memory to local memory."""
        return self._transfer(dest_session, buffers, peer_buffers, lengths, flags, False)

    @native
    def transfer_async_write_submit(
        self, dest_session: Text, buffer: U64, peer_buffer: U64, length: U64, stream: U64, flags: U32 = 0
    ) -> int:
        """Queue it on a stream; the streams of this machine are always done."""
        return self._submit(dest_session, [buffer], [peer_buffer], [length], stream, flags, True)

    @native
    def transfer_async_read_submit(
        self, dest_session: Text, buffer: U64, peer_buffer: U64, length: U64, stream: U64, flags: U32 = 0
    ) -> int:
        """Queue it on a stream."""
        return self._submit(dest_session, [buffer], [peer_buffer], [length], stream, flags, False)

    @native
    def batch_transfer_async_write_submit(
        self,
        dest_session: Text,
        buffers: Addresses,
        peer_buffers: Addresses,
        lengths: Addresses,
        stream: U64,
        flags: U32 = 0,
    ) -> int:
        """Queue them on a stream."""
        return self._submit(dest_session, buffers, peer_buffers, lengths, stream, flags, True)

    @native
    def batch_transfer_async_read_submit(
        self,
        dest_session: Text,
        buffers: Addresses,
        peer_buffers: Addresses,
        lengths: Addresses,
        stream: U64,
        flags: U32 = 0,
    ) -> int:
        """Queue them on a stream."""
        return self._submit(dest_session, buffers, peer_buffers, lengths, stream, flags, False)

    @native
    def batch_transfer_write_with_quant(
        self,
        dest_session: Text,
        buffers: Addresses,
        peer_buffers: Addresses,
        lengths: Addresses,
        scale_buffers: Addresses,
        offset_buffers: Addresses,
        unit_num: U32,
        input_type: U8 = 0,
        stream: U64 = 0,
        flags: U32 = 0,
    ) -> int:
        """This machine's NPU cannot."""
        if self._session is None:
            return failed(GENERIC, NO_HANDLE)
        if any(each and len(each) != len(buffers) for each in (scale_buffers, offset_buffers)):
            return GENERIC
        return failed(GENERIC, "not support quant copy")

    @native
    def destroy(self) -> None:
        """Leave the group, and close connections."""
        session, self._session = self._session, None
        self._known.clear()
        self._ranges.clear()
        if session is not None:
            session.close()

    @native
    def unInitialize(self) -> None:
        """Release the driver."""
        self.destroy()

    def __del__(self) -> None:
        session = getattr(self, "_session", None)
        if session is not None:
            session.close()

    def _register(self, addresses: list[int], sizes: list[int]) -> int:
        if not self._server or self._session is None:
            # A client only takes notes, whatever they say, until it connects; so does an engine that never started.
            self._recorded.append((addresses, sizes))
            if self._session is not None and self._known:
                self._replay()
            return 0
        code = self._publish(addresses, sizes)
        return failed(code, "register local failed, result: -1") if code == GENERIC else code

    def _publish(self, addresses: list[int], sizes: list[int]) -> int:
        if not addresses or len(addresses) > MOST_RANGES or not all(addresses) or not all(sizes):
            return INVALID
        if self._kind not in HOST_KINDS and not _memory.are_npu(addresses):
            return GENERIC  # "register dram not supported"
        ranges = _memory.widened(addresses, sizes)
        if self._kind == HOST_TCP and _memory.overlap(self._ranges, ranges):
            return GENERIC  # "conflicts with existing region"
        self._ranges += ranges
        assert self._session is not None
        self._session.publish(ranges)
        return 0

    def _replay(self) -> bool:
        """Publish what was noted; whether all of it could be."""
        recorded, self._recorded = self._recorded, []
        refused = [each for each in recorded if self._publish(*each) != 0]
        self._recorded += refused
        return not refused

    def _transfer(
        self,
        dest: str | None,
        near: Sequence[int],
        far: Sequence[int],
        sizes: Sequence[int],
        flags: int,
        write: bool,
    ) -> int:
        # The connection comes first, whatever the lists say.
        name = text_of(dest)
        if self._session is None:
            return failed(GENERIC, NO_HANDLE)
        address = address_of(name)
        if address is None or not address[1]:
            return failed(GENERIC, f"create trans entry failed, session: {name}")
        if address[1] < 1024:
            return INVALID if self._server else failed(GENERIC, f"create trans entry failed, session: {name}")
        if not self._server and name not in self._known:
            with self._contacting:
                code = 0 if name in self._known else self._connect(name)
            if code != 0:
                return code
        if not len(near) == len(far) == len(sizes):
            return GENERIC
        if not sizes:
            return INVALID
        if flags not in (0, 2):
            return failed(INVALID, "invalid flags")
        if not all(near) or not all(far):
            return failed(INVALID, "invalid address, which is null")
        if not all(sizes):
            return failed(INVALID, "invalid dataSizes, which is 0")
        here, there, lengths = (np.array(each, np.uint64) for each in (near, far, sizes))
        return self._move(name, here, there, lengths, write)

    def _connect(self, name: str) -> int:
        """Reach a store, and tell it of our memory."""
        text = f"create trans entry failed, session: {name}"
        until = time.monotonic() + _settings.contact_seconds()
        if self._nowhere:
            return failed(GENERIC, text)
        while (found := find(name)) is None or not found.server or found.state != "alive":
            if time.monotonic() > until:
                return failed(GENERIC, text)
            time.sleep(0.005)
        if not found.ranges:
            time.sleep(_settings.publish_seconds())
        with self._lock:
            session = self._session
            if session is None:
                return failed(GENERIC, NO_HANDLE)
            if not self._replay():
                return failed(GENERIC, "register local failed, result: -1")
            session.joined(name)
            log(TRACE, "SMEM", f"create trans entry, session: {name}")
            self._known[name] = _Known(found, time.monotonic())
        return 0

    def _move(
        self,
        name: str,
        near: _memory.Column,
        far: _memory.Column,
        sizes: _memory.Column,
        write: bool,
    ) -> int:
        record, ranges = self._look(name)
        if record is None or record.pid == os.getpid():  # one process is one member, and does not find itself
            return INVALID
        inside = np.zeros(len(sizes), bool)
        for begin, end in ranges:
            first, size = np.uint64(begin), np.uint64(end - begin)
            inside |= (far >= first) & (sizes <= size) & (far - first <= size - np.minimum(sizes, size))
        if not inside.all():
            return INVALID
        last = _settings.fail_after()
        part = slice(0, last)
        if record.state == "dead" or find(name) is None:
            return GENERIC
        whole = _memory.copy(record.pid, near[part], far[part], sizes[part], write)
        return 0 if whole and (last is None or last >= len(sizes)) else GENERIC

    def _look(self, name: str) -> tuple[Record | None, list[tuple[int, int]]]:
        """A session as this engine knows it: nothing, where it does not."""
        found = find(name)
        if not self._server:
            known = self._known[name]
            if found is not None and found[:2] == known.record[:2]:
                known = known._replace(record=found)
                self._known[name] = known
            return known.record, known.record.visible(known.since)
        assert self._session is not None
        if found is None:
            kept = self._known.get(name)
            return (kept.record, kept.record.visible(kept.since)) if kept else (None, [])
        since = found.connected.get(self._session.name)
        if since is None or time.monotonic() < since + _settings.publish_seconds():
            return None, []
        self._known[name] = _Known(found, since)
        return found, found.visible(since)

    def _submit(
        self,
        dest: str | None,
        near: Sequence[int],
        far: Sequence[int],
        sizes: Sequence[int],
        stream: int,
        flags: int,
        write: bool,
    ) -> int:
        if self._session is not None and not stream:
            return INVALID
        if self._session is not None and self._kind != SDMA:
            return GENERIC
        return self._transfer(dest, near, far, sizes, flags, write)


def _is_nic(nic: str) -> bool:
    return bool(re.fullmatch(r"tcp://(\[[0-9a-fA-F:]+\]|[\d.]+):\d+", nic))
