"""``statelink bench``: real processes, real bytes; what is compared, refused and drawn. No time is asserted."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from statelink import Keys
from statelink.backend import RawTransfers, Region
from statelink.cli import main
from statelink.errors import ConfigError
from statelink.registry import load_backend
from statelink.rendezvous import RendezvousServer
from statelink_bench import Close, Copy, FailedError, Local, Pages, Remote, Send

SHORT = ("--seconds", "0.01", "--size", "4k", "--size", "64k", "--blocks", "1", "--blocks", "16")
PROGRAM = [sys.executable, "-c", "import sys; sys.argv[0] = 'statelink'; from statelink.cli import main; main()"]


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", *arguments])


def measured(result: Result) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(result.stdout)["backends"]
    return found


def test_two_processes_of_this_host(tmp_path: Path) -> None:
    picture = tmp_path / "curves.svg"
    done = bench("tcp", *SHORT, "--most", "100k", "--plot", str(picture), "--json")
    assert done.exit_code == 0, done.output
    (found,) = measured(done)
    assert (found["backend"], found["error"]) == ("tcp", "")
    assert found["transports"]
    cells = [(cell["block"], cell["count"], cell["bytes"]) for cell in found["cells"]]
    assert cells == [(4096, 1, 4096), (4096, 16, 65536), (65536, 1, 65536)], "--most leaves out the largest"
    for cell in found["cells"]:
        for way in ("request", "raw", "copy"):
            times = cell[way]
            assert times["rounds"] >= 3
            assert 0 < times["least"] <= times["median"] <= times["p99"]
        assert cell["goodput"] == pytest.approx(cell["bytes"] / cell["request"]["median"])
    assert "tcp: 1 of 3: 1 x 4.0 KiB in " in done.stderr
    drawn = picture.read_text()
    assert drawn.startswith("<?xml")
    assert "blocks of 64 KiB" in drawn
    assert "tcp: library alone" in drawn
    assert "tcp: same blocks copied in one process" in drawn
    assert "GiB a second" in drawn, "as in the table"


def test_every_backend_is_measured_beside_its_library_alone(backend: str) -> None:
    done = bench(backend, "--seconds", "0.01", "--size", "4k", "--blocks", "16", "--json")
    assert done.exit_code == 0, done.output
    (found,) = measured(done)
    assert (found["backend"], found["error"]) == (backend, "")
    (cell,) = found["cells"]
    assert all(cell[way]["median"] > 0 for way in ("request", "raw", "copy"))


def test_a_backend_that_fails_stops_no_other() -> None:
    done = bench("mori", "tcp", *SHORT, "--json")  # no test machine has what MoRI needs
    assert done.exit_code == 1
    broken, good = measured(done)
    assert "mori" in broken["error"]
    assert broken["cells"] == []
    assert (good["backend"], good["error"], len(good["cells"])) == ("tcp", "", 4)


def test_a_machine_that_is_too_busy_is_named() -> None:
    """Four others compute on the only core that the sides may use."""
    core = min(os.sched_getaffinity(0))
    others = [
        subprocess.Popen(["taskset", "-c", str(core), sys.executable, "-c", "while True: pass"]) for _ in range(4)
    ]
    try:
        command = ["taskset", "-c", str(core), *PROGRAM, "bench", "tcp", "--size", "1m", "--blocks", "64", "--no-raw"]
        done = subprocess.run([*command, "--seconds", "0.1"], capture_output=True, text=True, check=True)
    finally:
        for each in others:
            each.kill()
            each.wait()
    assert "tcp: this machine is too busy for these figures: the copies waited for a core" in " ".join(
        done.stdout.split()
    )


def test_the_table_fits() -> None:
    done = bench("tcp", "--seconds", "0.01", "--size", "64k", "--blocks", "1000", "--consecutive", "--no-raw")
    assert done.exit_code == 0, done.output
    assert "1000 x 64 KiB" in done.stdout
    assert "tcp: " in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ((), 2, "name at least one BACKEND"),
        (("tpc",), 1, "did you mean 'tcp'?"),
        (("tcp", "-o", "stall_timout=1"), 1, "did you mean 'stall_timeout'?"),
        (("tcp", "nixl", "-o", "a=1"), 2, "exactly one BACKEND"),
        (("tcp", "--size", "4q"), 2, "is no number of bytes"),
        (("tcp", "--size", "1m", "--most", "4k"), 2, "leaves out every request"),
        (("tcp", "--plot", "curves.gif"), 2, "does not end in .svg or .png"),
        (("tcp", "--serve", "tcp://127.0.0.1:0"), 2, "takes no BACKEND"),
        (("--serve", "tcp://0.0.0.0:0", "--host", "10.0.0.1"), 1, "without keys"),
        (("--serve", "tcp://0.0.0.0:0", "--insecure"), 1, "--host names one that it can"),
        (("tcp", "--peer", "nowhere"), 1, "is not an address"),
    ],
)
def test_what_cannot_be_measured(arguments: tuple[str, ...], status: int, said: str) -> None:
    done = bench(*arguments)
    assert done.exit_code == status, done.output
    assert said in " ".join(done.output.split())


def test_wrong_bytes_are_noticed() -> None:
    source, target = Pages("prefill", 4096, 16, "dram", ""), Pages("decode", 4096, 16, "dram", "")
    assert not target.is_right(16, scattered=True)
    target.copy(16, scattered=True)
    assert target.is_right(16, scattered=True)
    assert not np.array_equal(source.numbers("prefill", 16, True), source.numbers("decode", 16, True))
    target.forget()
    assert not target.is_right(16, scattered=True)


def test_a_side_that_dies_is_named() -> None:
    side = Local("decode")
    try:
        with pytest.raises(FailedError, match="decode failed: this side has no open link"):
            side.ask(Copy(rounds=1, pages=1, scattered=True), 60)
        with pytest.raises(FailedError, match="decode failed: this side has no open link"):
            side.ask(Send(first=1, rooms=1, pages=1, scattered=True, lasts=1.0), 60)
        side.popen.kill()
        with pytest.raises(FailedError, match="decode has ended: SIGKILL"):
            side.ask(Close(), 60)
    finally:
        side.close()


@contextlib.contextmanager
def served(*arguments: str) -> Iterator[str]:
    process = subprocess.Popen([*PROGRAM, "bench", "--serve", *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def made(folder: Path, name: str) -> None:
    assert CliRunner().invoke(main, ["keys", "new", str(folder / name)]).exit_code == 0


def test_one_host_needs_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the environment has of them."""
    monkeypatch.setenv("STATELINK_ALLOW_FILE", "absent")
    done = bench("tcp", "--size", "64k", "--blocks", "1", "--seconds", "0.01", "--json")
    assert (done.exit_code, os.environ["STATELINK_ALLOW_FILE"]) == (0, "absent"), done.output
    assert not measured(done)[0]["error"]


