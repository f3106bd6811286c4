"""The operator's options, what routers pass, and what is refused at the start of a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import statelink
from statelink import Status, state
from statelink.errors import ConfigError
from statelink_vllm.connector import (
    ALLOWED,
    StatelinkConnector,
    answer,
    check_server,
    content_in,
    read_options,
    room_of,
    source_of,
)

pytestmark = pytest.mark.smoke

HERE = "tcp://127.0.0.1:7100"


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
        ({"vllm": {"allow": ["magic"]}}, "wrong value.*\n.*cuda, pp"),
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


def test_decode_reads_what_prefill_answers() -> None:
    room = room_of({})
    said = answer(room, "prefill-0", [HERE], b"\x01\xff")
    assert content_in(said) == b"\x01\xff"
    assert said["do_remote_prefill"] is True
    assert source_of(said, read_options("kv_consumer", {})) == (room, (HERE,))


def test_an_answer_survives_a_router_that_rounds_numbers() -> None:
    said = answer((1 << 63) - 1, "prefill-0", [HERE], b"x")
    assert said["room"] == str((1 << 63) - 1)


def test_both_servers_make_one_room_of_a_routers_id() -> None:
    options = read_options("kv_consumer", {"peers": {"prefill-0": [HERE]}})
    given = {"transfer_id": "xfer-7", "remote_engine_id": "prefill-0"}
    assert source_of(given, options) == (room_of({"transfer_id": "xfer-7"}), "prefill-0")
    assert room_of({"transfer_id": "xfer-8"}) != room_of({"transfer_id": "xfer-7"}) == room_of(given)


def test_rooms_that_prefill_draws_differ() -> None:
    rooms = {room_of({}) for _ in range(100)}
    assert len(rooms) == 100
    assert all(0 < room < 1 << 63 for room in rooms)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"peer": [HERE]}, "neither a 'room' nor a 'transfer_id'"),
        ({"room": "seven", "peer": [HERE]}, "no number"),
        ({"room": 0, "peer": [HERE]}, "above 0"),
        ({"room": 1 << 64, "peer": [HERE]}, "below 2"),
        ({"room": 7}, "no 'peer'"),
        ({"room": 7, "peer": HERE}, "no 'peer'"),
        ({"room": 7, "peer": [7]}, "no 'peer'"),
        ({"room": 7, "peer": ["tcp://10.0.0.9:7100"]}, "without keys only loopback"),
        ({"room": 7, "peer": [HERE, "tcp://127.0.0.1.evil.example:7100"]}, "without keys only loopback"),
    ],
)
def test_what_a_request_may_not_say(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        source_of(given, read_options("kv_consumer", {}))


@pytest.mark.parametrize("given", [7, True, [], {}, "xyz", "0", 1.5, "\ud800"])
def test_what_is_no_content_is_no_use(given: Any) -> None:
    with pytest.raises(ValueError, match="its 'content' is"):
        content_in({"content": given})


def test_configured_peers_are_found_by_name_and_never_by_a_request() -> None:
    options = read_options("kv_consumer", {"peers": {"prefill-0": [HERE]}})
    given = {"room": 7, "peer": ["tcp://127.0.0.1:9"], "remote_engine_id": "prefill-0"}
    assert source_of(given, options).peer == "prefill-0"
    with pytest.raises(ValueError, match="no 'remote_engine_id'"):
        source_of({"room": 7, "peer": [HERE]}, options)


@pytest.mark.parametrize("given", [{"peers": {"prefill-0": [HERE]}}, {"rendezvous": HERE}])
@pytest.mark.parametrize(
    "name",
    [
        "tcp://10.0.0.9:7100",
        f"tcp://10.0.0.9:7100@{'A' * 43}",
        "tcp://10.0.0.9:7100,tcp://10.0.0.9:7101",
        HERE,  # also one that is configured
        "tcp://",
        "tcp://prefill-0",
    ],
)
def test_an_address_is_no_name_of_a_peer(given: dict[str, Any], name: str) -> None:
    options = read_options("kv_consumer", {**given, "insecure": True})
    with pytest.raises(ValueError, match="'remote_engine_id' is an address"):
        source_of({"room": 7, "remote_engine_id": name}, options)


@pytest.mark.parametrize("name", [["tcp://10.0.0.9:7100"], [], "", None, 7, {"tcp://10.0.0.9:7100": 1}])
def test_what_is_no_text_is_no_name_of_a_peer(name: Any) -> None:
    options = read_options("kv_consumer", {"peers": {"prefill-0": [HERE]}})
    with pytest.raises(ValueError, match="no 'remote_engine_id'"):
        source_of({"room": 7, "remote_engine_id": name}, options)


def test_every_other_text_is_looked_up_and_never_dialled() -> None:
    """What passes as a name is a name to a link, too: the room fails at once, since no peer has it."""
    options = read_options("kv_consumer", {"peers": {"prefill-0": [HERE]}, "backend": "tcp"})
    pages = torch.zeros(4, 16, 1, 8)
    inventory = state.describe("decode", [state.kv_pages({0: (pages, pages.clone())}, heads=1)])
    with statelink.open(options.link, inventory) as link:
        for number, name in enumerate(
            ("TCP://10.0.0.9:7100", " tcp://10.0.0.9:7100", "a,tcp://10.0.0.9:7100", "10.0.0.9:71")
        ):
            source = source_of({"room": 1 + number, "remote_engine_id": name}, options)
            assert source.peer == name
            room = link.receive(source.room, source.peer, 16, {"kv": [1]})
            assert room.wait(30) is Status.FAILED
            assert room.reason is not None
            assert room.reason.code == "peer.unknown"


def _server(**changes: Any) -> Any:
    parts: dict[str, dict[str, Any]] = {
        "parallel_config": {
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
        },
        "scheduler_config": {"disable_hybrid_kv_cache_manager": False},
        "model_config": {"use_mla": False},
        "device_config": {"device_type": "cpu"},
    }
    speculative = changes.pop("speculative_config", None)
    for key, value in changes.items():
        next(part for part in parts.values() if key in part)[key] = value
    return SimpleNamespace(
        **{name: SimpleNamespace(**part) for name, part in parts.items()}, speculative_config=speculative
    )


def test_a_plain_server_is_taken() -> None:
    check_server(_server(), ())


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"device_type": "cuda"}, "cuda"),
        ({"pipeline_parallel_size": 2}, "pp"),
        ({"use_mla": True}, "mla"),
        ({"speculative_config": object()}, "speculative"),
    ],
)
def test_what_was_not_tested_needs_a_word(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){ALLOWED[word].replace('(', '.').replace(')', '.')} was not tested"):
        check_server(_server(**changes), ())
    check_server(_server(**changes), (word,))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size is 2"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size is 2"),
        ({"disable_hybrid_kv_cache_manager": True}, "hybrid KV cache manager is turned off"),
    ],
)
def test_what_cannot_work_is_refused_whatever_is_allowed(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_server(_server(**changes), tuple(ALLOWED))


def test_sleep_mode_is_refused() -> None:
    """vLLM asks the class when the server starts, and raises an error that names the connector."""
    assert not StatelinkConnector.supports_sleep_mode(None)
