"""A conversation whose state goes both ways, and a request that moves. Run it: `python examples/both_ways.py`.

The model is a stand-in: its state is that of a hybrid, and each token follows from all of that state. So a wrong byte,
or one at a wrong place, makes another token.
"""

import sys

import numpy as np

import statelink
from statelink import state

PAGE, HEADS, DIM, VOCABULARY = 16, 2, 8, 997
LEASE = 30.0  # seconds for which state waits for its receiver


class Engine:
    """One server: 32 pages of keys and values, 4 slots of recurrent state, and a link that sends and receives."""

    def __init__(self, name: str) -> None:
        self.name, self.computed = name, 0
        self.k, self.v = np.zeros((2, 32, PAGE, HEADS, DIM), np.int64)
        self.conv, self.ssm = np.zeros((4, DIM, 3), np.int64), np.zeros((4, HEADS, DIM, 4), np.int64)
        self.pages, self.slots = list(np.random.permutation(32)), list(np.random.permutation(4))  # the free ones
        pages = state.kv_pages({0: (self.k, self.v)}, heads=HEADS)
        slots = state.mamba_slots(conv={1: self.conv}, ssm={1: self.ssm}, heads=HEADS)
        inventory = state.describe(name, [pages, slots], model="hybrid@1")
        self.link = statelink.open({"role": "both", "backend": "tcp"}, inventory)


class Request:
    """A request on one server: its tokens, for how many of them there is state, and where that is."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.slot = engine, engine.slots.pop()
        self.tokens: list[int] = []
        self.pages: list[int] = []
        self.held = 0

    def grow(self, tokens: int) -> None:
        while len(self.pages) * PAGE < tokens:
            self.pages.append(self.engine.pages.pop())

    def compute(self, tokens: list[int]) -> int:
        """The token that follows these. It computes those for which there is no state."""
        if not self.held:  # the slot has what its last request left there
            self.engine.conv[self.slot] = self.engine.ssm[self.slot] = 0
        self.tokens = tokens
        self.grow(len(tokens))
        conv, ssm = self.engine.conv[self.slot], self.engine.ssm[self.slot]
        for position in range(self.held, len(tokens)):
            conv[:] = np.concatenate([conv[:, 1:], np.full((DIM, 1), tokens[position])], axis=1)
            ssm[:] = (ssm * 31 + conv.sum() + np.arange(ssm.size).reshape(ssm.shape)) % 65521
            place = self.pages[position // PAGE], position % PAGE
            self.engine.k[place] = tokens[position] * 17 + position + np.arange(HEADS * DIM).reshape(HEADS, DIM)
            self.engine.v[place] = ssm.sum() + self.engine.k[place]
        self.engine.computed += len(tokens) - self.held
        self.held = len(tokens)
        k, v, *_ = self.state()
        weights = np.arange(1, self.held + 1)[:, None, None]
        return int(((k * weights).sum() + (v * weights).sum() * 3 + conv.sum() + ssm.sum()) % VOCABULARY)

    def generate(self, tokens: list[int], count: int) -> list[int]:
        """These tokens and the next ones. The last one has no state."""
        for _ in range(count):
            tokens = [*tokens, self.compute(tokens)]
        self.tokens = tokens
        return tokens

    def state(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        k, v = (pool[self.pages].reshape(-1, HEADS, DIM)[: self.held] for pool in (self.engine.k, self.engine.v))
        return k, v, self.engine.conv[self.slot], self.engine.ssm[self.slot]

    def free(self) -> None:
        """Once every room that names them has quiesced."""
        self.engine.pages += self.pages
        self.engine.slots.append(self.slot)


def give(room: int, request: Request) -> statelink.Sending:
    tokens = request.tokens[: request.held]  # those that were computed: all but the last one, which was sampled
    content = statelink.content_of(tokens)
    sending = request.engine.link.send(room, len(tokens), deadline=LEASE, content=content)
    sending.push({"kv": request.pages, "mamba": [request.slot]})
    return sending


def take(room: int, peer: str, request: Request, tokens: list[int]) -> statelink.Receiving:
    held = request.held // PAGE * PAGE  # whole pages of an earlier turn, if they are of the same tokens
    prefix = held if request.tokens[:held] == tokens[:held] else 0
    request.tokens = tokens
    request.grow(len(tokens))
    items = {"kv": request.pages[prefix // PAGE :], "mamba": [request.slot]}  # a recurrent state moves whole
    content = statelink.content_of(tokens)
    return request.engine.link.receive(room, peer, len(tokens), items, prefix=prefix, deadline=LEASE, content=content)


def move(room: int, source: Request, target: Request, tokens: list[int]) -> None:
    """What a router does: both sides hear of the room, and the receiver of the peer and how many tokens have state."""
    sending = give(room, source)
    receiving = take(room, source.engine.link.address, target, tokens[: source.held])
    for side in (receiving, sending):
        side.wait(timeout=LEASE, quiesced=True)
    # After a failure, pages and slot may be half written: the target computes all tokens.
    target.held = source.held if receiving.status is statelink.Status.SUCCEEDED else 0
    said = f"the state of {target.held} tokens, {receiving.nbytes} bytes"
    if receiving.reason:
        said = receiving.reason.what
    print(f"{source.engine.name} -> {target.engine.name}: {said}")


def main() -> bool:
    prompt, more = np.random.default_rng(seed=0).integers(VOCABULARY, size=(2, 100)).tolist()
    prefill, first, second, alone = (Engine(name) for name in ("prefill", "decode-0", "decode-1", "alone"))
    at_prefill, at_first, at_second, undisturbed = (Request(each) for each in (prefill, first, second, alone))

    tokens = at_prefill.generate(prompt, 1)  # the first turn
    move(1, at_prefill, at_first, tokens)
    tokens = at_first.generate(tokens, 40)
    move(2, at_first, at_prefill, tokens + more)  # the second turn: the state of the first one goes back
    tokens = at_prefill.generate(tokens + more, 1)  # and prefill computes the rest
    move(3, at_prefill, at_first, tokens)
    tokens = at_first.generate(tokens, 20)
    move(4, at_first, at_second, tokens)  # decode-0 is drained while the request runs
    at_first.free()
    tokens = at_second.generate(tokens, 20)

    expected = undisturbed.generate(undisturbed.generate(prompt, 41) + more, 41)
    print(f"prefill computed {prefill.computed} tokens, decode-0 {first.computed}, decode-1 {second.computed}")
    same = tokens == expected and all(map(np.array_equal, at_second.state(), undisturbed.state()))
    same &= prefill.computed + first.computed + second.computed == alone.computed  # no token twice

    changed = [tokens[0] ^ 1, *tokens[1:]]  # the third turn: its first token differs
    move(5, at_second, at_prefill, changed)
    undisturbed.held = 0
    same &= at_prefill.compute(changed) == undisturbed.compute(changed)
    print("the tokens and the bytes are equal" if same else "the tokens or the bytes differ")
    for engine in (prefill, first, second, alone):
        engine.link.close()
    return same


if __name__ == "__main__":
    sys.exit(not main())
