"""A transfer library alone, called as fast as it can be: what a backend over it is measured against.

A backend gives it with `statelink.backend.RawTransfers`. Everything that does not depend on a request is done before:
memory is registered, peers are known, and the blocks are listed and merged. What is timed, in the sending process, is
the library's call or calls, until the bytes have arrived.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from statelink.backend import RawLibrary, RawTransfers
from statelink.registry import load_backend
from statelink.state import Region

if TYPE_CHECKING:
    from .floor import Rows

__all__ = ["engine"]


@contextlib.contextmanager
def engine(backend: str, name: str, memory: Rows, where: str) -> Iterator[RawLibrary | None]:
    """The library behind a backend; ``None`` if the backend gives none.

    Args:
        backend: The backend's name.
        name: ``source`` or ``target``.
        memory: Address and length of each range of memory to register.
        where: ``host``, or the device that it belongs to, as torch names it.
    """
    kind = load_backend(backend)
    if not issubclass(kind, RawTransfers):
        yield None
        return
    regions = [Region(address, nbytes, "dram" if where == "host" else where) for address, nbytes in memory.tolist()]
    made = kind.raw(name, kind.Options(), "127.0.0.1", regions)
    try:
        yield made
    finally:
        made.close()