def test_two_hosts_with_keys(tmp_path: Path) -> None:
    """Both are this one, and everything goes through the server."""
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    for name in ("server", "client", "strange"):
        made(tmp_path, name)
    for name in ("server", "client"):
        (tmp_path / f"{name}.pub").rename(allowed / f"{name}.pub")

    def keys(name: str) -> tuple[str, ...]:
        return "--secret-file", str(tmp_path / name), "--allow-file", str(allowed)

    with served("tcp://127.0.0.1:0", *keys("server"), "--most", "1m") as address:
        cell = ("--seconds", "0.01", "--size", "4k", "--blocks", "4")
        done = bench("tcp", "--peer", address, *keys("client"), *cell, "--json")
        assert done.exit_code == 0, done.output
        (found,) = measured(done)
        assert [each["bytes"] for each in found["cells"]] == [16384]
        assert found["cells"][0]["raw"]["rounds"] >= 3
        assert json.loads(done.stdout)["peer"] == address
        large = bench("tcp", "--peer", address, *keys("client"), "--size", "1m", "--blocks", "2", "--json")
        assert large.exit_code == 1
        assert measured(large)[0]["error"].endswith("it would need 2097152 bytes")
        plain = bench("tcp", "--peer", address.partition("@")[0], *keys("client"), *cell)
        assert plain.exit_code == 1
        assert "its address has no key" in plain.output
        ours = Remote(address, Keys(secret_file=str(tmp_path / "client"), allow_file=str(allowed)))
        ours.ask(Close(), 60)
        second = bench("tcp", "--peer", address, *keys("client"), *cell, "--json")
        assert "another benchmark runs" in measured(second)[0]["error"]
        ours.close()


def test_a_server_does_not_answer_a_stranger(tmp_path: Path) -> None:
    for name in ("server", "strange"):
        made(tmp_path, name)
    own = ("--secret-file", str(tmp_path / "server"))
    refused = bench("--serve", "tcp://127.0.0.1:0", *own)
    assert "has keys and allows nobody" in refused.output
    with served("tcp://127.0.0.1:0", *own, "--allow-file", str(tmp_path / "server.pub")) as address:
        strange = Keys(secret_file=str(tmp_path / "strange"))
        with pytest.raises(FailedError, match="does not answer"):
            Remote(address, strange, hello=1.0)


@pytest.mark.parametrize("name", ["tcp", "nixl", "mooncake"])
def test_a_library_by_itself_moves_the_bytes(name: str) -> None:
    """In one process: what the ceilings are made of has to be a transfer, too."""
    kind = load_backend(name)
    assert issubclass(kind, RawTransfers)
    if not kind.probe(kind.Options()).ok:
        pytest.skip(f"{name} cannot run here")
    source, target = np.random.default_rng(0).integers(0, 256, (2, 1 << 16), np.uint8)
    regions = [Region(int(each.ctypes.data), each.nbytes) for each in (source, target)]
    ends = [kind.raw(f"{name}-{at}", kind.Options(), "127.0.0.1", [region]) for at, region in enumerate(regions)]
    offsets = np.arange(0, 1 << 16, 4096).astype(np.uint64)
    order = np.random.default_rng(1).permutation(len(offsets))
    rows = [
        np.stack([offsets[numbers] + np.uint64(region.address), np.full(len(offsets), 4096, np.uint64)], axis=1)
        for numbers, region in zip((np.arange(len(offsets)), order), regions, strict=True)
    ]
    try:
        ends[0].connect(ends[1].address(), *rows)
        for _ in range(2):
            target[:] = 0
            assert ends[0].move() > 0
            np.testing.assert_array_equal(target.reshape(16, 4096)[order], source.reshape(16, 4096))
    finally:
        for end in ends:
            end.close()


