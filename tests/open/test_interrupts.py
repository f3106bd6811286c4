"""An `open` that somebody ends leaves nothing behind, and raises what ended it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.helpers.links import Rank
from tests.helpers.peers import until

import statelink
from statelink import hookimpl
from statelink.registry import plugin_manager


def threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.is_alive()}


def outcome(call: Callable[[], object]) -> tuple[type[BaseException], tuple[Any, ...]] | None:
    """What a call raises. The exception itself would keep what its frames refer to."""
    try:
        call()
    except BaseException as error:
        return type(error), error.args
    return None


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
        until(lambda: threads() == before, what="the end of its threads")
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
