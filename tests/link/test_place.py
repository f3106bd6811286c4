"""A process has as many links over a backend as the backend declares."""

from __future__ import annotations

import dataclasses
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.helpers.links import link_of

import statelink
from statelink import state
from statelink.backend import DIRECT, ReceiveHook, SendHook, Strategy
from statelink.errors import BackendUnavailableError, ConfigError, TransferError, UnsupportedError
from statelink.registry import load_backend

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from statelink.backend import Backend
    from statelink.state import Region


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> type[Backend]:
    """A backend whose library serves two links of a process."""
    kind = load_backend("tcp")
    monkeypatch.setattr(kind, "capabilities", dataclasses.replace(kind.capabilities, links_per_process=2))
    return kind


def refused() -> BackendUnavailableError:
    with pytest.raises(BackendUnavailableError, match=r"link 'more\.0-\w+' cannot be opened") as caught:
        link_of("decode", "more")
    assert caught.value.code == "backend.links"
    return caught.value


@pytest.mark.usefixtures("narrow")
def test_one_link_too_many() -> None:
    """It is refused, and names those that are open; each that is closed makes room for one."""
    with link_of("decode", "one") as one, link_of("decode", "two") as two:
        error = refused()
        assert f"at most 2 in one process, which has {one.name}, {two.name}" in str(error)
        assert "close a link first, or open this one in another process" in error.hint
        assert one.close()
        assert one.close()
        with link_of("decode", "three"):
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
                    link_of("decode", "broken")
    with link_of("decode", "one"), link_of("decode", "two"):
        refused()


def test_a_place_is_free_once_the_backend_is_closed(narrow: type[Backend], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before: while its library still runs, another cannot start."""
    seen: list[BackendUnavailableError] = []
    close: Any = narrow.close

    def closing(self: Backend) -> None:
        seen.append(refused())
        close(self)

    with link_of("decode", "one"), link_of("decode", "two") as two:
        monkeypatch.setattr(narrow, "close", closing)
        assert two.close()
        assert len(seen) == 1
        monkeypatch.undo()


def test_most_backends_have_no_limit() -> None:
    with link_of("decode", "one"), link_of("decode", "two"), link_of("decode", "three"):
        pass


def test_a_link_that_does_not_open_leaves_nothing_open(narrow: type[Backend], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backend is closed, and then every strategy that was opened; two of one name are not the same."""
    calls: list[tuple[str, str]] = []

    class Held(Strategy):
        name = "held"

        def open(self, inventory: state.Inventory, components: Sequence[str]) -> Sequence[Region]:
            calls.append(("open", ", ".join(components)))
            return ()

        def close(self) -> None:
            calls.append(("close", self.name))

        def sender(self) -> SendHook:
            return DIRECT.sender()

        def receiver(self) -> ReceiveHook:
            return DIRECT.receiver()

    close: Any = narrow.close

    def closing(self: Backend) -> None:
        calls.append(("close", "backend"))
        close(self)

    pages, rows = np.zeros((2, 4, 1, 8), np.uint8), np.zeros((4, 64), np.uint8)
    made = [state.kv_pages({0: (pages, pages.copy())}, heads=1), state.aux_rows({"rows": rows})]
    monkeypatch.setattr(narrow, "close", closing)
    monkeypatch.setattr(narrow, "strategies", {"*": DIRECT, "aux": Held(), "kv": Held()})

    start: Any = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "statelink-rendezvous":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    config = {"role": "decode", "backend": "tcp", "rendezvous": "tcp://127.0.0.1:1"}
    with pytest.raises(ConfigError, match="no thread can be started"):
        statelink.open(config, state.describe("d", made))
    closed = [("close", "backend"), ("close", "held"), ("close", "held")]
    assert calls == [("open", "kv"), ("open", "aux"), *closed]


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("refused_names", [("statelink-control",), ("statelink-control", "statelink-inspect")])
def test_a_link_whose_thread_does_not_start_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refused_names: tuple[str, ...]
) -> None:
    """No place taken, no file, and nobody there for those who inspect."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    files = len(os.listdir("/proc/self/fd"))
    start: Any = threading.Thread.start

    def none_left(thread: threading.Thread) -> None:
        if thread.name in refused_names:
            raise RuntimeError("can't start new thread")
        start(thread)

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", none_left)
            with pytest.raises(ConfigError, match="no thread can be started for a link") as caught:
                link_of("decode", "broken")
            assert caught.value.code == "config.threads"
    assert not [thread for thread in threading.enumerate() if thread.name == "statelink-inspect"]
    assert not list(tmp_path.rglob("*.sock"))
    assert len(os.listdir("/proc/self/fd")) == files
    with link_of("decode", "one"), link_of("decode", "two"):
        refused()


def test_a_backend_that_cannot_say_how_it_is_reached(narrow: type[Backend], monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory has nothing to do with it."""

    def broken(*_: Any) -> None:
        raise OSError("no port")

    monkeypatch.setattr(narrow, "descriptor", broken)
    with pytest.raises(BackendUnavailableError, match=r"^backend 'tcp' cannot say how it is reached.*OSError: no port"):
        link_of("decode", "broken")
