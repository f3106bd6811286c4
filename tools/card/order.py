"""Stream order: a late kernel writes the pages. Does a transfer wait for it with ``ready=event``, and without?

    python -m tools.card.order [--rooms 20] [--backend nixl]

On prefill, the kernel computes the state that is pushed. On decode, it is the last one of the pages' former owner. A
run without an event has to find wrong bytes. Otherwise this program could not see a broken order.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

import statelink
from statelink import state

from .device import Card
from .pair import PAGE_TOKENS, both, succeeded
from .say import answer

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

PAGES, HEADS, WIDTH = 64, 8, 512
SHAPE = (PAGES, PAGE_TOKENS, HEADS, WIDTH)
NBYTES = PAGES * PAGE_TOKENS * HEADS * WIDTH
LATE = 0.2
"""Seconds for which the stream is busy before the kernel writes. A room takes a few milliseconds."""
FOREIGN, STRAY = 0xEE, 1024
"""The byte that the former owner writes, and how many of them into each buffer."""


def side(role: str, pipe: Connection, job: dict[str, Any]) -> list[int]:
    """One side. Decode returns the number of wrong bytes in each room."""
    card = Card()
    buffers = [card.buffer(NBYTES) for _ in range(2)]
    keys, values = (state.Memory.pointer(each.address, SHAPE, "uint8", 1, kind=card.kind) for each in buffers)
    inventory = state.describe(role, [state.kv_pages({0: (keys, values)}, heads=HEADS)], model="order")
    tokens, items, wrong = PAGES * PAGE_TOKENS, {"kv": np.arange(PAGES)}, []
    with statelink.open({"role": role, "backend": job["backend"]}, inventory) as link:
        if role == "prefill":
            pipe.send(link.address)
        address = pipe.recv() if role == "decode" else ""
        # The first room connects the two; it is not counted.
        for room in range(1, job["rooms"] + 2):
            byte, counts = room % 200 + 1, room > 1
            if role == "prefill":
                late = LATE if counts and job["at"] == "prefill" else 0.0
                event = card.late(buffers, byte, late)
                if not late:
                    card.finish()
                pipe.send("computed, or about to be")
                sending = link.send(room, tokens)
                sending.push(items, ready=event if job["guarded"] or not late else None)
                succeeded(sending)
                card.finish()
            else:
                event = None
                pipe.recv()
                if counts and job["at"] == "decode":
                    event = card.late(buffers, FOREIGN, LATE, STRAY)
                receiving = link.receive(room, address, tokens)
                receiving.accept(items, ready=event if job["guarded"] else None)
                succeeded(receiving)
                if job["at"] == "decode":
                    card.finish()  # the foreign bytes are there, before or after the state
                found = card.differing(buffers, byte)
                wrong += [found] if counts else []
            pipe.send(room)  # both go on together
            pipe.recv()
    return wrong


def main() -> int:
    """Run all four, and say what each found. An error if an event was not honoured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", type=int, default=20)
    parser.add_argument("--backend", default="nixl")
    arguments = parser.parse_args()
    broken = False
    for at, what in (("prefill", "pushed"), ("decode", "accepted")):
        for guarded in (True, False):
            name = f"{what} {'with' if guarded else 'without'} an event: rooms with wrong bytes"
            rooms = arguments.rooms if guarded else max(1, arguments.rooms // 4)
            job = {"at": at, "guarded": guarded, "rooms": rooms, "backend": arguments.backend}
            try:
                wrong = both(side, job, 30 + rooms)["decode"]
            except RuntimeError as error:
                answer(name, f"no answer: {error}")
                broken = True
                continue
            bad = sum(each > 0 for each in wrong)
            answer(name, f"{bad} of {rooms}, up to {max(wrong)} bytes")
            broken |= guarded and bad > 0
            if not guarded and not bad:
                answer(name, "none: so this run does not show that the event is what keeps the order")
    return 1 if broken else 0


if __name__ == "__main__":
    # What is sent to a process names its module, which is `__main__` there, too.
    from tools.card import order

    sys.exit(order.main())
