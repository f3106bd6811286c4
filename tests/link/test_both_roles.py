"""Links of the role ``both``: whom they work with, what they refuse, and what they say of themselves."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from tests.helpers.links import Rank

from statelink import Room, Status
from statelink.errors import RoomError, UnsupportedError
from statelink.registry import load_backend

BOTH: dict[str, Any] = {"role": "both", "backend": "tcp", "heartbeat": 0.2, "liveness": 5.0}


def test_one_id_goes_both_ways_at_once() -> None:
    one, two = Rank("one", 1), Rank("two", 2)
    with one.open(BOTH) as here, two.open(BOTH) as there:
        for room in (7, 8):
            received = [
                there.receive(room, here.address, 160, {"kv": range(10, 20)}),
                here.receive(room, there.address, 160, {"kv": range(10, 20)}),
            ]
            before = one.arrays[:, :10].copy(), two.arrays[:, :10].copy()
            sent = [here.send(room, 160), there.send(room, 160)]
            for sending in sent:
                sending.push({"kv": range(10)})
            rooms: list[Room] = [*sent, *received]
            for each in rooms:
                assert each.wait(20, quiesced=True) is Status.SUCCEEDED, each.reason
            assert np.array_equal(two.arrays[:, 10:20], before[0])
            assert np.array_equal(one.arrays[:, 10:20], before[1])
            assert [each.report.role for each in rooms] == ["prefill", "prefill", "decode", "decode"]
        seen = here.snapshot()
        assert seen["role"] == "both"
        assert sorted((rank["role"], rank["instance"]) for rank in seen["ranks"]) == [
            ("decode", "two"),
            ("prefill", "two"),
        ]
        assert seen["peers"] == {there.name: "attached, ready"}, "one peer, and its state in each role"


@pytest.mark.parametrize(("sends", "receives"), [("prefill", "both"), ("both", "decode"), ("both", "both")])
def test_a_link_of_both_roles_works_with_links_of_one(sends: str, receives: str) -> None:
    source, target = Rank("s", 1), Rank("t")
    with source.open({**BOTH, "role": sends}) as prefill, target.open({**BOTH, "role": receives}) as decode:
        receiving = decode.receive(1, prefill.address, 160, {"kv": range(10)})
        prefill.send(1, 160).push({"kv": range(10)})
        assert receiving.wait(20, quiesced=True) is Status.SUCCEEDED, receiving.reason
        assert np.array_equal(target.arrays[:, :10], source.arrays[:, :10])


@pytest.mark.parametrize("role", ["decode", "both"])
def test_what_differs_is_told_by_link_where_roles_do_not_tell_the_links_apart(role: str) -> None:
    source, target = Rank("s", 1), Rank("t")
    with source.open({**BOTH, "verify": "digest"}) as prefill, target.open({**BOTH, "role": role}) as decode:
        receiving = decode.receive(1, prefill.address, 160)
        assert receiving.wait(20) is Status.FAILED
        assert receiving.reason is not None
        assert receiving.reason.code == "peer.verify"
        assert sorted(receiving.reason.cause.split(", ")) == sorted(
            [f"'digest' on {prefill.name}", f"'off' on {decode.name}"]
        )


@pytest.mark.parametrize("role", ["decode", "both"])
def test_nothing_is_received_from_a_link_that_only_receives(role: str) -> None:
    other, target = Rank("s", 1), Rank("t")
    with other.open({**BOTH, "role": "decode"}) as silent, target.open({**BOTH, "role": role}) as decode:
        receiving = decode.receive(1, silent.address, 160)
        assert receiving.wait(20) is Status.FAILED
        with pytest.raises(RoomError, match=r"a peer (cannot send|is not a prefill rank)") as error:
            receiving.check()
        assert error.value.code == "peer.role"


def test_nothing_is_received_from_a_rank_of_the_own_instance() -> None:
    one, two = Rank("same", 1), Rank("same")
    with one.open(BOTH) as here, two.open(BOTH) as there:
        receiving = there.receive(1, here.address, 160)
        assert receiving.wait(20) is Status.FAILED
        with pytest.raises(RoomError, match="a peer is of this link's own instance"):
            receiving.check()


def test_what_carries_the_bytes_is_found_out_although_each_side_connects_before_the_other() -> None:
    one, two = Rank("one", 1), Rank("two", 2)
    config = {**BOTH, "require": "process_vm"}
    with one.open(config) as here, two.open(config) as there:
        received = [here.receive(1, there.address, 160), there.receive(1, here.address, 160)]
        for each in received:
            each.accept({"kv": range(10, 20)})
        for link in (here, there):
            link.send(1, 160).push({"kv": range(10)})
        for each in received:
            assert each.wait(20) is Status.SUCCEEDED, each.reason
            assert set(each.report.transports.values()) == {"process_vm"}


def test_a_backend_whose_sides_start_differently_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = load_backend("tcp")
    monkeypatch.setattr(kind, "capabilities", dataclasses.replace(kind.capabilities, both_roles=False))
    with pytest.raises(UnsupportedError, match="cannot serve a link of the role 'both'") as error:
        Rank("one", 1).open(BOTH)
    assert error.value.code == "backend.roles"
    with Rank("one", 1).open({**BOTH, "role": "prefill"}):
        pass
