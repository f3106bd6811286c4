"""An `open` that is interrupted at any of its steps leaves nothing behind, and raises the interrupt itself."""

from __future__ import annotations

import gc
import linecache
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.helpers.links import Rank

import statelink
from statelink import hookimpl
from statelink.registry import plugin_manager

if TYPE_CHECKING:
    from types import FrameType

SOURCE = str(Path(statelink.__file__).parent) + os.sep
LOOKED_AT = (
    "opening/_open.py",
    "opening/_slots.py",
    "_background.py",
    *(f"link/{name}.py" for name in ("_link", "_context", "_control", "_exits", "_inspect", "_room_table")),
    *(f"link/runtime/{name}.py" for name in ("_loop", "_workers")),
    *(f"wire/{name}.py" for name in ("_channel", "_security", "_frames")),
    *(f"tcp/{name}.py" for name in ("_backend", "_listener", "_stream")),
    *(f"rendezvous/{name}.py" for name in ("_client", "_connect")),
)
"""Where an interrupt may come: what opens files or starts threads, and what calls it."""

Step = tuple[str, int, str]


class Interrupts:
    """Follows the calling thread through some of Statelink's files, and may raise KeyboardInterrupt at a step."""

    def __init__(self, at: Step | None = None) -> None:
        self.at = at
        self.seen: dict[Step, None] = {}

    def _follow(self, frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(SOURCE) or name.removeprefix(SOURCE) not in LOOKED_AT:
            return None
        if event in ("call", "line"):
            step = name.removeprefix(SOURCE), frame.f_lineno, event
            self.seen[step] = None
            if step == self.at:
                self.at = None
                raise KeyboardInterrupt(step)
        return self._follow

    def during(self, call: Callable[[], Any]) -> Any:
        sys.settrace(self._follow)
        try:
            return call()
        finally:
            sys.settrace(None)


def threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.is_alive()}


def files() -> Counter[str]:
    """What this process has open, by kind."""
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        try:
            found[os.readlink(f"/proc/self/fd/{number}").partition(":")[0]] += 1
        except OSError:  # the folder that is being listed
            continue
    return found


def soon(seen: Callable[[], Any], expected: Any) -> Any:
    """What it returns once that is as expected, or after a while."""
    until = time.monotonic() + 10
    while (found := seen()) != expected and time.monotonic() < until:
        gc.collect()
        time.sleep(0.005)
    return found


def settled(look: Callable[[], Any]) -> Any:
    """What it returns twice, a moment apart: ZeroMQ closes its files a little later, on a thread of its own."""
    found = None
    while (again := look()) != found:
        found = again
        gc.collect()
        time.sleep(0.1)
    return found


def outcome(call: Callable[[], object]) -> tuple[type[BaseException], tuple[Any, ...]] | None:
    """What a call raises. The exception itself would keep what its frames refer to."""
    try:
        call()
    except BaseException as error:
        return type(error), error.args
    return None


PARTS = 12
"""`make test` interrupts at every twelfth step, and `make soak` at all of them."""


# A socket that was made in the very step before an interrupt is closed when it is collected, which Python warns of.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.soak) for part in range(1, PARTS))])
def test_an_interrupt_at_any_step_leaves_nothing_behind(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:  # no other process leaves sockets there, which would add steps
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        _interrupt_every_step(part)


def _interrupt_every_step(part: int) -> None:
    rank = Rank("p")
    config = {"role": "prefill", "backend": "tcp", "rendezvous": "tcp://127.0.0.1:1", "inspect": True}

    def opened() -> statelink.Link:
        return statelink.open(config, rank.inventory)

    opened().close()  # what is done once in a process is done
    look = Interrupts()
    look.during(opened).close()
    # No interrupt comes at a ``try`` itself, and the interpreter would not run what is around it for one.
    steps = [step for step in look.seen if linecache.getline(SOURCE + step[0], step[1]).strip() != "try:"]
    assert len(steps) > 200
    before = threads(), settled(files)
    for step in steps[part::PARTS]:
        interrupts = Interrupts(step)
        raised = outcome(lambda interrupts=interrupts: interrupts.during(opened).close())  # type: ignore[misc]
        assert raised == (KeyboardInterrupt, (step,))
        assert interrupts.at is None, f"{step} was not reached"
        assert soon(threads, before[0]) == before[0], step
        assert soon(files, before[1]) == before[1], step


class Raises:
    """An observer that ends its thread, or raises anything else, when a link has been opened."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    @hookimpl
    def statelink_link_opened(self, link: statelink.Link) -> None:
        raise self.error


@pytest.mark.parametrize("error", [SystemExit(4), KeyboardInterrupt("hook")], ids=["exit", "interrupt"])
def test_a_link_is_closed_when_an_observer_of_its_opening_ends_the_thread(error: BaseException) -> None:
    observer = Raises(error)
    plugin_manager().register(observer)
    before = threads()
    try:
        rank = Rank("p")
        assert outcome(lambda: rank.open({"role": "prefill", "backend": "tcp"})) == (type(error), error.args)
        assert soon(threads, before) == before
    finally:
        plugin_manager().unregister(observer)


def test_an_observer_of_the_opening_that_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    observer = Raises(KeyError("hook"))
    plugin_manager().register(observer)
    try:
        Rank("p").open({"role": "prefill", "backend": "tcp"}).close()
    finally:
        plugin_manager().unregister(observer)
    assert "an observer failed in statelink_link_opened" in caplog.text
