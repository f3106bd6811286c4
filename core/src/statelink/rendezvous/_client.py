"""The client in a link: registers the link's address again and again, and asks for addresses of instances."""

from __future__ import annotations

import contextlib
import socket
import string
import threading
import time
from collections.abc import Iterable

from statelink import wire
from statelink._logs import logger
from statelink.errors import ConfigError, PeerError, Reason, WireError

from ._directory import Directory, DirectoryConfig, Instance
from ._listing import listed

__all__ = ["RendezvousClient"]

log = logger("statelink.rendezvous")

RESEND_SECONDS = 1.0
"""Seconds after which an unanswered question or registration is sent again."""
ANSWER_SECONDS = 0.25
"""Most seconds that `resolve` waits for an answer, if the server has answered before."""
SILENCE_SECONDS = 3.0
"""Seconds without an answer after which the connection is replaced."""
MOST_NAMED = 8
"""Most instances that a reason names."""
FORGET_SECONDS = 10.0
"""Seconds after which a question is dropped, if nobody asks it again."""


class RendezvousClient(Directory):
    """Finds instances through a `RendezvousServer`, the directory of the scheme ``tcp``.

    See `Directory`, also for the arguments.
    """

    takes_keys = True

    def __init__(self, config: DirectoryConfig, *, link: str) -> None:
        self._server = wire.parse_endpoint(config.address)
        self._link = link
        self._changed = threading.Condition()
        self._registration: wire.Register | None = None
        self._due = 0.0
        self._wanted: dict[str, float] = {}  # when somebody last asked for it
        self._answers: dict[str, tuple[wire.Endpoint, ...]] = {}
        self._silent = False
        self._asked: float | None = None  # when the server was first asked a question that it has not answered
        self._complaint: Reason | None = None
        self._trouble: wire.Trouble | None = None  # the connection's trouble, while the server does not answer
        # For an instance that was asked for: registered ranks, and all ranks.
        self._present: dict[str, tuple[int, int]] = {}
        # For an instance that was asked for and is not registered: registered ones that might be meant. Each set is
        # replaced, and never changed, because `explain` reads it on other threads.
        self._alike: dict[str, frozenset[str]] = {}
        self._closing = False
        with contextlib.ExitStack() as undo:
            self._waker, self._wakee = map(undo.enter_context, socket.socketpair())
            self._waker.setblocking(False)
            self._wakee.setblocking(False)
            self._channel = wire.Channel(
                link, "", advertise="", keys=config.keys, insecure=False, kinds=wire.RENDEZVOUS_KINDS
            )
            undo.callback(self._channel.close)
            self._channel.dial(self._server)
            self._channel.start(self._wakee.fileno())
            self._thread = threading.Thread(target=self._run, name="statelink-rendezvous", daemon=True)
            self._thread.start()
            undo.pop_all()  # the thread closes the channel, and `close` the rest

    @classmethod
    def check(cls, config: DirectoryConfig) -> None:
        """See `Directory.check`."""
        wire.check_dial(wire.parse_endpoint(config.address), config.keys)

    @classmethod
    def instances(cls, config: DirectoryConfig) -> list[Instance]:
        """See `Directory.instances`."""
        return listed(config)

    def register(self, instance: str, rank: int, ranks: int, address: str) -> None:
        """See `Directory.register`."""
        with self._changed:
            self._registration = wire.Register(
                sender=self._link, instance=instance, rank=rank, ranks=ranks, address=address
            )
            self._due = 0.0
        self._wake()

    def resolve(self, instance: str) -> tuple[wire.Endpoint, ...] | None:
        """See `Directory.resolve`. Waits a short time for the answer, or not at all while the server is silent."""
        with self._changed:
            fresh = instance not in self._wanted
            self._wanted[instance] = time.monotonic()
            if fresh:
                self._wake()
                if self._asked is None:
                    self._changed.wait_for(lambda: instance in self._answers or self._closing, ANSWER_SECONDS)
            longer = [name for name in self._alike.get(instance, ()) if _has_more(name, instance)]
            if longer and instance not in self._answers:
                del self._wanted[instance], self._alike[instance]
                raise PeerError(
                    f"no instance named {instance!r:.200}",
                    cause=f"registered with the rendezvous server at {self._server.address} are {_listed(longer)}",
                    hint="name one of these: an engine may add the rank of data parallelism to its name",
                    code="peer.unknown",
                )
            answer = self._answers.pop(instance, None)
            if answer is not None:
                del self._wanted[instance]
            return answer

    def explain(self, instance: str | None) -> tuple[str, str]:
        """See `Directory.explain`."""
        server = f"the rendezvous server at {self._server.address}"
        trouble = self._trouble
        if trouble is not None:
            return f"{server} does not answer: {trouble.what}", self._channel.hint(trouble)
        if instance is None:
            return "", ""
        present, ranks = self._present.get(instance, (0, 0))
        hint = "is every rank of prefill registered, under this name, with the same rendezvous server?"
        alike = self._alike.get(instance)
        words = f"{present} of its {ranks} ranks are" if ranks else "nobody of this name is"
        others = f", and {_listed(alike)} are" if alike else ""
        return f"{words} registered with {server}{others}", hint

    def close(self) -> None:
        """See `Directory.close`."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._wake()
        self._thread.join()
        self._waker.close()
        self._wakee.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # the pipe is full, so the thread wakes up anyway
            self._waker.send(b"\0")

    def _run(self) -> None:
        while not self._closing:
            try:
                self._ask()
                for message, _ in self._channel.receive(self._pause()):
                    with self._changed:
                        self._take(message)
                with contextlib.suppress(BlockingIOError):
                    self._wakee.recv(4096)
            except Exception:
                log.exception("defect: in the thread that speaks to the rendezvous server")
                time.sleep(RESEND_SECONDS)
        if self._registration is not None:
            self._channel.send(wire.Bye(sender=self._link), str(self._server))
        self._channel.close()

    def _pause(self) -> float:
        with self._changed:
            if self._wanted:
                return RESEND_SECONDS / 4
            return max(0.0, self._due - time.monotonic()) if self._registration else RESEND_SECONDS

    def _ask(self) -> None:
        """Send what is due."""
        now = time.monotonic()
        address = str(self._server)
        if self._asked is not None:
            known = self._channel.trouble(address)
            self._trouble = known or wire.Trouble.QUIET
            if now - self._asked > SILENCE_SECONDS:
                if known is not None and not self._silent:
                    log.warning(
                        "the rendezvous server at %s does not answer: %s; %s",
                        self._server.address,
                        known.what,
                        self._channel.hint(known),
                    )
                    self._silent = True
                # Messages that wait in the old connection are out of date, and would arrive all at once.
                self._channel.redial(self._server)
                # Only a new connection finds out why a server that has answered is silent. It soon knows.
                self._asked = now if known is not None else now - SILENCE_SECONDS + RESEND_SECONDS
        messages: list[wire.Message] = []
        with self._changed:
            if self._registration is not None and now >= self._due:
                self._due = now + RESEND_SECONDS
                messages.append(self._registration)
            self._wanted = {name: asked for name, asked in self._wanted.items() if now - asked < FORGET_SECONDS}
            messages += [
                wire.Resolve(sender=self._link, instance=name) for name in self._wanted if name not in self._answers
            ]
            self._answers = {name: found for name, found in self._answers.items() if name in self._wanted}
            if messages and self._asked is None:
                self._asked = now
        for message in messages:
            self._channel.send(message, str(self._server))

    def _take(self, message: wire.Message) -> None:
        """Take an answer. The caller holds the condition."""
        now = time.monotonic()
        self._asked = self._trouble = None
        if self._silent:
            log.warning("the rendezvous server at %s answers again", self._server.address)
            self._silent = False
        if isinstance(message, wire.Registered):
            self._due = now + message.lifetime / 3
            self._complain(None)
        elif isinstance(message, wire.Refuse):
            self._complain(message.reason)
        elif isinstance(message, wire.Resolved) and message.instance in self._wanted:
            self._present = {name: seen for name, seen in self._present.items() if name in self._wanted}
            self._present[message.instance] = message.present, message.ranks
            self._alike = {name: found for name, found in self._alike.items() if name in self._wanted}
            if not message.present and not message.early and message.instance not in self._alike:
                self._alike[message.instance] = frozenset()
                # Names that begin with a text come first among those behind it.
                for begin in dict.fromkeys((message.instance, _without_number(message.instance))):
                    self._channel.send(wire.Browse(sender=self._link, instance=begin, rank=0), str(self._server))
            if not message.addresses:
                return
            try:
                self._answers[message.instance] = tuple(map(wire.parse_endpoint, message.addresses))
            except ConfigError as error:
                self._channel.count(WireError("an answer has no addresses", cause=error.reason.what, code="wire.body"))
            self._changed.notify_all()
        elif isinstance(message, wire.Browsed):
            names = {each.instance for each in message.listed}
            for wanted, alike in self._alike.items():
                if wanted not in names:
                    found = {name for name in names if _has_more(name, wanted) or _has_other_number(name, wanted)}
                    self._alike[wanted] = alike | found

    def _complain(self, reason: Reason | None) -> None:
        """Log a refusal once, and log when it ends."""
        if reason != self._complaint:
            if reason is None:
                log.warning("the rendezvous server has accepted this link again")
            else:
                log.warning("%s", reason.coded)
        self._complaint = reason


def _listed(names: Iterable[str]) -> str:
    """The first of some names, for a message."""
    return ", ".join(sorted(names)[:MOST_NAMED])


def _has_more(name: str, wanted: str) -> bool:
    """Whether a name is the wanted one and more, such as a rank of data parallelism."""
    return name.startswith(wanted) and name != wanted and not name[len(wanted)].isalnum()


def _has_other_number(name: str, wanted: str) -> bool:
    """Whether two names differ in the number at their end, such as two ranks of data parallelism, or two instances."""
    begin = _without_number(wanted)
    return name != wanted and begin != wanted and _without_number(name) == begin and name != begin


def _without_number(name: str) -> str:
    """A name without the number at its end."""
    return name.rstrip(string.digits)
