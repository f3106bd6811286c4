"""``statelink top``: rates from what real links count."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.helpers.links import Rank, hand_over

from statelink import Status
from statelink.cli import main
from statelink.cli.top import Looks, answers

PAGE_BYTES = 2 * 16 * 2 * 8
"""Of a page of `Rank`: keys and values."""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime directory of which the path is as short as a socket's has to be."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def test_a_link_that_is_closed_meanwhile_is_left_out(alone: Path) -> None:
    folder = alone / "statelink"
    folder.mkdir(mode=0o700)
    paths = [folder / f"{number}-x.sock" for number in (1, 2)]
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) for _ in paths)
        for path, each in zip(paths, (first, second), strict=True):
            each.bind(str(path))
            each.listen()

        def answer() -> None:
            """The first one is found, then asked; when it is asked, the second one ends."""
            first.accept()[0].close()
            asked, _ = first.accept()
            second.close()
            paths[1].unlink()
            with asked:
                asked.sendall(b"{}")

        thread = threading.Thread(target=answer)
        thread.start()
        found = answers(None)
        thread.join()
    # Other processes of this user may have links, too.
    assert [each.path for each in found.given if each.path in paths] == paths[:1]
    assert [line for line in found.silent if str(folder) in line] == []
    assert "does not answer" in answers(str(paths[1])).silent[0]


def test_a_link_that_answers_no_snapshot_is_named(alone: Path) -> None:
    path = alone / "1-x.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.bind(str(path))
        link.listen()

        def answer() -> None:
            asked, _ = link.accept()
            with asked:
                asked.sendall(b"no snapshot")

        thread = threading.Thread(target=answer)
        thread.start()
        found = answers(str(path))
        thread.join()
    assert found.given == []
    assert "1-x.sock does not answer: " in found.silent[0]


def test_rates_are_what_the_links_moved_in_between() -> None:
    config = {"backend": "tcp", "inspect": True}
    source, target = Rank("prefill-of-a-long-name", 1), Rank("decode-of-a-long-name")
    with source.open(config, role="prefill") as prefill, target.open(config, role="decode") as decode:
        hand_over(prefill, decode, source, target, room=1)
        looks, which = Looks(), str(os.getpid())
        first = of(looks.add(answers(which), 10.0))
        assert {each["a_second"]["sent"] for each in first.values()} == {None}
        hand_over(prefill, decode, source, target, room=2)
        hand_over(prefill, decode, source, target, room=3)
        prefill.send(4, 16)
        decode.receive(5, prefill.address, 16, {"kv": [0]})
        aborted = decode.receive(6, prefill.address, 16, {"kv": [1]})
        aborted.abort()
        assert aborted.wait(20) is Status.FAILED
        seen = of(looks.add(answers(which), 14.0))
        moved = 2 * 10 * PAGE_BYTES / 4.0
        rates = {name: each["a_second"] for name, each in seen.items()}
        assert rates["prefill"] == {"sent": moved, "received": 0.0, "succeeded": 0.5, "failed": 0.0}
        assert rates["decode"] == {"sent": 0.0, "received": moved, "succeeded": 0.5, "failed": 0.25}
        assert (seen["prefill"]["rooms"], seen["decode"]["rooms"]) == (1, 1)
        assert seen["decode"]["held_bytes"] >= PAGE_BYTES
        for each in seen.values():
            assert (each["ready"], each["peers"]) == (1, 1), "prefill calls a peer attached that it may send to"
            assert "changes" not in each["queued"], "these engines look at their rooms, and take no changes"
        lines = CliRunner().invoke(main, ["top", which, "--json", "--count", "2", "--every", "0.1"]).stdout.splitlines()
        assert [len(json.loads(line)["links"]) for line in lines] == [2, 2]
        shown = CliRunner().invoke(main, ["top", which, "--count", "2", "--every", "0.1"]).stdout
        assert shown.count("2 links, 2 live rooms") == 2
        assert max(map(len, shown.splitlines())) <= 80
        assert "prefill-of-a-lo" in shown
        assert not [name for name in seen["prefill"]["queued"] if name.endswith("_bytes")], (
            "bytes are no number of things"
        )


def test_one_thing_is_one_thing() -> None:
    with Rank("alone", 1).open({"backend": "tcp", "inspect": True}, role="prefill") as link:
        link.send(1, 16)
        shown = CliRunner().invoke(main, ["top", str(os.getpid()), "--count", "1"]).stdout
    assert shown.startswith("1 link, 1 live room, ")


def test_a_peer_that_sends_and_receives_is_one_peer() -> None:
    config, one, two = {"backend": "tcp", "inspect": True}, Rank("one", 1), Rank("two", 1)
    with one.open(config, role="both") as here, two.open(config, role="both") as there:
        for source, target in ((here, there), (there, here)):
            receiving = target.receive(1, source.address, 160, {"kv": range(10)})
            source.send(1, 160).push({"kv": range(10)})
            assert receiving.wait(20, quiesced=True) is Status.SUCCEEDED
        seen = [(link["ready"], link["peers"]) for link in Looks().add(answers(str(os.getpid())), 1.0)["links"]]
    assert seen == [(1, 1), (1, 1)]


def of(look: dict[str, Any]) -> dict[str, dict[str, Any]]:
    assert look["silent"] == []
    return {each["role"]: each for each in look["links"]}


def test_a_link_that_was_replaced_has_no_rate_yet() -> None:
    looks, rank = Looks(), Rank("p")
    for now in (1.0, 2.0):
        with rank.open({"backend": "tcp", "inspect": True}, role="prefill"):
            (link,) = looks.add(answers(str(os.getpid())), now)["links"]
            assert link["a_second"]["succeeded"] is None


def test_who_does_not_answer_is_named(alone: Path) -> None:
    shown = CliRunner().invoke(main, ["top", str(alone / "no.sock"), "--count", "1"])
    assert shown.exit_code == 1
    assert "no.sock does not answer: No such file" in " ".join(shown.stdout.split())
    for command in (["inspect"], ["inspect", "--count", "2", "--every", "0.1"], ["inspect", "--count", "1", "--json"]):
        assert CliRunner().invoke(main, [*command, str(alone / "no.sock")]).exit_code == 1
    assert CliRunner().invoke(main, ["top", str(alone / "no.sock"), "--count", "1", "--json"]).exit_code == 1
    with Rank("p").open({"backend": "tcp", "inspect": True}, role="prefill"):
        for name in ("top", "inspect"):
            assert CliRunner().invoke(main, [name, str(os.getpid()), "--count", "1"]).exit_code == 0


@pytest.mark.parametrize("columns", [25, 40, 60, 80, 200])
def test_what_a_link_is_called_stays_on_a_narrow_terminal(
    alone: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with Rank("prefill-0", 1).open({"backend": "tcp", "inspect": True}, role="prefill"):
        result = CliRunner().invoke(main, ["top", str(os.getpid()), "--count", "1"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= columns
    (row,) = (line for line in lines if line.startswith(f"{os.getpid()} "))
    assert "prefill-0/0" in row
    (titles,) = (line.split() for line in lines if line.startswith("pid "))
    assert titles[:2] == ["pid", "link"]
    assert ("bytes/s" in titles) is (columns >= 40)
    assert ("queued" in titles) is (columns >= 80)
