"""The check of the installed SGLang: nothing differs, and every kind of difference is found and named."""

from __future__ import annotations

import enum
from importlib import metadata
from typing import Any

import pytest
from sglang.srt import environ
from sglang.srt.disaggregation.base import conn

from statelink_sglang.backend import SCHEDULER, differences, loaded

pytestmark = pytest.mark.smoke


def test_the_installed_sglang_is_the_tested_one() -> None:
    # Only where they are loaded are the hooked methods looked at.
    import sglang.srt.managers.data_parallel_controller
    import sglang.srt.managers.scheduler  # noqa: F401

    assert loaded(SCHEDULER)
    assert differences() == []


def test_another_version_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.5.22")
    assert differences() == ["SGLang 0.5.23 is expected; 0.5.22 is installed"]


def _without_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(conn.BaseKVReceiver, "clear")


def _with_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conn.BaseKVSender, "send_twice", lambda self: None, raising=False)


def _with_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(self: Any, num_kv_indices: int, aux_index: int, more: int) -> None: ...

    monkeypatch.setattr(conn.BaseKVSender, "init", init)


def _with_parameters_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(self: Any, aux_index: int, num_kv_indices: int) -> None: ...

    monkeypatch.setattr(conn.BaseKVSender, "init", init)


def _with_a_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conn.KVArgs, "__annotations__", {**conn.KVArgs.__annotations__, "fresh": int})


def _with_a_state_type(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {member.name: member.value for member in conn.StateType}
    larger: Any = enum.Enum("StateType", {**names, "FRESH": "fresh"})  # type: ignore[misc]
    monkeypatch.setattr(conn, "StateType", larger)


def _without_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(conn, "BaseKVBootstrapServer")


def _without_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(environ.Envs, "SGLANG_RUST_SERVER")


def _without_an_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.disaggregation.decode import DecodeTransferQueue

    def init(self: Any) -> None:
        self.release_timeout = 30.0

    monkeypatch.setattr(DecodeTransferQueue, "__init__", init)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_without_a_method, "BaseKVReceiver lacks the methods clear"),
        (_with_a_method, "BaseKVSender has the methods send_twice, which are not known"),
        (_with_a_parameter, "BaseKVSender.init has the parameters more, which are not known"),
        (_with_parameters_in_another_order, "BaseKVSender.init has its parameters in another order"),
        (_with_a_field, "KVArgs has the fields fresh, which are not known"),
        (_with_a_state_type, "StateType has the members FRESH, which are not known"),
        (_without_a_variable, "Envs lacks the variables SGLANG_RUST_SERVER"),
        (_without_an_attribute, "DecodeTransferQueue lacks the attributes deferred_kv_release_timeout"),
        (_without_a_class, "BaseKVBootstrapServer is missing"),
    ],
)
def test_what_differs_is_named(monkeypatch: pytest.MonkeyPatch, change: Any, said: str) -> None:
    import sglang.srt.managers.scheduler  # noqa: F401  (as in a scheduler)

    change(monkeypatch)
    found = differences()
    assert any(said in each for each in found), found
