"""Strategies that raise where they should not, and the order in which all of them are called."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import statelink
from statelink import Status, state
from statelink.backend import DIRECT, Blocks, ReceiveHook, SendHook, Strategy, Transfer
from statelink.registry import load_backend


class Defective(Strategy):
    """The direct strategy, one call of which raises."""

    name = "defective"

    def __init__(self, call: str, error: type[BaseException] = LookupError) -> None:
        self.call = call
        self.error = error
        self.told: list[tuple[str, str]] = []

    def sender(self) -> SendHook:
        self.raise_in("sender")
        strategy = self

        class Send(SendHook):
            def open(self, context: Any, prepared: bytes) -> None:
                strategy.raise_in("open")

            def blocks(self, context: Any, move: Any) -> Any:
                strategy.raise_in("chunk")
                return move.blocks()

            def finish(self, context: Any) -> None:
                strategy.raise_in("finish")

            def abort(self, context: Any) -> None:
                strategy.told.append(("abort", context.component))
                strategy.raise_in("abort")

            def released(self, context: Any) -> None:
                strategy.told.append(("released", context.component))
                strategy.raise_in("abort")

        return Send()

    def receiver(self) -> ReceiveHook:
        self.raise_in("receiver")
        strategy, direct = self, DIRECT.receiver()

        class Receive(ReceiveHook):
            def prepare(self, context: Any) -> bytes:
                strategy.raise_in("prepare")
                return direct.prepare(context)

            def arrived(self, context: Any, arrival: Any) -> None:
                strategy.raise_in("arrived")

        return Receive()

    def raise_in(self, call: str) -> None:
        if call == self.call:
            raise self.error(f"a defect in {call}")


def opened(role: str, **config: Any) -> statelink.Link:
    pages, rows = np.zeros((3, 4, 1, 8), np.uint8), np.zeros((4, 64), np.uint8)
    held = [state.kv_pages({0: (pages, pages.copy())}, heads=1), state.aux_rows({"rows": rows})]
    return statelink.open({"role": role, "backend": "tcp", "inspect": False, **config}, state.describe(role[0], held))


@pytest.mark.parametrize("error", [LookupError, SystemExit])
@pytest.mark.parametrize("call", ["sender", "open", "chunk", "finish", "receiver", "prepare", "arrived"])
def test_a_call_that_raises(call: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails its room at once, on both sides; also with what ends a thread that does not expect it."""
    monkeypatch.setattr(load_backend("tcp"), "strategies", {"*": Defective(call, error)})
    with opened("prefill") as prefill, opened("decode", peers={"p": [prefill.address]}) as decode:
        receiving = decode.receive(7, "p", 8, {"kv": [1, 0], "aux": [0]}, deadline=60)
        sending = prefill.send(7, 8, deadline=60)
        sending.push({"kv": [0, 1], "aux": [1]})
        assert (receiving.wait(15), sending.wait(15)) == (Status.FAILED, Status.FAILED)
        for room in (receiving, sending):
            assert room.reason is not None
            assert (room.reason.code, room.reason.cause) == ("backend.defect", f"a defect in {call}")


class Finishing(Strategy):
    """The direct strategy, whose receive hook ends with what is no transfer, or with one that ends with nothing."""

    name = "finishing"

    def __init__(self, found: object) -> None:
        self.found = found

    def sender(self) -> SendHook:
        return DIRECT.sender()

    def receiver(self) -> ReceiveHook:
        found = self.found

        class Receive(ReceiveHook):
            def prepare(self, context: Any) -> bytes:
                return b""

            def finish(self, context: Any) -> Any:
                return found

        return Receive()


def ended_with(outcome: Any) -> Transfer:
    transfer = Transfer()
    transfer.outcome = outcome
    return transfer


