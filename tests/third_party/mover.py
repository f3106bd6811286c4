"""One side of a transfer of one component: a process that knows third parties' packages only by their metadata."""

from __future__ import annotations

import hashlib
import json
import sys

import numpy as np

import statelink
from statelink import state

TOKENS = 40


def main() -> None:
    """Takes role, backend and state type; prefill prints its address, which decode takes as a fourth."""
    role, backend, kind, *rest = sys.argv[1:]
    pool = np.full((32, 4, 24), 0xEE, np.uint8)
    ids = np.random.default_rng(len(role)).permutation(32)[: TOKENS // 4]
    if role == "prefill":
        spread = np.arange(len(ids) * 96, dtype=np.uint32) * np.uint32(2654435761) >> 24  # no two pages alike
        pool[ids] = spread.astype(np.uint8).reshape(-1, 4, 24)
    items = state.whole_items({"pool": pool}, name="pages", type=kind, page=4)
    with statelink.open({"role": role, "backend": backend}, state.describe(role, [items])) as link:
        room: statelink.Room
        if role == "prefill":
            print(link.address, flush=True)
            room = sending = link.send(7, TOKENS)
            sending.push({"pages": ids})
        else:
            room = link.receive(7, rest[0], TOKENS, {"pages": ids})
        room.wait(30)
        room.check()
        others = np.delete(pool, ids, axis=0)
        said = {
            "digest": hashlib.sha256(pool[ids].tobytes()).hexdigest(),
            "clean": bool((others == 0xEE).all()),
            "blocks": room.report.moved["pages"].blocks,
        }
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
