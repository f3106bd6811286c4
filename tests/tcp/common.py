"""What the tests of the embedded backend share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from statelink.backend import Batch, Blocks

from .remote import Remote

if TYPE_CHECKING:
    from .node import Node

SLOWLY = {"pause": 0.001, "most": 16 << 10}
"""What `Reads.reads` is given, so that a large batch takes seconds: so many bytes in a millisecond."""
U64 = npt.NDArray[np.uint64]

SPACE = 24 << 20
POISON = 0xA5
MODES = ("COPY", "LOOP", "SEND")
"""How a batch travels: the receiver reads it from the sender's memory; the same, where a link's control thread takes
the replies; or the connection carries it."""


def u64(*values: int) -> U64:
    return np.array(values, np.uint64)


@contextlib.contextmanager
def extra_process(nbytes: int = SPACE) -> Iterator[Remote]:
    remote = Remote(nbytes)
    remote.memory[:] = POISON
    try:
        yield remote
    finally:
        remote.kill()


def join(source: Any, target: Any, mode: str = "COPY", *, a: str = "source", b: str = "target", **options: Any) -> None:
    """Open a link at both ends and connect them; everything at the target is claimed to be one region."""
    options = {**opening(mode), **options}
    ours, theirs = source.do("open", a, **options), target.do("open", b, **options)
    source.do("connect", a, b, theirs)
    target.do("connect", b, a, ours)


def opening(mode: str) -> dict[str, bool]:
    """What `Node.open` is given for a mode."""
    return {"same_host_copy": mode != "SEND", "loop": mode == "LOOP"}


def grant_all(target: Any, room: int = 1, generation: int = 1, *, a: str = "source", b: str = "target") -> None:
    target.do("grant", b, a, room, generation, u64(target.address), u64(len(target.memory)))


def write(source: Any, target: Any, *, room: int = 1, generation: int = 1, at: int = 0, nbytes: int = 1000) -> Any:
    """Write one block to ``at`` of the target; the outcome."""
    blocks = u64(source.address), u64(target.address + at), u64(nbytes)
    return source.do("outcome", source.do("write", "source", "target", room, generation, *blocks))


def untouched(memory: npt.NDArray[np.uint8]) -> bool:
    return bool((memory == POISON).all())


def batch_of(node: Node, **changes: Any) -> Batch:
    zeros = np.zeros(1, np.uint32)
    columns = {
        "source": u64(node.address),
        "target": u64(1000),
        "nbytes": u64(10),
        "source_region": zeros,
        "target_region": zeros,
    }
    return Batch(Blocks(**{**columns, **changes}), 1, 1)