@pytest.mark.parametrize(
    ("found", "said"),
    [(True, "a hook returned True, and not a Transfer or None"), (ended_with("done"), "is 'done', and not an Outcome")],
    ids=["no transfer", "no outcome"],
)
def test_a_hook_that_returns_what_is_no_transfer(found: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its room fails at once, and gives its memory back."""
    monkeypatch.setattr(load_backend("tcp"), "strategies", {"*": Finishing(found)})
    with opened("prefill") as prefill, opened("decode") as decode:
        receiving = decode.receive(7, prefill.address, 8, {"kv": [1, 0], "aux": [0]}, deadline=60)
        sending = prefill.send(7, 8, deadline=60)
        sending.push({"kv": [0, 1], "aux": [1]})
        assert receiving.wait(15, quiesced=True) is Status.FAILED
        assert receiving.quiesced
        assert receiving.reason is not None
        assert receiving.reason.code == "backend.defect"
        assert said in receiving.reason.cause


@pytest.mark.parametrize(("side", "whose"), [("source", "here"), ("target", "by the peer")])
def test_blocks_outside_registered_memory_move_nothing(side: str, whose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A strategy yields them. The room fails, and the backend does not see them."""
    submitted: list[Any] = []

    class Astray(SendHook):
        def blocks(self, context: Any, move: Any) -> Any:
            for blocks in move.blocks():
                shifted = getattr(blocks, side).copy()
                shifted[-1] += np.uint64(1 << 30)
                yield dataclasses.replace(blocks, **{side: shifted})

    monkeypatch.setattr(Defective, "sender", lambda self: Astray())
    monkeypatch.setattr(load_backend("tcp"), "strategies", {"*": Defective("")})
    monkeypatch.setattr(load_backend("tcp"), "submit", lambda self, peer, batch: submitted.append(batch))
    with opened("prefill") as prefill, opened("decode", peers={"p": [prefill.address]}) as decode:
        receiving = decode.receive(7, "p", 8, {"kv": [1, 0], "aux": [0]}, deadline=60)
        sending = prefill.send(7, 8, deadline=60)
        sending.push({"kv": [0, 1], "aux": [1]})
        assert (receiving.wait(15), sending.wait(15)) == (Status.FAILED, Status.FAILED)
        assert sending.reason is not None
        assert sending.reason.what == f"a block is outside the memory registered {whose}"
    assert not submitted


def test_every_hook_is_told_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another raised when it was told."""
    strategy = Defective("abort")
    monkeypatch.setattr(load_backend("tcp"), "strategies", {"*": strategy})
    with opened("prefill") as prefill, opened("decode", peers={"p": [prefill.address]}) as decode:
        receiving = decode.receive(7, "p", 8, {"kv": [1, 0], "aux": [0]}, deadline=60)
        sending = prefill.send(7, 8, deadline=60)
        sending.push({"kv": [0]}, span=(0, 4))
        while not receiving.report.chunks and receiving.status is not Status.FAILED:
            decode.changes(0.1)
        sending.abort()
        assert receiving.wait(15, quiesced=True) is Status.FAILED
        assert sending.wait(15, quiesced=True) is Status.FAILED
    assert sorted(strategy.told) == sorted((what, name) for what in ("abort", "released") for name in ("kv", "aux"))


def test_hooks_that_are_open_are_told_that_another_does_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    class Second(Defective):
        def raise_in(self, call: str) -> None:
            if call == "sender":
                names.append(call)
            if call == "open" and len(names) == 2:
                raise LookupError("a defect in the second open")

    strategy = Second("")
    monkeypatch.setattr(load_backend("tcp"), "strategies", {"*": strategy})
    with opened("prefill") as prefill, opened("decode", peers={"p": [prefill.address]}) as decode:
        receiving = decode.receive(7, "p", 8, {"kv": [1, 0], "aux": [0]}, deadline=60)
        sending = prefill.send(7, 8, deadline=60)
        assert (receiving.wait(15), sending.wait(15)) == (Status.FAILED, Status.FAILED)
    (aborted, released) = strategy.told
    assert (aborted[0], released[0]) == ("abort", "released")
    assert aborted[1] == released[1]


def test_release_comes_after_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a room that fails meanwhile: what a hook takes in the one, it gives back in the other."""
    preparing, released = threading.Event(), threading.Event()
    early: list[bool] = []

    class Taking(Defective):
        def receiver(self) -> ReceiveHook:
            class Receive(ReceiveHook):
                def prepare(self, context: Any) -> bytes:
                    preparing.set()
                    early.append(released.wait(0.3))
                    return b""

                def released(self, context: Any) -> None:
                    released.set()

            return Receive()

    monkeypatch.setattr(load_backend("tcp"), "strategies", {"*": Taking("")})
    with opened("prefill") as prefill, opened("decode", peers={"p": [prefill.address]}) as decode:
        receiving = decode.receive(7, "p", 8, {"kv": [1, 0], "aux": [0]}, deadline=60)
        assert preparing.wait(15)
        receiving.abort()
        assert receiving.wait(15) is Status.FAILED
        assert released.wait(15)
    assert not any(early)


class Miscounting(Strategy):
    """The direct strategy, with other blocks than those of the move."""

    name = "miscounting"

    def __init__(self, change: Callable[[list[Blocks | None]], list[Blocks | None]]) -> None:
        self.change = change

    def sender(self) -> SendHook:
        change = self.change

        class Send(SendHook):
            def blocks(self, context: Any, move: Any) -> Any:
                return iter(change(list(move.blocks(1))))

        return Send()

    def receiver(self) -> ReceiveHook:
        return DIRECT.receiver()


@pytest.mark.parametrize(
    ("change", "handed"),
    [
        (lambda blocks: blocks[::2], "64 were"),
        (lambda blocks: blocks[:1], "32 were"),
        (lambda blocks: [], "0 were"),
        (lambda blocks: [each for block in blocks for each in (block, None, block)], "more than 128 were"),
        (lambda blocks: [*blocks, blocks[0]], "more than 128 were"),
    ],
    ids=["half", "some", "nothing", "twice", "more"],
)
def test_a_strategy_moves_what_the_plan_says(change: Any, handed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither side succeeds, and the report counts what the backend was given."""
    monkeypatch.setattr(load_backend("tcp"), "strategies", {"kv": Miscounting(change), "*": DIRECT})
    with opened("prefill") as prefill, opened("decode", peers={"p": [prefill.address]}) as decode:
        receiving = decode.receive(7, "p", 8, {"kv": [2, 0], "aux": [0]}, deadline=60)
        sending = prefill.send(7, 8, deadline=60)
        sending.push({"kv": [0, 2], "aux": [1]})
        assert (receiving.wait(15, quiesced=True), sending.wait(15, quiesced=True)) == (Status.FAILED, Status.FAILED)
        for room in (receiving, sending):
            assert room.reason is not None
            assert room.reason.code == "room.bytes"
            assert room.reason.cause == f"128 bytes of component 'kv' are planned for a push, {handed} handed over"
            assert room.reason.who["strategy"] == "miscounting"
        assert sum(moved.nbytes for moved in sending.report.moved.values()) <= 128 + 64


class Exiting:
    """A ready event that wants to end the thread that asks it."""

    def query(self) -> bool:
        raise SystemExit


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_ready_event_that_ends_threads(side: str) -> None:
    """It fails its room, and the next one is served by the same threads."""
    with opened("prefill") as prefill, opened("decode", peers={"p": [prefill.address]}) as decode:
        for room, ready in ((7, Exiting()), (8, None)):
            receiving = decode.receive(
                room,
                "p",
                8,
                {"kv": [1, 0], "aux": [0]},
                deadline=60,
                ready=ready if side == "decode" else None,
            )
            sending = prefill.send(room, 8, deadline=60)
            sending.push({"kv": [0, 1], "aux": [1]}, ready=ready if side == "prefill" else None)
            ends = Status.FAILED if ready else Status.SUCCEEDED
            assert (receiving.wait(15), sending.wait(15)) == (ends, ends)
            if ready is not None:
                assert receiving.reason is not None
                assert (receiving.reason.code, receiving.reason.cause) == (
                    "room.ready",
                    "its query() raised SystemExit",
                )