@pytest.mark.parametrize(
    ("name", "why"),
    [("wrong-cannot-start-alone", "OSError: the card is busy"), ("wrong-one-room", "the backend has no `raw`")],
)
def test_a_library_that_is_not_measured_alone_costs_no_request(
    monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "tests" / "testing" / "packages"))
    done = bench(name, "--seconds", "0.01", "--size", "4k", "--blocks", "1", "--json")
    assert done.exit_code == 0, done.output
    (found,) = measured(done)
    assert found["cells"][0]["request"]["rounds"] >= 3
    assert found["cells"][0]["raw"] is None
    assert found["raw"].endswith(why)


def test_the_plain_socket_refuses_other_memory() -> None:
    kind = load_backend("tcp")
    assert issubclass(kind, RawTransfers)
    source, target = np.zeros((2, 8192), np.uint8)
    regions = [Region(int(each.ctypes.data), 4096) for each in (source, target)]
    ours, theirs = (kind.raw("", kind.Options(), "127.0.0.1", [region]) for region in regions)
    rows = [np.array([[region.address, 4096]], np.uint64) for region in regions]
    beyond = rows[1] + np.array([[1, 0]], np.uint64)
    try:
        with pytest.raises(OSError, match=r"closed the connection|reset by peer"):
            ours.connect(theirs.address(), rows[0], beyond)
        with pytest.raises(OSError, match="outside of the memory"):
            ours.connect(theirs.address(), rows[0] + np.array([[1, 0]], np.uint64), rows[1])
    finally:
        ours.close()
        theirs.close()


def test_an_address_without_a_key_beyond_loopback_is_refused() -> None:
    with pytest.raises(ConfigError):
        Remote("tcp://host:port", None)


class Silent(http.server.BaseHTTPRequestHandler):
    """Answers what is no HTTP, and logs nothing."""

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(params=["nothing", "a web server", "a rendezvous server"])
def other(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """An address where no benchmark is served, and what is said of it."""
    if request.param == "a rendezvous server":
        with RendezvousServer() as server:
            yield server.address, "a server is connected, and it is not that of a benchmark, or it is busy"
    elif request.param == "nothing":
        with socket.socket() as bound:  # it does not listen
            bound.bind(("127.0.0.1", 0))
            yield f"tcp://127.0.0.1:{bound.getsockname()[1]}", "the connection is refused: nothing listens there"
    else:
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent) as web:
            thread = threading.Thread(target=web.serve_forever)
            thread.start()
            yield f"tcp://127.0.0.1:{web.server_port}", ""
            web.shutdown()
            thread.join()


def test_what_is_at_a_wrong_address(other: tuple[str, str]) -> None:
    address, said = other
    with pytest.raises(FailedError) as caught:
        Remote(address, None, hello=5.0)
    reason = caught.value.reason
    assert reason.what == f"{address} does not answer"
    assert said in reason.cause
    assert "told" not in reason.cause
    assert "Is `statelink bench --serve` running at that address?" in reason.hint


def test_a_wrong_address_has_one_hint() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{bound.getsockname()[1]}"
        done = bench("tcp", "--peer", address, "--json")
        text = bench("tcp", "--peer", address)
    (found,) = measured(done)
    assert found["error"] == f"{address} does not answer: the connection is refused: nothing listens there"
    assert "does it run" in found["hint"]
    assert text.stdout.count("hint:") == 1


def test_a_server_that_is_killed_is_named_and_neither_side_is_blamed() -> None:
    server = subprocess.Popen([*PROGRAM, "bench", "--serve", "tcp://127.0.0.1:0"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = server.stdout.readline().strip()
    cells = ("--size", "4k", "--blocks", "1", "--blocks", "2", "--seconds", "30", "--json")
    client = subprocess.Popen(
        [*PROGRAM, "bench", "tcp", "--peer", address, *cells],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert client.stderr is not None
        assert "1 of 2" in client.stderr.readline()
        server.kill()
        printed, _ = client.communicate(timeout=100)
    finally:
        for each in (server, client):
            each.kill()
            each.communicate()
    (found,) = json.loads(printed)["backends"]
    assert client.returncode == 1
    assert found["error"] == f"the server at {address} has gone: its connection ended"
    assert "has ended there" in found["hint"]
