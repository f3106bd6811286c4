"""What the adapter uses of SGLang: nothing of the installed one differs, and what could is looked at."""

from __future__ import annotations

import enum
from typing import Any

import pytest
from sglang.srt.disaggregation.base import conn

from statelink_sglang.backend import SCHEDULER, SEAM, loaded

pytestmark = pytest.mark.smoke


def test_the_installed_sglang_is_one_that_the_adapter_knows() -> None:
    # Only where they are loaded are the hooked methods looked at.
    import sglang.srt.managers.data_parallel_controller
    import sglang.srt.managers.scheduler
    import sglang.srt.managers.tokenizer_manager  # noqa: F401

    assert loaded(SCHEDULER)
    assert SEAM.release() in SEAM.releases
    assert SEAM.differences() == []


def _without_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(conn.BaseKVReceiver, "clear")


def _with_a_state_type(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {member.name: member.value for member in conn.StateType}
    larger: Any = enum.Enum("StateType", {**names, "FRESH": "fresh"})  # type: ignore[misc]
    monkeypatch.setattr(conn, "StateType", larger)


def _without_an_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.disaggregation.decode import DecodeTransferQueue

    def init(self: Any) -> None:
        self.release_timeout = 30.0

    monkeypatch.setattr(DecodeTransferQueue, "__init__", init)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_without_a_method, "BaseKVReceiver lacks the methods clear"),
        (_with_a_state_type, "StateType has the members FRESH, which are not known"),
        (_without_an_attribute, "DecodeTransferQueue lacks the attributes deferred_kv_release_timeout"),
    ],
)
def test_what_differs_is_named(monkeypatch: pytest.MonkeyPatch, change: Any, said: str) -> None:
    import sglang.srt.managers.scheduler  # noqa: F401  (as in a scheduler)

    change(monkeypatch)
    found = [each.text for each in SEAM.differences()]
    assert any(said in each for each in found), found
