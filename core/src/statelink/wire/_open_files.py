"""Checks that the process may open more files. ZeroMQ ends the process if it cannot open some of its own."""

from __future__ import annotations

import os
import resource

from statelink.errors import ConfigError

__all__ = ["check_descriptors", "no_descriptors"]

MARGIN = 48
"""File descriptors that must be free. A link over `tcp` with a rendezvous takes about half of them."""


def check_descriptors() -> None:
    """Refuse to continue if the process has hardly any file descriptors left.

    Raises:
        ConfigError: Too few are left (``config.descriptors``).
    """
    held: list[int] = []
    try:
        held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        while len(held) < MARGIN:
            held.append(os.dup(held[0]))
    except OSError as error:
        raise no_descriptors(error) from error
    finally:
        for each in held:
            os.close(each)


def no_descriptors(error: OSError) -> ConfigError:
    """The error that says that too few file descriptors are left."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return ConfigError(
        "there are too few file descriptors for a link",
        cause=f"{error.strerror or error}; the process may have {limit}, and a link needs up to {MARGIN}",
        hint="raise the limit of open files (ulimit -n, LimitNOFILE), or look for what leaves files open",
        code="config.descriptors",
    )
