"""What vLLM does otherwise in some of the releases that the adapter knows, where its code has to follow."""

from __future__ import annotations

from typing import NamedTuple

from ._seam import SEAM

__all__ = ["BEHAVIOUR"]


class Behaviour(NamedTuple):
    """What a release of vLLM does.

    Attributes:
        sleeps: Whether a server that sleeps has its connector give the memory up before it takes it away.
    """

    sleeps: bool = True


RELEASES = {
    "0.32": Behaviour(sleeps=False),
    "0.31": Behaviour(sleeps=False),
}

BEHAVIOUR = RELEASES.get(SEAM.release(), Behaviour())
"""What the installed vLLM does. A release that the adapter does not know is taken for the newest one."""
