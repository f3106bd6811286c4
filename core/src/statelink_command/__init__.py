"""Starts the command ``statelink``. An interrupt while it imports its modules ends it as one does later.

This is no part of the package `statelink`, because an import of that package takes most of the time.
"""

from __future__ import annotations

import contextlib
import signal
import sys

__all__ = ["main"]

INTERRUPTED = 130
"""Exit status after an interrupt, as in `statelink.cli`."""


def main() -> None:
    """Run the command, and end the process."""
    try:
        from statelink.cli import main as command

        command()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would interrupt the message
        with contextlib.suppress(OSError, AttributeError):  # nobody can be told
            sys.stderr.write("Interrupted.\n")
            sys.stderr.flush()
        sys.exit(INTERRUPTED)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the result is there, and Python only cleans up
