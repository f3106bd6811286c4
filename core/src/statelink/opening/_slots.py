"""Links of this process, by backend: some libraries cannot start again while they run."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from statelink.errors import BackendUnavailableError

if TYPE_CHECKING:
    from statelink.backend import Backend

__all__ = ["LinkSlot"]

_lock = threading.Lock()
_taken: dict[str, list[str]] = {}
"""Name of the backend to names of the links that use it."""


class LinkSlot:
    """One of the links that a backend may have in this process. Thread-safe.

    It is taken before the backend is made, and free once the backend is closed.

    Args:
        backend: The backend's class.
        link: Name of the link.

    Raises:
        BackendUnavailableError: As many links are open as the backend declares for one process.
    """

    def __init__(self, backend: type[Backend], link: str) -> None:
        self._backend = backend.name
        self._link = link
        most = backend.capabilities.links_per_process
        with _lock:
            links = _taken.setdefault(backend.name, [])
            if most is not None and len(links) >= most:
                raise BackendUnavailableError(
                    f"link {link!r} cannot be opened",
                    cause=f"backend {backend.name!r} has at most {most} in one process, which has {', '.join(links)}",
                    hint="close a link first, or open this one in another process",
                    code="backend.links",
                    backend=backend.name,
                )
            links.append(link)

    def free(self) -> None:
        """Let another link have it. May be called twice."""
        with _lock:
            links = _taken[self._backend]
            if self._link in links:
                links.remove(self._link)
