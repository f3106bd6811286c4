"""The server: one thread, one socket, one table."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any

from statelink import wire
from statelink._logs import logger
from statelink.errors import ConfigError, StatelinkError, WireError

from ._registry import Registry

__all__ = ["RendezvousServer"]

log = logger("statelink.rendezvous")

MAX_REQUEST = 16 << 10
"""Most bytes of a client's message. A registration with the longest names is shorter."""
BEAT_SECONDS = 1.0
"""Seconds between checks for expired entries, while no message comes."""


class RendezvousServer:
    """A server with which links register, and where they find each other. A context manager that closes itself.

    An instance is found once all of its ranks are registered. The server keeps nothing on disk. Links register again
    when the server is back, and links that are connected do not need it.

    Args:
        listen: Where to listen; port 0 picks a free port. It is one port, because links are configured with it.
        advertise: Host under which links reach it; the listening host if empty.
        keys: Its keys, and the keys that it allows; needed to listen beyond loopback unless ``insecure``.
        insecure: Listen beyond loopback without keys.
        lifetime: Seconds for which a silent rank is kept.

    Raises:
        ConfigError: It would listen beyond loopback without keys, or cannot listen there.
    """

    def __init__(
        self,
        listen: str = "tcp://127.0.0.1:0",
        *,
        advertise: str = "",
        keys: wire.Keys | None = None,
        insecure: bool = False,
        lifetime: float = 15.0,
    ) -> None:
        if not 0 < lifetime <= 86400:
            raise ConfigError("lifetime must be above zero and at most a day", cause=f"got {lifetime}")
        ports = wire.parse_listen(listen).ports
        if ports.several:
            raise ConfigError(
                "a rendezvous server listens at one port",
                cause=f"got the range {ports}, and links are configured with the address of the server",
                hint="write one port, such as tcp://10.0.0.5:7400",
                code="config.listen",
            )
        self._lifetime = lifetime
        self._registry = Registry(lifetime)
        self._early_until = time.monotonic() + lifetime  # by then, every rank that is there has registered again
        self._name = wire.link_name("rendezvous", keys)
        self._stopping = False
        self._lock = threading.Lock()
        with contextlib.ExitStack() as undo:
            self._channel = wire.Channel(
                self._name,
                listen,
                advertise=advertise,
                keys=keys,
                insecure=insecure,
                max_frame=MAX_REQUEST,
                kinds=wire.RENDEZVOUS_KINDS,
            )
            undo.callback(self._channel.close)
            self._waker, self._wakee = map(undo.enter_context, socket.socketpair())
            self._channel.start(self._wakee.fileno())
            self._thread = threading.Thread(target=self._run, name="statelink-rendezvous", daemon=True)
            self._thread.start()
            undo.pop_all()  # the thread closes the channel, and `close` the rest

    @property
    def address(self) -> str:
        """The value for ``rendezvous`` in a link's configuration: the address, with the public key if there is one."""
        return str(self._channel.endpoint)

    def snapshot(self) -> dict[str, Any]:
        """Instances with their ranks, dropped frames and refused keys. Callable from any thread."""
        with self._lock:
            instances = self._registry.snapshot()
        return {
            "address": self.address,
            "instances": instances,
            "dropped_frames": dict(self._channel.dropped),
            "refused_keys": self._channel.refused,
        }

    def close(self) -> None:
        """End the thread and close the port. May be called twice."""
        if self._stopping:
            return
        self._stopping = True
        self._waker.send(b"\0")
        self._thread.join()
        self._waker.close()
        self._wakee.close()

    def __enter__(self) -> RendezvousServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._stopping:
            try:
                for message, _ in self._channel.receive(BEAT_SECONDS):
                    self._handle(message)
                with self._lock:
                    self._registry.expire(time.monotonic())
            except Exception:
                log.exception("a message was not handled")
        self._channel.close()

    def _handle(self, message: wire.Message) -> None:
        if isinstance(message, wire.Register):
            self._register(message)
        elif isinstance(message, wire.Resolve):
            now = time.monotonic()
            with self._lock:
                addresses, present, ranks = self._registry.resolve(message.instance, now)
            self._channel.send(
                wire.Resolved(
                    sender=self._name,
                    to=message.sender,
                    instance=message.instance,
                    addresses=addresses,
                    present=present,
                    ranks=ranks,
                    early=now < self._early_until,
                )
            )
        elif isinstance(message, wire.Browse):
            with self._lock:
                listed = self._registry.browse(message.instance, message.rank, time.monotonic())
            self._channel.send(wire.Browsed(sender=self._name, to=message.sender, listed=listed))
        elif isinstance(message, wire.Bye):
            with self._lock:
                self._registry.leave(message.sender)
        else:
            kind = type(message).__name__.lower()
            self._channel.count(WireError("a message is not for a rendezvous server", cause=kind, code="wire.kind"))

    def _register(self, message: wire.Register) -> None:
        try:
            with self._lock:
                self._registry.register(message, self._channel.key_of(message.sender), time.monotonic())
        except StatelinkError as error:
            log.debug("%s", error)
            self._channel.send(wire.Refuse(sender=self._name, to=message.sender, reason=error.reason))
        else:
            self._channel.send(wire.Registered(sender=self._name, to=message.sender, lifetime=self._lifetime))
