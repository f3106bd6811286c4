"""Handlers of an engine's logging that raise, or that call the link: its threads go on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.helpers.links import Rank, hand_over

from statelink import hookimpl
from statelink.registry import plugin_manager


class Handler(logging.Handler):
    """Calls what it is given for each record. It catches nothing, unlike those of the standard library."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self.call = call
        self.seen = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.seen += 1
        self.call()


class Fails:
    """An observer that raises whenever a room ends, on the control thread, which logs it."""

    @hookimpl
    def statelink_room_ended(self, report: Any) -> None:
        raise LookupError("the observer")


@pytest.fixture
def failing() -> Iterator[None]:
    observer = Fails()
    plugin_manager().register(observer)
    yield
    plugin_manager().unregister(observer)


def raises(error: type[BaseException]) -> Callable[[], object]:
    def call() -> object:
        raise error("the handler")

    return call


@pytest.mark.parametrize("error", [OSError, RecursionError, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_handler_that_raises_ends_no_thread(error: type[BaseException], failing: None) -> None:
    play(Handler(raises(error)))


def test_a_handler_that_logs_again_ends_no_thread(failing: None) -> None:
    play(Handler(lambda: logging.getLogger("statelink.link").warning("again")))


def test_a_handler_may_call_the_link(failing: None) -> None:
    links: list[Any] = []

    def call() -> None:
        for link in links:
            link.snapshot()
            link.rooms()
            link.changes()

    play(Handler(call), links)


def play(handler: Handler, links: list[Any] | None = None) -> None:
    """Move requests while each end of a room is logged, and look at both sides' threads by what they still do."""
    log = logging.getLogger("statelink")
    log.addHandler(handler)
    try:
        source, target = Rank("p", 1), Rank("d")
        config = {"role": "prefill", "backend": "tcp"}
        with source.open(config) as prefill, target.open(config, role="decode") as decode:
            if links is not None:
                links += [prefill, decode]
            for room in (1, 2, 3):
                target.arrays[:] = 0
                hand_over(prefill, decode, source, target, room)
        assert prefill.close()
        assert decode.close()
    finally:
        log.removeHandler(handler)
    assert handler.seen >= 6
