"""The operator's options, and what is refused at the start of a server."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from sglang.srt.arg_groups.arg_utils import Derived
from sglang.srt.arg_groups.fields.disagg import Disagg
from sglang.srt.arg_groups.fields.parallel import Parallel
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.server_args import ServerArgs
from support.newest import OLDER, WHY

from statelink.errors import ConfigError
from statelink_sglang.backend import ALLOWED, VARIABLE, Server, check_server, read_options

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.smoke


def _read(given: str, role: str = "prefill") -> Any:
    return read_options(role, {VARIABLE: given})


def test_nothing_given_lets_statelink_choose_the_backend() -> None:
    options = read_options("decode", {})
    assert (options.link.role, options.link.backend, options.allow) == ("decode", "auto", frozenset())


@pytest.mark.parametrize(("given", "optional"), [("optional", True), ("required", False)])
def test_metadata_rows_may_be_optional(given: str, optional: bool) -> None:
    assert _read(json.dumps({"sglang": {"rows": given}})).rows_optional is optional
    assert _read("").rows_optional is False


def test_json_and_a_file_say_the_same(tmp_path: Path) -> None:
    given = {"backend": "nixl", "options": {"num_threads": 2}, "sglang": {"allow": ["cuda"], "model": "m@1"}}
    file = tmp_path / "statelink.json"
    file.write_text(json.dumps(given))
    assert _read(json.dumps(given)) == _read(str(file))
    assert (_read(str(file)).link.backend, _read(str(file)).allow) == ("nixl", frozenset({"cuda"}))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ('{"backend": ', "cannot be read"),
        ("/nowhere/statelink.json", "cannot be read: FileNotFoundError"),
        ('{"backends": "tcp"}', "unknown key 'backends'.*\n.*'backend'"),
        ('{"backend": 7}', "bad value"),
        ('{"role": "decode"}', "has the key 'role'"),
        ('{"siblings": []}', "has the key 'siblings'"),
        ('{"rendezvous_options": {"token": "x"}}', "has the key 'rendezvous_options'.*\n.*leave it out"),
        ('{"sglang": {"alow": []}}', "wrong keys"),
        ('{"sglang": {"rows": "none"}}', "wrong value.*\n.*'rows' is 'required' or 'optional'"),
        ('{"sglang": {"allow": ["magic"]}}', "wrong value.*\n.*cuda, nodes"),
    ],
)
def test_wrong_options_are_refused_with_the_reason(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        _read(given)


def _server(*, device: str = "cpu", states: tuple[str, ...] = ("swa",), **changes: Any) -> Server:
    groups: dict[str, dict[str, Any]] = {
        "args": {"tokenizer_worker_num": 1, "speculative_algorithm": None},
        "parallel": {"pp_size": 1, "attn_cp_size": 1, "dp_size": 1},
        "disagg": {"disaggregation_decode_allocation_policy": "early"},
    }
    for name, value in changes.items():
        group, _, key = name.partition("__")
        groups[group][key] = value
    args, parallel, disagg = (SimpleNamespace(**groups[name]) for name in ("args", "parallel", "disagg"))
    return Server("prefill", args, parallel, disagg, device, states)


def test_a_state_type_that_is_not_supported_is_named() -> None:
    with pytest.raises(ConfigError, match=r"type 'of_tomorrow' is not supported; .*'of_next_week' is"):
        check_server(_server(states=("swa", "of_tomorrow", "of_next_week")), ALLOWED)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"parallel__dp_size": 2},
        {"parallel__dp_size": 2, "parallel__load_balance_method": "round_robin"},
        {"parallel__attn_dp_size": 8, "parallel__load_balance_method": "total_tokens"},
        {"parallel__pp_size": 4},
        *({"args__speculative_algorithm": name} for name in ("EAGLE", "EAGLE3", "NEXTN", "DSPARK", "DFLASH")),
    ],
)
def test_a_server_that_was_tested_is_accepted(changes: dict[str, Any]) -> None:
    check_server(_server(**changes), ())


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (_server(args__speculative_algorithm="STANDALONE"), "STANDALONE: SGLang's decode cannot start its draft"),
        (_server(args__speculative_algorithm="NGRAM"), "NGRAM: SGLang's decode cannot start its draft"),
        (_server(parallel__attn_cp_size=2), "attn_cp_size is 2"),
        (_server(args__tokenizer_worker_num=2), "tokenizer-worker-num must be 1"),
        (_server(disagg__enable_pd_role_switch=True), "enable-pd-role-switch"),
        (_server(disagg__disaggregation_decode_allocation_policy="prefill_complete"), "must be early"),
    ],
)
def test_what_cannot_work_is_refused_even_if_everything_is_allowed(server: Server, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_server(server, ALLOWED)


@pytest.mark.parametrize(
    ("word", "server"),
    [
        ("cuda", _server(device="cuda:0")),
        ("nodes", _server(parallel__nnodes=2)),
    ],
)
def test_what_only_hardware_can_show_needs_the_operators_word(word: str, server: Server) -> None:
    with pytest.raises(ConfigError, match=f'"allow": \\["{word}"\\]'):
        check_server(server, set(ALLOWED) - {word})
    check_server(server, {word})


def test_an_option_counts_as_sglang_has_resolved_it() -> None:
    given = ServerArgs(model_path="unused")
    server = _server()._replace(args=given)
    check_server(server, ())
    declare_resolution(given, "a hook of SGLang", enable_hisparse=True)
    with pytest.raises(ConfigError, match="enable_hisparse is not supported"):
        check_server(server, ())


class _Asked:
    """Options that nobody has given, and which of them somebody has asked for."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            self.names.add(name)
        raise AttributeError(name)


@pytest.mark.skipif(OLDER, reason=WHY)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_every_option_that_is_looked_at_is_one_of_sglangs(role: str) -> None:
    """An option that SGLang has not, or has elsewhere, would be refused never."""
    args, parallel, disagg = _Asked(), _Asked(), _Asked()
    check_server(Server(role, args, parallel, disagg, "cpu"), ALLOWED)
    assert len(args.names) >= 4
    assert args.names <= set(ServerArgs.__struct_fields__)
    assert disagg.names <= set(Disagg.__struct_fields__)
    derived = {name for name, each in vars(Parallel).items() if isinstance(each, Derived)}
    assert parallel.names & derived == {"attn_dcp_size"}
    assert parallel.names - derived <= set(Parallel.__struct_fields__)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE", "false"),
        ("SGLANG_RUST_SERVER", "true"),
        ("SGLANG_MM_SKIP_COMPUTE_HASH", "1"),
        ("SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE", "N"),
    ],
)
def test_a_variable_of_sglang_that_contradicts_is_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=f"{variable} must not be {value}"):
        check_server(_server(), ALLOWED)


def test_a_variable_that_says_what_is_wanted_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE", "y")
    monkeypatch.setenv("SGLANG_RUST_SERVER", "no")
    check_server(_server(), ())
