"""A range of ports: links of one configuration take a port each, for the control channel and for `tcp`'s data."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from tests.helpers.links import Rank, hand_over
from tests.helpers.ports import consecutive_ports, listening, taken

import statelink
from statelink.errors import BackendUnavailableError, ConfigError

pytestmark = pytest.mark.usefixtures("no_configuration")

PROGRAM = """
import sys
from tests.helpers.links import link_of
ports = sys.argv[1]
print("ready", flush=True)
sys.stdin.readline()
link = link_of("prefill", listen=f"tcp://127.0.0.1:{ports}", options={"port": ports})
print(link.address, flush=True)
sys.stdin.readline()
link.close()
"""


def config(ports: range, data: range) -> dict[str, Any]:
    """A link of one range, whose data port is of another."""
    data_ports = f"{data[0]}-{data[-1]}"
    options = {"port": data_ports, "same_host_copy": False}
    return {"backend": "tcp", "listen": f"tcp://127.0.0.1:{ports[0]}-{ports[-1]}", "options": options}


def test_processes_that_start_at_once_share_one_range_to_its_last_port() -> None:
    ports = consecutive_ports(8)
    given = f"{ports[0]}-{ports[-1]}"
    command = [sys.executable, "-c", PROGRAM, given]
    started = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    try:
        said = [each.stdout for each in started if each.stdout is not None]
        assert [each.readline() for each in said] == ["ready\n"] * 4
        for each in started:
            assert each.stdin is not None
            each.stdin.write("open\n")
            each.stdin.flush()
        addresses = {each.readline().strip() for each in said}
        assert len(addresses) == 4
        assert addresses <= {f"tcp://127.0.0.1:{port}" for port in ports}
        assert taken(ports) == list(ports), "four control ports, and four data ports"
        with pytest.raises(ConfigError) as refused:
            Rank("p").open(config(ports, ports), role="prefill")
        assert refused.value.code == "config.listen"
        assert f"every port from {ports[0]} to {ports[-1]} is in use" in str(refused.value)
    finally:
        for each in started:
            each.communicate("close\n", timeout=60)
    assert [each.returncode for each in started] == [0] * 4
    assert not taken(ports)


def test_a_request_moves_between_links_of_one_range() -> None:
    ports = consecutive_ports(4)
    source, target = Rank("p", fill=1), Rank("d")
    with (
        source.open(config(ports, ports), role="prefill") as prefill,
        target.open(config(ports, ports), role="decode") as decode,
    ):
        hand_over(prefill, decode, source, target)
        assert taken(ports) == list(ports)


def test_a_link_without_a_data_port_does_not_open_and_leaves_nothing() -> None:
    ports = consecutive_ports(4)
    control, data = ports[:2], ports[2:]
    with listening(data), pytest.raises(BackendUnavailableError) as refused:
        Rank("p").open(config(control, data), role="prefill")
    assert refused.value.reason.what == "the data port cannot be opened"
    assert refused.value.reason.cause == f"every port from {data[0]} to {data[-1]} is in use"
    assert refused.value.hint == (
        "each rank of this host takes a port of the range: give it more of them; port 0 lets the system choose one"
    )
    assert not taken(control)


@pytest.mark.parametrize(
    ("port", "said"),
    [
        ("7299-7200", "the range of ports begins at 7299, which is above its end, 7200"),
        ("0-7299", "port 0 lets the system choose a port, and so it begins no range"),
        ("7200-70000", "a port is between 0 and 65535, and a range is written as 7100-7199"),
        ("many", "a port is between 0 and 65535, and a range is written as 7100-7199"),
        (65536, "a port is between 0 and 65535, and a range is written as 7100-7199"),
        (7200.5, "port: a whole number or text is expected"),
        (True, "port: a whole number or text is expected"),
    ],
)
def test_what_is_no_data_port_is_refused(port: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Rank("p").open({"backend": "tcp", "options": {"port": port}}, role="prefill")
    assert said in str(refused.value)


def test_a_variable_holds_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = consecutive_ports(2)
    monkeypatch.setenv("STATELINK_ROLE", "prefill")
    monkeypatch.setenv("STATELINK_BACKEND", "tcp")
    monkeypatch.setenv("STATELINK_LISTEN", f"tcp://127.0.0.1:{ports[0]}-{ports[-1]}")
    with listening(ports[:1]), statelink.open(None, Rank("p").inventory) as link:
        assert link.address == f"tcp://127.0.0.1:{ports[1]}"
