"""A machine that a test makes up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["bare_machine"]


@contextlib.contextmanager
def bare_machine(root: Path) -> Iterator[None]:
    """Show a plugin a machine that has nothing but what a test puts into a folder.

    Inside, `statelink.backend.native` looks for devices and settings of this machine below the folder: ``on_machine``,
    ``rdma_devices`` (``sys/class/infiniband``), and ``loads``, for which a shared library loads if there is a file of
    its name in ``lib``. That holds for all threads of this process; other processes see the real machine.

    Args:
        root: The folder; it may change inside.
    """
    from statelink.backend.native._machine import seen_in

    with seen_in(root):
        yield
