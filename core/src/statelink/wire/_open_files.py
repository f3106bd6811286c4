"""Checks that the process may open more files. ZeroMQ ends the process if it cannot open some of its own."""

from __future__ import annotations

import errno
import os
import resource

from statelink.errors import ConfigError

__all__ = ["check_descriptors", "check_dials", "no_descriptors"]

MARGIN = 48
"""File descriptors that must be free. A link over `tcp` with a rendezvous takes about half of them."""
PER_DIAL = 4
"""File descriptors of a connection to one address, until a message has come over it. After that it has half of them."""
HINT = "raise the limit of open files (ulimit -n, LimitNOFILE), or look for what leaves files open"


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


def check_dials(count: int) -> None:
    """Refuse to dial more addresses than the process has file descriptors for. Opens nothing that stays.

    Args:
        count: How many addresses are about to be dialled.

    Raises:
        ConfigError: Too few are left (``config.descriptors``).
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        taken = len(os.listdir("/proc/self/fd"))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise no_descriptors(error) from error
        return  # without /proc, nobody can say how many are left
    needed = count * PER_DIAL + MARGIN
    if limit != resource.RLIM_INFINITY and taken + needed > limit:
        raise ConfigError(
            f"there are too few file descriptors to dial {count} addresses",
            cause=f"{needed} must be free; the process may have {limit}, and has {taken}",
            hint=HINT,
            code="config.descriptors",
        )


def no_descriptors(error: OSError) -> ConfigError:
    """The error that says that too few file descriptors are left."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return ConfigError(
        "there are too few file descriptors for a link",
        cause=f"{error.strerror or error}; the process may have {limit}, and a link needs up to {MARGIN}",
        hint=HINT,
        code="config.descriptors",
    )
