"""The side that is written to: it makes the memory, and puts the bytes in place itself."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import threading
from struct import Struct
from struct import error as StructError

import msgspec
import numpy as np

from ._grants import Grants
from ._segment import DONE, MAX_BLOCKS, REFUSED, Request, Segment, Stream

__all__ = ["GREETING_SECONDS", "Hello", "Inbound", "shut"]

GREETING_SECONDS = 10.0
"""How long two sides wait for each other's first message."""

CREDENTIALS = Struct("3i")


class Hello(msgspec.Struct, frozen=True):
    """The first message of a peer."""

    link: str
    secret: str


class Inbound:
    """A listening socket, and a thread for each peer that writes to us.

    Args:
        payload: Bytes of the memory that is shared with each of them.

    Attributes:
        name: Where it listens.
        secret: What peers have to show.
        grants: What they may write.
    """

    def __init__(self, payload: int) -> None:
        self.name = f"statelink-shm-{secrets.token_hex(16)}"
        self.secret = secrets.token_hex(16)
        self.grants = Grants()
        self._payload = payload
        self._lock = threading.Lock()
        self._peers: dict[str, socket.socket] = {}
        self._all: dict[socket.socket, threading.Thread] = {}
        # Abstract, as its first byte says: it goes with its process, and leaves no file behind.
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen()
        self._accepting = threading.Thread(target=self._accept, name="statelink-shm-accept", daemon=True)
        self._accepting.start()

    def forget(self, peer: str) -> None:
        """Once this returns, nothing that ``peer`` sent lands any more."""
        self.grants.forget(peer)
        with self._lock:
            found = self._peers.pop(peer, None)
            thread = self._all.get(found) if found is not None else None
        if found is not None and thread is not None:
            shut(found)
            thread.join()

    def close(self) -> None:
        """End all threads; may be called twice."""
        self.grants.clear()
        shut(self._listener)
        self._accepting.join()
        with self._lock:
            known = dict(self._all)
        for each in known:
            shut(each)
        for thread in known.values():
            thread.join()

    def _accept(self) -> None:
        with self._listener:
            while True:
                try:
                    channel, _ = self._listener.accept()
                except OSError:
                    return
                thread = threading.Thread(target=self._serve, args=(channel,), name="statelink-shm-peer", daemon=True)
                with self._lock:
                    self._all[channel] = thread
                thread.start()

    def _serve(self, channel: socket.socket) -> None:
        peer = ""
        try:
            peer = self._greet(channel)
            if peer:
                self._receive(channel, peer)
        except (OSError, StructError, msgspec.MsgspecError, UnicodeError, RecursionError):
            pass  # none of ours, or gone: if there is anybody, they see that the socket is closed
        finally:
            with self._lock:
                del self._all[channel]
                if self._peers.get(peer) is channel:
                    del self._peers[peer]
            channel.close()

    def _greet(self, channel: socket.socket) -> str:
        """The name of a peer that may come in, which then has the memory; empty for others."""
        channel.settimeout(GREETING_SECONDS)
        _, user, _ = CREDENTIALS.unpack(channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
        hello = msgspec.json.decode(channel.recv(4096), type=Hello)
        if user != os.getuid() or not hmac.compare_digest(hello.secret.encode(), self.secret.encode()):
            return ""
        channel.settimeout(None)
        with self._lock:
            self._peers[hello.link] = channel
        return hello.link

    def _receive(self, channel: socket.socket, peer: str) -> None:
        """Answer requests until the peer or we close the socket."""
        file = Segment.make(self._payload)
        try:
            socket.send_fds(channel, [b"welcome"], [file])
        except OSError:
            os.close(file)
            raise
        segment = Segment(file)
        table, left = segment.table[:0], Stream(np.empty(0, np.uint64), np.empty(0, np.uint64))
        while raw := channel.recv(4096):
            request = Request.decode(raw)
            if request.blocks > MAX_BLOCKS:
                return
            if request.blocks:
                # A copy: what is checked must not change afterwards.
                table = segment.table[: request.blocks].copy()
                left = Stream(table[:, 0], table[:, 1])
            grants, key = self.grants, (peer, request.room, request.generation)
            with grants.lock:
                good = grants.hold(key, table[:, 0], table[:, 1])
                if good:
                    segment.scatter(left, request.nbytes)
            channel.send(DONE if good else REFUSED)


def shut(channel: socket.socket) -> None:
    """Wake whoever waits for this socket, and say goodbye to its other end."""
    with contextlib.suppress(OSError):  # it is closed already, or its other end is gone
        channel.shutdown(socket.SHUT_RDWR)
