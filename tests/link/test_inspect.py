"""`Link.snapshot` and `statelink inspect`: what a link of another process is doing, asked from here."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from tests.helpers import peers
from tests.helpers.links import DECODE, PREFILL, STRANGE, keys, link_of
from tests.helpers.peers import until
from tests.helpers.pools import Kv, hybrid

import statelink
from statelink import Status, state
from statelink.cli import main
from statelink.link import ask, sockets
from statelink.link.runtime import Loop

if TYPE_CHECKING:
    from tests.link.conftest import TwoEngines


EVERYBODYS = Path("/tmp") / f"statelink-{os.getuid()}"


def inspect(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["inspect", *arguments])


def of(pid: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(inspect(str(pid), "--json").stdout)
    return found


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime directory in which only this test's links are; its path is short, as a socket's has to be."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder) / "statelink"


def there(folder: Path) -> list[Path]:
    """Sockets in a runtime directory; others of this user may be in the one that is everybody's."""
    return [path for path in sockets() if path.parent == folder]


@pytest.mark.parametrize("backend", ["tcp"], indirect=True, scope="session")
def test_room_that_waits(two_engines: TwoEngines) -> None:
    pools = hybrid(kv=Kv(), swa=None, dsa=None, mamba=None)
    made = two_engines.pair(pools, pools)
    case = made.case(64)
    receiving, sending = made.begin(case)
    receiving.reach(Status.WAITING)
    sending.reach(Status.WAITING)
    (there,) = (seen for seen in of(two_engines.decode.pid) if seen["link"] == made.decode.name)
    (room,) = there["oldest"]
    assert (room["room"], room["status"], room["holds"]) == (case.room, "waiting", True)
    assert room["waits_for"] == "kv, aux from rank 0"
    assert there["rooms"]["waiting"] == 1
    (rank,) = there["ranks"]
    assert (rank["peer"], rank["rank"], rank["state"]) == (made.prefill.name, 0, "ready")
    assert 0 <= rank["heard"] < 10
    # Four pages of four layers of keys and values, and a row.
    wanted = 4 * 4 * 2 * (16 * 4 * 16 * 2) + 16 * 4 + 20 * 4
    assert there["held_bytes"] == {"waiting": wanted}
    text = inspect(str(two_engines.decode.pid)).stdout
    assert made.decode.name in text
    assert "kv, aux from rank 0" in " ".join(text.split())
    # In a table, no row takes more than one line, because peers go by the end of their name.
    assert f"  {made.prefill.name[-6:]}  prefill  0 " in text
    assert max(map(len, text.splitlines())) <= 80
    twice = inspect(str(two_engines.decode.pid), "--watch", "--every", "0.1", "--count", "2", "--json").stdout
    assert [len(json.loads(line)) for line in twice.splitlines()] == [len(of(two_engines.decode.pid))] * 2
    assert inspect(str(two_engines.decode.pid), "--watch", "--count", "1").stdout.count(made.decode.name) == 1
    made.push(sending, case)
    made.ended(case, receiving, sending)
    (after,) = (seen for seen in of(two_engines.decode.pid) if seen["link"] == made.decode.name)
    assert after["oldest"] == []
    assert after["held_bytes"] == {}
    assert made.prefill.name in [seen["link"] for seen in of(two_engines.prefill.pid)]
    assert made.prefill.close()
    assert made.prefill.name not in inspect(str(two_engines.prefill.pid), "--json").stdout


def test_keys_that_were_refused_are_in_the_text(alone: Path) -> None:
    with link_of("prefill", keys=keys(PREFILL, DECODE)) as link:
        shown = inspect(str(there(alone)[0])).stdout
        assert "refused keys" not in shown
        with peers.dialled(link.address, "stranger", STRANGE):
            peers.until(lambda: link.snapshot()["refused_keys"] > 0)
            shown = inspect(str(there(alone)[0])).stdout
    assert re.search(r"refused keys +\d+ connection", shown)


