"""The operator's options, and what is refused at the start of a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from statelink.errors import ConfigError
from statelink_vllm.connector import (
    ALLOWED,
    SEAM,
    Options,
    check_server,
    read_options,
)

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize(
    ("kv_role", "role"), [("kv_producer", "prefill"), ("kv_consumer", "decode"), ("kv_both", "both")]
)
def test_nothing_given_lets_statelink_choose_the_backend(kv_role: str, role: str) -> None:
    options = read_options(kv_role, None)
    assert (options.link.role, options.link.backend, options.allow) == (role, "auto", frozenset())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"backends": "tcp"}, "unknown key 'backends'.*\n.*'backend'"),
        ({"backend": 7}, "bad value"),
        ({"role": "decode"}, "has the key 'role'"),
        ({"siblings": []}, "has the key 'siblings'"),
        ({"vllm": {"alow": []}}, "wrong keys"),
        ({"vllm": {"allow": ["magic"]}}, "wrong value.*\n.*cuda"),
        ({"vllm": {"pages": {"CPU_ATTN": "thirds"}}}, "wrong value.*\n.*one of pairs, halves"),
        ({"vllm": {"pages": "halves"}}, "wrong value"),
        ({"vllm": 3}, "wrong keys"),
    ],
)
def test_wrong_options_are_refused_with_the_reason(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        read_options("kv_both", given)


def test_what_is_known_of_a_backend_of_attention_is_passed_on() -> None:
    assert read_options("kv_both", {"vllm": {"pages": {"MINE": "pairs"}}}).pages == {"MINE": "pairs"}
    assert read_options("kv_both", {}).pages == {}


def test_a_role_that_is_not_vllms_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_role is None"):
        read_options(None, {})


def _server(**changes: Any) -> Any:
    parts: dict[str, dict[str, Any]] = {
        "parallel_config": {
            "prefill_context_parallel_size": 1,
        },
        "scheduler_config": {"policy": "fcfs"},
        "model_config": {"multimodal_config": None, "enable_sleep_mode": False},
        "cache_config": {"enable_prefix_caching": False},
        "device_config": {"device_type": "cpu"},
    }
    speculative = changes.pop("speculative_config", None)
    for key, value in changes.items():
        next(part for part in parts.values() if key in part)[key] = value
    return SimpleNamespace(
        **{name: SimpleNamespace(**part) for name, part in parts.items()}, speculative_config=speculative
    )


def options(*allow: str, role: str = "kv_producer") -> Options:
    return read_options(role, {"backend": "tcp", "vllm": {"allow": [*allow]}})


def test_a_plain_server_is_taken() -> None:
    check_server(_server(), options())
    images = {"multimodal_config": SimpleNamespace(mm_processor_cache_gb=0)}
    check_server(_server(**images, enable_prefix_caching=True), options())
    check_server(_server(multimodal_config=SimpleNamespace(mm_processor_cache_gb=4)), options())


def test_what_was_not_tested_needs_a_word() -> None:
    assert set(ALLOWED) == {"cuda", "version"}
    with pytest.raises(ConfigError, match="a cache in device memory was not tested"):
        check_server(_server(device_type="cuda"), options())
    check_server(_server(device_type="cuda"), options("cuda"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size is 2"),
        ({"policy": "priority", "enable_prefix_caching": True}, "--scheduling-policy is priority"),
        ({"multimodal_config": SimpleNamespace(mm_processor_cache_gb=0)}, "no hashes of images"),
    ],
)
def test_what_cannot_work_is_refused_whatever_is_allowed(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_server(_server(**changes), options(*ALLOWED))


def test_a_scheduling_policy_that_is_wrong_only_with_a_prefix_cache_and_only_where_state_is_sent() -> None:
    check_server(_server(policy="priority"), options())
    check_server(_server(policy="priority", enable_prefix_caching=True), options(role="kv_consumer"))


def test_sleep_mode_needs_a_release_that_tells_its_connectors() -> None:
    """Before 0.33, vLLM takes memory away that is still registered with a transfer library."""
    if SEAM.release() in ("0.31", "0.32"):
        with pytest.raises(ConfigError, match="takes memory away from connectors without telling them"):
            check_server(_server(enable_sleep_mode=True), options())
    else:
        check_server(_server(enable_sleep_mode=True), options())


@pytest.mark.parametrize(
    ("role", "given", "words"),
    [
        *(("kv_both", {"vllm": {"hold": each}}, "'hold' is a number") for each in (0, -1, True, "60", 1e9)),
        ("kv_both", {"bidirectional_kv_xfer": 1}, "true or false"),
        ("kv_consumer", {"bidirectional_kv_xfer": True}, "receives and sends"),
    ],
)
def test_how_long_conversations_are_held_is_checked(role: str, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_options(role, given)
    read = read_options("kv_both", {"bidirectional_kv_xfer": True, "vllm": {"hold": 7}})
    assert (read.every, read.hold) == (True, 7.0)
