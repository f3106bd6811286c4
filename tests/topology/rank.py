"""One rank: a process that takes its part in one topology after the other."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

from tests.topology.world import TOKENS, TOPOLOGIES, Rank

import statelink

ROOMS = (41, 42)


def say(**what: Any) -> None:
    """Tell the test."""
    print(json.dumps(what), flush=True)


def hear() -> dict[str, Any]:
    """Hear from the test."""
    heard: dict[str, Any] = json.loads(sys.stdin.readline())
    return heard


def main() -> None:
    """Play this rank's part."""
    role, number, backend = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    for topology in (each for each in TOPOLOGIES if each.name in sys.argv[4:]):
        shape = topology.prefill if role == "prefill" else topology.decode
        if number >= shape.ranks:
            continue
        port = hear()
        ranks = {room: Rank(role, shape, number, room) for room in ROOMS}
        with contextlib.ExitStack() as links:
            for room, rank in ranks.items():
                # One link a room: each has pools of its own, so that one request cannot cover another's mistakes.
                config = {
                    "role": role,
                    "backend": backend,
                    "listen": port["listen"][str(room)],
                    "siblings": port["siblings"][str(room)],
                }
                link = links.enter_context(statelink.open(config, rank.inventory))
                if role == "prefill":
                    rank.fill(room)
                    say(room=room, address=link.address)
                    sending = link.send(room, TOKENS)
                    sending.push({"kv": rank.items["kv"][:4]}, span=(0, 32))
                    sending.push({name: ids[4:] if name == "kv" else ids for name, ids in rank.items.items()})
                    sending.wait(40)
                    sending.check()
                    say(room=room, moved=sum(each.nbytes for each in sending.report.moved.values()))
                else:
                    say(room=room, address=link.address)
                    receiving = link.receive(room, hear()["peers"], TOKENS, rank.items)
                    receiving.wait(40)
                    receiving.check()
                    say(room=room, wrong=rank.wrong(room), quiesced=receiving.quiesced)


if __name__ == "__main__":
    main()
