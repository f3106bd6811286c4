"""The check of `statelink doctor` that the adapters here know the engines that are installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from statelink.backend import Check, Verdict
from statelink.errors import StatelinkError
from statelink.hints import install_hint
from statelink.registry import entry_points

if TYPE_CHECKING:
    from statelink.seam import Seam

__all__ = ["GROUP", "engines"]

GROUP = "statelink.engines"
"""Entry points of adapters. Each one names a `Seam`."""


def engines() -> Iterator[Check]:
    """One check for each adapter. Imports the modules of its engine in which the adapter uses something."""
    for point, distribution, _ in entry_points(GROUP, every=True):
        try:
            seam: Seam = point.load()
            yield _known(seam)
        except Exception as error:  # of the adapter, or of its engine
            found = f"{distribution} cannot say what it uses of its engine: {type(error).__name__}: {error}"
            hint = f"{install_hint(distribution, upgrade=True)}, or uninstall it"
            yield Check(what=point.name, verdict=Verdict.PROBLEM, found=found, hint=hint)


def _known(seam: Seam) -> Check:
    version = seam.installed()
    if not version:
        found = f"{seam.title} is not installed; {seam.adapter} works with {seam.window}"
        return Check(what=seam.engine, verdict=Verdict.NOT_APPLICABLE, found=found)
    try:
        seam.check(allowed=False)
    except StatelinkError as error:
        found = f"{seam.title} {version}: {error.reason.cause}"
        return Check(what=seam.engine, verdict=Verdict.PROBLEM, found=found, hint=error.hint, code=error.code)
    return Check(what=seam.engine, verdict=Verdict.OK, found=f"{seam.title} {version}, which {seam.adapter} knows")
