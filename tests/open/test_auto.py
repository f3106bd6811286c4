"""``backend = "auto"``: the best that can, why not the others, and two sides that came to different answers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
from tests.helpers.links import Rank, hand_over

from statelink.errors import BackendUnavailableError, ConfigError, RoomError, UnsupportedError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.registry.sites import Site

pytestmark = pytest.mark.usefixtures("no_configuration")

OVER_TCP = """
import dataclasses
from statelink.backend import Probe
from statelink.tcp import TcpBackend


class Made(TcpBackend):
    name = "{name}"
    capabilities = dataclasses.replace(TcpBackend.capabilities, {declares})

    @classmethod
    def probe(cls, options):
        {probe}
"""
FINE = "return Probe(ok=True, reason='here')"
AUTO = {"role": "prefill", "backend": "auto"}


def over_tcp(site: Site, name: str, declares: str, probe: str = FINE) -> None:
    site.backend(name, source=OVER_TCP.format(name=name, declares=declares, probe=probe))


@pytest.fixture(name="several")
def several_fixture(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Backends of falling priority, of which the fifth is the first that can, and several that cannot."""
    monkeypatch.setenv(
        "STATELINK_PLUGINS",
        "statelink-broken,statelink-exits,statelink-good,statelink-mem,"
        "statelink-new,statelink-odd,statelink-other,statelink-same,statelink-twin",
    )
    site.backend("broken", source="raise OSError('no library')")
    over_tcp(site, "mem", "priority=90", "return Probe(ok=False, reason='no device', hint='buy one')")
    over_tcp(site, "exits", "priority=80", "raise RuntimeError('the probe broke')")
    over_tcp(site, "odd", "priority=70, memory_kinds=frozenset({'npu'})")
    over_tcp(site, "new", "priority=60, state_types=frozenset({'mamba'})")
    over_tcp(site, "good", "priority=50")
    over_tcp(site, "other", "priority=50", "raise AssertionError('never asked')")
    site.backend("same")
    site.package("statelink-twin", statelink_backends={"same": "statelink_same:Made"})
    return site


def test_the_best_that_can_is_taken_and_carries_the_bytes(several: Site, caplog: pytest.LogCaptureFixture) -> None:
    source, target = Rank("p", 1), Rank("d")
    with caplog.at_level(logging.INFO, "statelink.open"), source.open(AUTO) as prefill:
        assert prefill.backend == "good"
        rejected = prefill.snapshot()["rejected"]
        with target.open(AUTO, role="decode") as decode:
            sent, _ = hand_over(prefill, decode, source, target)
    assert sent.backend == "good"
    reasons = {
        "broken": "OSError: no library",
        "exits": "its probe raised RuntimeError: the probe broke",
        "mem": "no device; hint: buy one",
        "new": "does not move state type 'kv'",
        "odd": "cannot register memory of kind 'dram'",
        "other": "priority 50, and 'good' with 50 can carry this",
        "same": "is brought by 2 packages",
        "tcp": "priority 0, and 'good' with 50 can carry this",
    }
    assert rejected.keys() == reasons.keys()
    for name, reason in reasons.items():
        assert reason in rejected[name]
        assert f"{name}: {rejected[name]}" in caplog.records[0].getMessage()
    assert (caplog.records[0].levelname, caplog.records[0].name) == ("INFO", "statelink.open")


BY_OPTIONS = """
    @classmethod
    def memory_kinds(cls, options):
        return frozenset({"dram"} if options.stall_timeout == 7 else {"npu"})
"""


def test_auto_goes_by_the_memory_that_options_allow(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that would refuse this rank's memory when it registers it is passed over before."""
    monkeypatch.setenv("STATELINK_PLUGINS", "statelink-good")
    declares = "priority=90, memory_kinds=frozenset({'dram', 'npu'})"
    site.backend("good", source=OVER_TCP.format(name="good", declares=declares, probe=FINE) + BY_OPTIONS)
    with Rank("p").open(AUTO) as link:
        assert link.backend == "tcp"
        assert "with these options it registers npu" in link.snapshot()["rejected"]["good"]
    with Rank("p").open(AUTO, options={"good": {"stall_timeout": 7}}) as link:
        assert link.backend == "good"
    with pytest.raises(UnsupportedError, match="with these options it registers npu"):
        Rank("p").open(AUTO, backend="good")


def test_a_named_backend_rejects_nobody(several: Site) -> None:
    with Rank("p").open(AUTO, backend="tcp") as link:
        assert (link.backend, link.snapshot()["rejected"]) == ("tcp", {})


def test_where_none_is_left_the_error_has_every_reason(several: Site) -> None:
    with pytest.raises(BackendUnavailableError) as refused:
        Rank("p").open(AUTO, require="rdma")
    assert refused.value.code == "backend.none"
    for part in ("broken: ", "mem: ", "no device", "tcp: ", "rdma is required", "uses process_vm or socket"):
        assert part in str(refused.value)
    assert "priority" not in str(refused.value)


def test_two_sides_with_different_answers_refuse_each_other_by_name(several: Site) -> None:
    with Rank("p", 1).open(AUTO) as prefill, Rank("d").open(AUTO, role="decode", backend="tcp") as decode:
        receiving = decode.receive(1, prefill.address, 160, {"kv": range(10)})
        receiving.wait(20)
        with pytest.raises(RoomError) as refused:
            receiving.check()
    assert refused.value.code == "peer.backend"
    assert "'tcp' on decode, 'good' on prefill" in str(refused.value)
    assert "'auto'" in refused.value.hint


def test_options_are_a_table_for_each_backend(several: Site, tmp_path: Path) -> None:
    options = {"good": {"same_host_copy": False}, "tcp": {"streams": 3}, "nixl": {"of": "another machine"}}
    source, target = Rank("p", 1), Rank("d")
    with source.open(AUTO, options=options) as prefill, target.open(AUTO, role="decode") as decode:
        sent, _ = hand_over(prefill, decode, source, target)
    assert set(sent.transports.values()) == {"socket"}  # the option had its effect
    path = tmp_path / "link.toml"
    for text, said, hint in (
        ("[options.goood]\nport = 1", "unknown key 'goood' in the options", "did you mean 'good'?"),
        ("[options.good]\nprt = 1", "unknown key 'prt' in the options of backend 'good'", "did you mean 'port'?"),
        ("[options.tcp]\nprt = 1", "unknown key 'prt' in the options of backend 'tcp'", "did you mean 'port'?"),
    ):
        path.write_text(f'role = "prefill"\nbackend = "auto"\n{text}\n')
        with pytest.raises(ConfigError) as refused:
            Rank("p").open(path)
        assert (refused.value.code, refused.value.hint) == ("config.key", hint)
        assert refused.value.reason.who == {"file": str(path)}
        assert said in str(refused.value)


def test_the_environment_may_open_a_link(several: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATELINK_ROLE", "prefill")
    monkeypatch.setenv("STATELINK_BACKEND", "tcp")
    monkeypatch.setenv("STATELINK_INSPECT", "false")
    with Rank("p").open(None) as link:
        assert link.backend == "tcp"
    monkeypatch.setenv("STATELINK_OPTIONS", '{"prt": 1}')
    with pytest.raises(ConfigError) as refused:
        Rank("p").open(None)
    assert refused.value.reason.who == {"variable": "STATELINK_OPTIONS"}
