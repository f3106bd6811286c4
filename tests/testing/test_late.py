"""The backend from which the documentation takes a late import and a worked `poll` keeps its contract."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.testing.test_kit import HERE, kit

from statelink.backend import Backend, BackendContext, Batch, Blocks, Outcome, Transfer
from statelink.state import Region

if TYPE_CHECKING:
    from pathlib import Path

NBYTES = 4096


def test_a_backend_that_reports_later_passes(tmp_path: Path) -> None:
    found = kit(
        tmp_path / "report.json", str(HERE / "late.py"), "-k", "not quarter and not thousand and not often and not 2"
    )
    for suite in ("Queue", "QueuePackage"):
        verdicts = {clause.name: (clause.verdict, clause.reason) for clause in found[suite]}
        assert not {name: why for name, why in verdicts.items() if why[0] in ("failed", "not run")}
    assert verdicts["test_without_its_library_it_says_so"][0] == "passed"
    assert verdicts["test_with_a_broken_library_it_says_why"][0] == "passed"


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The plugin's module and its library, as long as the test runs."""
    monkeypatch.syspath_prepend(str(HERE / "packages"))
    yield importlib.import_module("statelink_queue"), importlib.import_module("vendor")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("statelink_queue", "vendor")]:
        del sys.modules[name]


def test_a_transfer_that_failed_early_is_settled_once_the_library_has_ended_it(late: Any) -> None:
    """The library copies all the same, so that its memory may be used again only after a later poll."""
    package, vendor = late
    memory = np.zeros((2, NBYTES), np.uint8)
    memory[0] = 7
    tables = [(Region(address=row.ctypes.data, nbytes=NBYTES, kind="dram"),) for row in memory]
    source, target = (opened(package, name, table) for name, table in zip(("one", "two"), tables, strict=True))
    source.connect("two", target.descriptor(), tables[1])
    zero = np.zeros(1, np.uint32)
    places = [np.array([row.ctypes.data], np.uint64) for row in memory]
    blocks = Blocks(places[0], places[1], np.array([NBYTES], np.uint64), zero, zero)
    with vendor.TURN:
        transfer = source.submit("two", Batch(blocks, 1, 1))
        assert polled(source, transfer) is None
        source.disconnect("two")
        assert polled(source, transfer) == Outcome(False, "the peer was disconnected", settled=False)
        assert not memory[1].any()
    source.close()
    assert polled(source, transfer) == Outcome(False, "the peer was disconnected", settled=True)
    assert (memory[1] == 7).all()
    target.close()


def polled(backend: Backend, transfer: Transfer) -> Outcome | None:
    backend.poll([transfer])
    return transfer.outcome


def opened(package: Any, link: str, table: tuple[Region, ...]) -> Backend:
    backend: Backend = package.QueueBackend(BackendContext(options=package.Options(), link=link))
    backend.register(table)
    return backend
