"""The report of the kit: the structure of the JSON that ``--statelink-report`` writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

__all__ = ["Cell", "Clause", "Report", "Run", "Verdict"]

Verdict = Literal["passed", "failed", "deviates", "not applicable", "not run"]


class Clause(msgspec.Struct, frozen=True, kw_only=True):
    """One clause.

    Attributes:
        name: Name of the test, with its parameters.
        theme: Name of its class.
        says: The text of the contract, as a sentence.
        verdict: The result. *Deviates* is a failure that the plugin states itself. *Not applicable* means that the
            backend does not declare it. *Not run* means that this machine cannot run it.
        reason: Why it did not pass.
        todo: What to do about it, if it failed.
        like: An earlier clause that failed, or deviates, for the same reason.
        seconds: How long it took.
    """

    name: str
    theme: str
    says: str
    verdict: Verdict
    reason: str = ""
    todo: str = ""
    like: str = ""
    seconds: float = 0.0


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One state type between two layouts.

    Attributes:
        type: The state type, and its layout if it has several.
        topology: Ranks of prefill and of decode, as in ``2 to 1``.
        how: Whether bytes moved over the real library, over a simulator of it, or not at all.
    """

    type: str
    topology: str
    how: Literal["real", "simulator", "not run"]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """All clauses against one backend with certain options.

    Attributes:
        suite: The test class.
        backend: Name of the backend.
        options: Its options.
        memory: Kind of the memory that was moved.
        moved_by: What moved the bytes, as the test class says.
        untested: Other kinds that it declares, and that this run has not moved.
        clauses: Every clause that was run.
        states: State types that were moved through real links.
    """

    suite: str
    backend: str
    options: Mapping[str, Any]
    memory: str = "dram"
    moved_by: str = ""
    untested: list[str] = []
    clauses: list[Clause]
    states: list[Cell]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one session found.

    Attributes:
        format: Version of this structure.
        statelink: Version of the core.
        runs: One for each test class.
    """

    format: int = 1
    statelink: str
    runs: list[Run]