def test_bytes_of_keys_and_values_that_interlock_are_counted_once() -> None:
    pages = np.zeros((5, 2, 4, 16), np.float32)  # [pages, heads, tokens, a key of 8 numbers and then a value]
    inventory = state.describe("decode", [state.fused_pages({0: pages}, heads=2, keys=8)])
    with statelink.open({"role": "decode", "backend": "tcp"}, inventory) as link:
        link.receive(1, "tcp://127.0.0.1:9", 12, {"kv": [1, 2, 3]})
        held = until(lambda: sum(link.snapshot()["held_bytes"].values()), what="bytes of the room")
        assert held == 3 * pages[0].nbytes


def test_only_its_user_may_ask(alone: Path) -> None:
    with link_of("decode") as link:
        (path,) = there(alone)
        assert stat.S_IMODE(alone.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert ask(path)["link"] == link.name
    assert list(alone.iterdir()) == []


@pytest.mark.parametrize("harm", ["open to others", "a link", "no directory"])
def test_link_opens_without(alone: Path, harm: str, tmp_path: Path) -> None:
    """A directory that is not this user's alone is not used, but the next one is; and nothing else changes."""
    if harm == "open to others":
        alone.mkdir()
        alone.chmod(0o755)
    elif harm == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        alone.symlink_to(tmp_path / "elsewhere")
    else:
        alone.write_text("")
    with link_of("decode") as link:
        assert there(alone) == []
        incarnation = link.name.rpartition("-")[2]
        assert [path.parent for path in sockets() if incarnation in path.name] == [EVERYBODYS]
        assert link.snapshot()["ranks"] == []


def test_none_is_opened_where_it_is_not_wanted(alone: Path) -> None:
    with link_of("decode", inspect=False):
        assert not alone.exists()


def test_socket_of_a_dead_process_goes(alone: Path) -> None:
    alone.mkdir(mode=0o700)
    dead = alone / "4194305-0123456789abcdef.sock"  # above every process id
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(dead))
    with link_of("decode") as link:
        assert not dead.exists()
        assert [ask(path)["link"] for path in there(alone)] == [link.name]


def test_who_asks_and_does_not_read(alone: Path) -> None:
    """Others are answered after a while, and the link goes on and closes."""
    with link_of("decode") as link:
        (path,) = there(alone)
        with socket.socket(socket.AF_UNIX) as rude:
            rude.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            rude.connect(str(path))
            assert ask(path)["link"] == link.name
            assert link.close()
    assert there(alone) == []


def test_nobody_there(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: 4_000_000_000)  # somebody else, who has no link
        assert "no link" in inspect().stdout
    result = inspect(str(os.getpid()))
    assert result.exit_code == 1
    assert f"process {os.getpid()} has no open link" in result.stderr
    assert inspect(str(alone / "none.sock")).exit_code == 1


def test_a_client_that_cannot_be_accepted_does_not_end_the_answers(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the process has no file descriptor left for a while."""
    accept, failed = socket.socket.accept, list[bool]()

    def fails_first(listening: socket.socket) -> Any:
        if listening.family == socket.AF_UNIX and not failed:
            failed.append(True)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", fails_first)
    with link_of("decode", inspect=True) as link:
        (path,) = there(alone)
        assert ask(path)["link"] == link.name
        assert failed
    assert not there(alone)


def test_what_comes_while_the_snapshot_is_taken_has_no_negative_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot has read the clock before that."""
    real, late = time.monotonic, threading.local()
    monkeypatch.setattr(Loop, "now", staticmethod(lambda: real() - getattr(late, "seconds", 0.0)))
    with link_of("prefill") as prefill, link_of("decode") as decode:
        decode.receive(1, prefill.address, 4)
        for link in (prefill, decode):
            until(partial(_heard, link))
        late.seconds = 1000.0  # in this thread alone
        ages = [each for link in (prefill, decode) for each in (*link.snapshot()["ranks"], *link.snapshot()["oldest"])]
        late.seconds = 0.0
    assert [each["age"] for each in ages] == [0.0] * len(ages)
    assert {each["heard"] for each in ages if "heard" in each} == {0.0}
    assert any("room" in each for each in ages)


def _heard(link: statelink.Link) -> list[dict[str, Any]]:
    return [rank for rank in link.snapshot()["ranks"] if rank["heard"] is not None]
