"""Two ranks of prefill hand a request of a hybrid model to three of decode. Run `python examples/unequal_ranks.py`."""

import multiprocessing
import sys
from multiprocessing.connection import Connection

import numpy as np

import statelink
from statelink import state

PREFILL, DECODE = 2, 3  # ranks: tensor parallelism of 2 and of 3
TOKENS, PAGE, HEADS = 1000, 16, 6
PAGES = -(-TOKENS // PAGE)
GROUPS = (96, 48)  # the convolution runs over two blocks of channels, each of which is dealt out over the ranks


def model() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The request's state, whole: K, V, the convolution's and the recurrent state."""
    draw = np.random.default_rng(seed=0)
    k, v = draw.random((2, PAGES, PAGE, HEADS, 32), np.float32)
    return k, v, draw.random((sum(GROUPS), 3), np.float32), draw.random((HEADS, 32, 16), np.float32)


def share(whole: np.ndarray, axis: int, rank: int, width: int) -> np.ndarray:
    """The part of an axis that a rank holds: an equal part, of consecutive heads or channels."""
    return np.split(whole, width, axis)[rank]


def parts(rank: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """What one of `width` ranks holds of it. Of the convolution: its share of the first block, then of the second."""
    k, v, conv, ssm = model()
    channels = [share(block, 0, rank, width) for block in np.split(conv, np.cumsum(GROUPS)[:-1])]
    return share(k, 2, rank, width), share(v, 2, rank, width), np.concatenate(channels), share(ssm, 0, rank, width)


class Pools:
    """One rank's memory: 80 pages and 4 slots, of which this request gets some."""

    def __init__(self, rank: int, width: int) -> None:
        self.rank, self.width = rank, width
        shapes = [part.shape for part in parts(rank, width)]
        self.k, self.v = np.zeros((2, 80, *shapes[0][1:]), np.float32)
        self.conv, self.ssm = np.zeros((4, *shapes[2]), np.float32), np.zeros((4, *shapes[3]), np.float32)
        self.pages, self.slot = np.random.default_rng(rank).permutation(80)[:PAGES], 1 + rank

    def inventory(self, instance: str) -> state.Inventory:
        """What it is, in the whole model's numbers, and which share of it this rank has."""
        tp = (self.rank, self.width)
        mamba = state.mamba_slots(conv={1: self.conv}, ssm={1: self.ssm}, conv_groups=GROUPS, heads=HEADS, tp=tp)
        pages = state.kv_pages({0: (self.k, self.v)}, heads=HEADS, tp=tp)
        return state.describe(instance, [pages, mamba], rank=self.rank, ranks=self.width, model="hybrid@1")

    @property
    def items(self) -> dict[str, object]:
        return {"kv": self.pages, "mamba": [self.slot]}


def prefill(rank: int, pipe: Connection) -> None:
    pools = Pools(rank, PREFILL)
    pools.k[pools.pages], pools.v[pools.pages], pools.conv[pools.slot], pools.ssm[pools.slot] = parts(rank, PREFILL)
    with statelink.open({"role": "prefill", "backend": "tcp"}, pools.inventory("prefill-0")) as link:
        pipe.send(link.address)
        sending = link.send(room=7, tokens=TOKENS)
        sending.push(pools.items)
        sending.wait(timeout=60, quiesced=True)
        sending.check()


def decode(rank: int, pipe: Connection) -> None:
    pools = Pools(rank, DECODE)
    with statelink.open({"role": "decode", "backend": "tcp"}, pools.inventory("decode-0")) as link:
        pipe.send(link.address)
        prefills, siblings = pipe.recv()
        link.siblings(siblings)  # the other ranks of decode: they agree who sends what to whom
        receiving = link.receive(room=7, peer=prefills, tokens=TOKENS, items=pools.items)
        receiving.wait(timeout=60)
        receiving.check()
    came = (pools.k[pools.pages], pools.v[pools.pages], pools.conv[pools.slot], pools.ssm[pools.slot])
    equal = all(map(np.array_equal, came, parts(rank, DECODE)))
    sys.exit(not equal)


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    sides = [(prefill, rank) for rank in range(PREFILL)] + [(decode, rank) for rank in range(DECODE)]
    pipes = [context.Pipe() for _ in sides]
    processes = [
        context.Process(target=side, args=(rank, end)) for (side, rank), (_, end) in zip(sides, pipes, strict=True)
    ]
    for process in processes:
        process.start()
    addresses = [ours.recv() for ours, _ in pipes]  # what a router or a rendezvous server does
    for rank, (ours, _) in enumerate(pipes[PREFILL:]):
        others = addresses[PREFILL:]
        del others[rank]
        ours.send((addresses[:PREFILL], others))
    for process in processes:
        process.join()
    failed = any(process.exitcode for process in processes)
    print("a rank failed, or its bytes differ" if failed else "every byte is right on every rank")
    sys.exit(failed)
