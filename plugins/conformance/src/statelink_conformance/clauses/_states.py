"""Clauses on state types, through real links."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from statelink.backend import ANY
from statelink.errors import UnsupportedError
from statelink.testing import free_addresses

from .. import _ranks
from .._lab import Lab, Suite, needs
from .._pools import LABELS
from .._saying import refused
from .._worker import Hung

if TYPE_CHECKING:
    from .._bench import Subject
    from .._workers import Worker

__all__ = ["TOPOLOGIES", "StateTypes"]

ANYWHERE = "tcp://127.0.0.1:0"

TOPOLOGIES = {"1 to 1": (1, 1), "2 to 1": (2, 1), "1 to 2": (1, 2)}
"""Numbers of prefill ranks and decode ranks. Heads and channels are dealt out over the ranks of a side."""


class StateTypes(Suite):
    """Every declared state type, from prefill to decode."""

    @pytest.mark.parametrize("label", LABELS)
    @pytest.mark.parametrize("topology", TOPOLOGIES)
    def test_a_state_type_arrives(self, subject: Subject, lab: Lab, topology: str, label: str) -> None:
        """Each state type that is declared arrives byte by byte, between ranks of equal and of unequal width.

        Look at the clauses on moves first: to a backend all state types are blocks.
        """
        needs(subject.capabilities.moves(LABELS[label]), "this state type is not declared")
        if topology not in lab.verdicts:
            labels = [label for label, type in LABELS.items() if subject.capabilities.moves(type)]
            lab.verdicts[topology] = self.moved(subject, lab, *TOPOLOGIES[topology], labels)
        found = lab.verdicts[topology]
        problem = found.get("", "") or found[label]
        assert not problem, problem

    def test_a_state_type_that_is_not_declared_is_refused(self, subject: Subject, lab: Lab) -> None:
        """A link that holds a state type that is not declared does not open.

        Nothing to do in a backend: the core refuses it by `capabilities.state_types`.
        """
        needs(subject.capabilities.state_types != ANY, "it declares every state type")
        label = next(label for label, type in LABELS.items() if not subject.capabilities.moves(type))
        with refused(f"a link that holds {label}", UnsupportedError):
            self._open(subject, {lab.workers[0]: [0]}, "prefill", [ANYWHERE], [label])

    def test_memory_of_an_undeclared_kind_opens_no_link(self, subject: Subject, lab: Lab) -> None:
        """A link that holds memory of a kind that is not declared does not open.

        Nothing to do in a backend: the core refuses it by `capabilities.memory_kinds`.
        """
        with refused("a link over memory of kind 'granite:0'", UnsupportedError):
            lab.workers[0](_ranks.open_strange, subject.name, dict(subject.options))

    @classmethod
    def moved(cls, subject: Subject, lab: Lab, prefill: int, decode: int, labels: list[str]) -> dict[str, str]:
        """What is wrong with each type after one request with all of them. The empty name has what stopped it."""
        sources, targets = lab.ranks(0, prefill), lab.ranks(1, decode)
        try:
            peers = cls._open(subject, sources, "prefill", [ANYWHERE] * prefill, labels)
            cls._open(subject, targets, "decode", free_addresses(decode), labels)
            if lab.processes == 1:
                found = lab.workers[0](_ranks.both, peers, subject.patience)
            else:
                for worker in sources:
                    worker.start(_ranks.send, subject.patience)
                for worker in targets:
                    worker.start(_ranks.receive, peers, subject.patience)
                found = [each for worker in targets for each in worker.result()]
                for worker in sources:
                    worker.result()
            wrong = {label: next(filter(None, (rank[label] for rank in found)), "") for label in labels}
            if not all([worker(_ranks.close, subject.patience) for worker in {**sources, **targets}]):
                wrong[""] = "a link did not come to rest when it was closed"
        except Hung:
            raise
        except Exception as error:
            return {"": f"{type(error).__name__}: {error}"}
        return wrong

    @staticmethod
    def _open(
        subject: Subject, where: dict[Worker, list[int]], role: str, listen: list[str], labels: list[str]
    ) -> list[str]:
        """Open the ranks of one side, each in its process. Returns their addresses."""
        what = role, subject.name, dict(subject.options)
        return [
            address
            for worker, ranks in where.items()
            for address in worker(_ranks.open_ranks, *what, ranks, listen, labels, dict(subject.config))
        ]
