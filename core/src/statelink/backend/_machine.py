"""Which machine this is, and where its files are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

__all__ = ["boot_id", "on_machine", "seen_in"]

_root = Path("/")
"""Where this machine's files are looked for; `seen_in` sets it."""


def boot_id() -> str:
    """Which run of which machine this is, in at most 64 characters; empty if the system does not say.

    Every process of the machine, in any container, reads the same until the machine starts again. Machines that were
    cloned while they ran may say the same, too. If it is empty, nothing is known of the other side. Any thread.
    """
    try:
        return on_machine("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()[:64]
    except (OSError, ValueError):
        return ""


def on_machine(path: str) -> Path:
    """Where to look for a device file or a setting of this machine, given as an absolute path.

    That is the path itself, but in a test that uses `statelink.testing.bare_machine`. Any thread.
    """
    return _root / path.lstrip("/")


@contextlib.contextmanager
def seen_in(root: Path) -> Iterator[None]:
    """Look for this machine's files and shared libraries below a folder; for the whole process, one after the other."""
    global _root
    before, _root = _root, root
    try:
        yield
    finally:
        _root = before
