"""The checks of `statelink doctor` about adapters: whether they know the installed engines, and are configured well."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from statelink.backend import Check, Verdict
from statelink.config import Given
from statelink.errors import StatelinkError
from statelink.hints import install_hint
from statelink.opening import AUTO
from statelink.registry import entry_points, load_backend

from ._configured import Configured

if TYPE_CHECKING:
    from statelink.seam import Seam, Variable

__all__ = ["GROUP", "engines"]

GROUP = "statelink.engines"
"""Entry points of adapters. Each one names a `Seam`."""


def engines() -> Iterator[Check]:
    """Checks of each adapter. Imports the modules of its engine in which the adapter uses something."""
    for point, distribution, _ in entry_points(GROUP, every=True):
        try:
            seam: Seam = point.load()
            if seam.variable is not None and os.environ.get(seam.variable.name):
                yield from _configured(seam, seam.variable)
            yield _known(seam)
        except Exception as error:  # of the adapter, or of its engine
            found = f"{distribution} cannot say what it uses of its engine: {type(error).__name__}: {error}"
            hint = f"{install_hint(distribution, upgrade=True)}, or uninstall it"
            yield Check(what=point.name, verdict=Verdict.PROBLEM, found=found, hint=hint)


def _configured(seam: Seam, variable: Variable) -> Iterator[Check]:
    problems: list[StatelinkError] = []
    try:
        config = variable.read()
        problems += Configured(Given(config, {}), ()).problems()
        if config.backend != AUTO:
            load_backend(config.backend)
    except StatelinkError as error:
        problems.append(error)
    for each in problems:
        said = str(each).partition("\nhint:")[0]
        yield Check(what=variable.name, verdict=Verdict.PROBLEM, found=said, hint=each.hint, code=each.code)
    if not problems:
        found = f"backend {config.backend}; {seam.title} sets the role"
        yield Check(what=variable.name, verdict=Verdict.OK, found=found)


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
