"""A process has as many links over a backend as the backend declares."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import statelink
from statelink import state
from statelink.errors import BackendUnavailableError, TransferError, UnsupportedError
from statelink.registry import load_backend

if TYPE_CHECKING:
    from statelink.backend import Backend


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> type[Backend]:
    """A backend whose library serves two links of a process."""
    kind = load_backend("tcp")
    monkeypatch.setattr(kind, "capabilities", dataclasses.replace(kind.capabilities, links_per_process=2))
    return kind


def opened(name: str, **config: Any) -> statelink.Link:
    pages = np.zeros((2, 4, 1, 8), np.uint8)
    inventory = state.describe(name, [state.kv_pages({0: (pages, pages.copy())}, heads=1)])
    return statelink.open({"role": "decode", "backend": "tcp", **config}, inventory)


def refused() -> BackendUnavailableError:
    with pytest.raises(BackendUnavailableError, match=r"link 'more\.0-\w+' cannot be opened") as caught:
        opened("more")
    assert caught.value.code == "backend.links"
    return caught.value


@pytest.mark.usefixtures("narrow")
def test_one_link_too_many() -> None:
    """It is refused, and names those that are open; each that is closed makes room for one."""
    with opened("one") as one, opened("two") as two:
        error = refused()
        assert f"at most 2 in one process, which has {one.name}, {two.name}" in str(error)
        assert "close a link first, or open this one in another process" in error.hint
        assert one.close()
        assert one.close()
        with opened("three"):
            refused()


def test_a_link_that_does_not_open_takes_no_place(narrow: type[Backend], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it fails at."""

    def broken(*_: Any) -> None:
        raise TransferError("no")

    memory = state.Memory.pointer(1 << 20, (4, 64), "uint8", 1, kind="granite:0")
    foreign = state.describe("foreign", [state.aux_rows({"rows": memory})])
    for _ in range(3):
        with pytest.raises(UnsupportedError):
            statelink.open({"role": "decode", "backend": "tcp"}, foreign)
    for name in ("__init__", "register", "descriptor"):
        with monkeypatch.context() as patch:
            patch.setattr(narrow, name, broken)
            for _ in range(3):
                with pytest.raises(TransferError, match="no"):
                    opened("broken")
    with opened("one"), opened("two"):
        refused()


def test_a_place_is_free_once_the_backend_is_closed(narrow: type[Backend], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before: while its library still runs, another cannot start."""
    seen: list[BackendUnavailableError] = []
    close: Any = narrow.close

    def closing(self: Backend) -> None:
        seen.append(refused())
        close(self)

    with opened("one"), opened("two") as two:
        monkeypatch.setattr(narrow, "close", closing)
        assert two.close()
        assert len(seen) == 1
        monkeypatch.undo()


def test_most_backends_have_no_limit() -> None:
    with opened("one"), opened("two"), opened("three"):
        pass
