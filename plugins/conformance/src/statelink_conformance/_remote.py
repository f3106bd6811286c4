"""A backend in another process, for a plugin's own tests: driven from here, over memory that both processes see."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from statelink.backend import Outcome, Side

from . import _inside
from ._bench import End, Subject
from ._inside import Move
from ._worker import Host
from ._workers import Died, Worker

if TYPE_CHECKING:
    from typing_extensions import Self

    from statelink.backend import Blocks
    from statelink.state import Region

__all__ = ["RemoteBackend"]


class RemoteBackend(End):
    """A backend in a process of its own. It has none before `open`, and may have one after another.

    What the backend raises there is raised here, and so is the end of the process. Not for several threads at once.

    Args:
        backend: Entry-point name of the backend.
        link: Name of its link.
        layout: Bytes of each region. The regions of one inner list lie side by side, those of two lists do not.
        options: Its options.
        environment: Changes to this process's environment.
        memory: Kind of the memory.
        allocator: What allocates memory of a device, as ``BackendTests.allocator``.
        patience: Seconds after which a call, or a transfer, counts as stuck.

    Attributes:
        arrays: The bytes of each region, uint8. The test looks at them, and writes them, without the backend.
        regions: The region table that the backend registers, with addresses of the other process.
        descriptor: What its peers need; empty before `open`.
    """

    def __init__(
        self,
        backend: str,
        link: str,
        layout: Sequence[Sequence[int]],
        *,
        options: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        memory: str = "dram",
        allocator: str = "",
        patience: float = 30.0,
    ) -> None:
        subject = Subject(backend, _inside.kind_of(backend), dict(options or {}), patience, memory)
        worker = Worker(environment or {}, patience, (memory, allocator))
        super().__init__(subject, worker, link, layout, side=Side.TARGET)

    def begin_open(self, role: str = "", **options: Any) -> Self:
        """The first half of `open`, so that several can open at the same time; `ready` is the second."""
        self.worker.start(_inside.open_backend, self.link, role, self.subject.name, self._with(options), self.regions)
        return self

    def ready(self) -> Self:
        """Wait until it is open."""
        self.descriptor = self.worker.result()
        return self

    def open(self, role: str = "", **options: Any) -> Self:
        """Make the backend, register all regions, and learn its descriptor.

        Args:
            role: That of its link.
            **options: Beside those that were given before.
        """
        return self.begin_open(role, **options).ready()

    def construct(self, role: str = "", **options: Any) -> None:
        """Only make the backend."""
        self.call(_inside.construct, role, self.subject.name, self._with(options))

    def register(self, regions: Sequence[Region]) -> None:
        """Register memory: all regions, or what is said to be memory there."""
        self.call(_inside.register, regions)

    def describe(self) -> bytes:
        """Learn its descriptor."""
        self.descriptor = self.call(_inside.descriptor)
        return self.descriptor

    def meet(self, link: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        """Connect it to a peer as `connect` does, with whatever descriptor."""
        self.call(_inside.connect, link, descriptor, regions)

    def close(self) -> None:
        """Close the backend."""
        self.call(_inside.close)

    def move(self, peer: End | str, blocks: Blocks) -> list[Outcome]:
        """Move blocks to or from a peer as the core does, cut to the backend's limits: how each transfer ended."""
        order = Move(self.link, peer if isinstance(peer, str) else peer.link, blocks)
        outcomes: list[Outcome] = self.worker(_inside.move, order, self.subject.patience)
        return outcomes

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the process; it takes the backend before these arguments.

        It is found by its module and name there. Arguments and result are pickled.
        """
        return self.call(_inside.run, function, *arguments)

    def _with(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {**self.subject.options, **options}

    def setenv(self, name: str, value: str) -> None:
        """Change the process's environment; an empty value removes the variable."""
        self.worker(_inside.set_environment, name, value)

    def forget(self) -> None:
        """Close what is open in the process, and let go of it; another backend may be opened there."""
        self.worker(Host.close_all)

    def stop(self) -> None:
        """Let the process stand still; returns when it does."""
        self.worker.stop()

    def go_on(self) -> None:
        """Let the process run again."""
        self.worker.go_on()

    def kill(self) -> None:
        """End the process without warning, and free what it had here. May be called twice."""
        self.worker.end()

    def end(self) -> tuple[int, str]:
        """Close what is open there, and let the process end by itself: its exit status, and the end of its output."""
        with contextlib.suppress(Died):
            self.worker(Host.close_all)
        found = self.worker.leave(), self.worker.log()
        self.worker.end()
        return found
