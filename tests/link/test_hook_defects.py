"""A strategy that raises where it should not fails its room at once, on both sides, whichever call it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import statelink
from statelink import Status, state
from statelink.backend import DIRECT, ReceiveHook, SendHook, Strategy
from statelink.registry import load_backend


class Defective(Strategy):
    """The direct strategy, one call of which raises."""

    name = "defective"

    def __init__(self, call: str) -> None:
        self.call = call

    def sender(self) -> SendHook:
        self.raise_in("sender")
        strategy = self

        class Send(SendHook):
            def open(self, context: Any, prepared: bytes) -> None:
                strategy.raise_in("open")

            def chunk(self, context: Any, move: Any) -> Any:
                strategy.raise_in("chunk")
                return move.blocks()

            def finish(self, context: Any) -> None:
                strategy.raise_in("finish")

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
            raise LookupError(f"a defect in {call}")


def opened(role: str, **config: Any) -> statelink.Link:
    pages = np.zeros((2, 4, 1, 8), np.uint8)
    inventory = state.describe(role[0], [state.kv_pages({0: (pages, pages.copy())}, heads=1)])
    return statelink.open({"role": role, "backend": "tcp", "inspect": False, **config}, inventory)


@pytest.mark.parametrize("call", ["sender", "open", "chunk", "finish", "receiver", "prepare", "arrived"])
def test_a_call_that_raises(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_backend("tcp"), "strategies", {"*": Defective(call)})
    with opened("prefill") as prefill, opened("decode", peers={"p": [prefill.address]}) as decode:
        receiving = decode.receive(7, "p", 8, {"kv": [1, 0]}, deadline=60)
        sending = prefill.send(7, 8, deadline=60)
        sending.push({"kv": [0, 1]})
        assert (receiving.wait(15), sending.wait(15)) == (Status.FAILED, Status.FAILED)
        for room in (receiving, sending):
            assert room.reason is not None
            assert (room.reason.code, room.reason.cause) == ("backend.defect", f"a defect in {call}")
