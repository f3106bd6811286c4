"""What runs on a link's control thread: it hands messages to the roles, calls their heartbeats, and ends the link."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from statelink.wire import Standing

if TYPE_CHECKING:
    from statelink.wire import Message

    from ._context import Context
    from .decode import DecodeRole
    from .prefill import PrefillRole

__all__ = ["Control", "Role"]

LATE_SECONDS = 5.0
"""Seconds by which the control thread may be late with what a thread of the engine waits for."""


class Role(Protocol):
    """What both prefill and decode do. On the control thread, unless a method says otherwise."""

    def beat(self, now: float, late: float) -> None:
        """Send signs of life, and give up silent peers.

        Args:
            now: The time.
            late: Seconds for which this process did not run since the last heartbeat; no peer was silent in them.
        """

    def close(self) -> None:
        """Send goodbyes to all peers."""

    def busy(self) -> bool:
        """Whether it is not proven of the memory of every ended room that nothing touches it."""

    def suspend(self) -> None:
        """Say goodbye to all peers, and forget them. Connect to no peer until `resume`."""

    def resume(self) -> None:
        """Connect again to the peers that wait for it."""

    def ranks(self, now: float) -> list[dict[str, Any]]:
        """The ranks of the other side: state, age and when each was last heard. Any thread."""

    def snapshot(self) -> dict[str, tuple[str, list[str]]]:
        """The state of each peer, and the link names of its ranks, as far as they are known. Any thread."""

    def load(self) -> dict[str, int]:
        """Numbers of the things that are kept beside the rooms. Any thread."""


class _Errand:
    """Work of the control thread for which a thread of the engine waits. It is not done after that thread gave up."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._lock = threading.Lock()
        """Held while the work is done, so that the waiting thread knows whether it was done."""
        self._left = False
        self._done = False

    def do(self, work: Callable[[], None]) -> None:
        """Do the work, unless nobody waits for it any more. Control thread."""
        try:
            with self._lock:
                if not self._left:
                    work()
                    self._done = True
        finally:
            self._over.set()

    def give_up(self) -> None:
        """Say that the work will not be done. Control thread."""
        self._over.set()

    def wait(self, timeout: float) -> bool:
        """Wait for the work. Returns whether it was done; otherwise it never will be. A thread of the engine."""
        try:
            self._over.wait(timeout)
        finally:
            with self._lock:
                self._left = True
        return self._done


class Control:
    """Starts and ends the control thread, and hands each message to the role that it is for.

    The connection says which role that is. Decode dials prefill. So a message from a link that dialled this one is for
    prefill, and a message from a link that this one dialled is for decode. There is one exception: ranks of prefill
    dial each other, and the answer is `Standing`. Two links of the role ``both`` have a connection for each direction.

    Args:
        context: The link's parts.
        prefill: The role that sends, if this link has it.
        decode: The role that receives, if this link has it.
    """

    def __init__(self, context: Context, prefill: PrefillRole | None, decode: DecodeRole | None) -> None:
        self._context = context
        self._prefill = prefill
        self._decode = decode
        self.roles: list[Role] = [role for role in (prefill, decode) if role is not None]
        self._due_beat = 0.0
        self._left = False
        """Whether goodbyes were sent. From then on, messages are not handled: a peer that greets this link again while
        its backend is closed would connect to a backend that is about to go."""

    def start(self) -> None:
        """Start the control thread. Called once, by the thread that opens the link."""
        context = self._context
        context.channel.start(context.loop.fileno(), self._knows)
        self._due_beat = context.now() + context.config.heartbeat
        context.after(context.config.heartbeat, self._beat)
        context.loop.start(self._receive, context.channel.close)

    def _knows(self, name: str) -> bool:
        """Whether a link that dialled this one has introduced itself to prefill. Control thread."""
        return self._prefill is not None and self._prefill.knows(name)

    def _receive(self, timeout: float | None) -> None:
        loop = self._context.loop
        for message, address in self._context.channel.receive(timeout):
            loop.asleep = False  # it looks at what is posted once the messages are handled
            loop.guard(self._handle, message, address)

    def _handle(self, message: Message, address: str | None) -> None:
        if self._left:
            return
        if address is not None:
            if isinstance(message, Standing):
                if self._prefill is not None:
                    self._prefill.handle_sibling(message, address)
            elif self._decode is not None:
                self._decode.handle(message, address)
        elif self._prefill is not None:
            self._prefill.handle(message)
        elif self._decode is not None:
            self._decode.handle_sibling(message)

    def _beat(self) -> None:
        heartbeat = self._context.config.heartbeat
        now = self._context.now()
        late = now - self._due_beat
        self._due_beat = now + heartbeat
        if self._left:
            return
        self._context.after(heartbeat, self._beat)
        self._context.workers.revive()
        for role in self.roles:
            role.beat(now, late if late > heartbeat else 0.0)

    def suspend(self, timeout: float) -> bool:
        """Wait for proof that all memory is quiet, for ``timeout`` seconds at most, and then forget all peers.

        Blocks; called on the engine's thread. Returns whether the peers are forgotten. If not, the roles go on.
        """
        context = self._context
        errand = _Errand()
        until = context.now() + timeout

        # Runs on the control thread.
        def again() -> None:
            if not any(role.busy() for role in self.roles):
                errand.do(self._suspend)
            elif context.now() < until:
                context.after(0.005, again)
            else:
                errand.give_up()

        context.post_job(again)
        return errand.wait(timeout + LATE_SECONDS)

    def _suspend(self) -> None:
        """Suspend all roles, or none. Control thread."""
        try:
            for role in self.roles:
                role.suspend()
        except BaseException:
            self._resume()
            raise

    def _resume(self) -> None:
        for role in self.roles:
            self._context.loop.guard(role.resume)

    def resume(self, change: Callable[[], None]) -> bool:
        """Run ``change`` on the control thread, and connect again to the peers.

        Blocks; called on the engine's thread. Returns whether that was done. If not, it will not be.
        """
        errand = _Errand()

        def work() -> None:
            change()
            self._resume()

        self._context.post_job(errand.do, work)
        return errand.wait(LATE_SECONDS)

    def stop(self, timeout: float) -> bool:
        """Say goodbye, end the threads and close the backend.

        Blocks; called on the engine's thread that closes the link. Returns whether the threads ended within
        ``timeout`` seconds each.
        """
        context = self._context
        done = threading.Event()

        # Runs on the control thread, which sets ``done``.
        def goodbye() -> None:
            until = context.now() + timeout

            def again() -> None:
                if any(role.busy() for role in self.roles) and context.now() < until:
                    context.after(0.005, again)
                    return
                for role in self.roles:
                    role.close()
                self._left = True
                done.set()

            again()

        context.post_job(goodbye)
        done.wait(timeout + 5)
        ended = context.close(timeout)
        return context.loop.stop(timeout) and ended
