"""Statelink beside two engines: what lives in the processes of prefill, of decode, and of the reference.

An engine of your own needs what is here: pools in Statelink's words, `send` and `push` while a prompt is computed,
`receive` before memory is written, and memory that is released only once its room is `quiesced`.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import statelink
from statelink import state
from statelink.errors import ConfigError
from statelink_demo.engine import Prefilling, build_model, decode, reference
from statelink_demo.messages import Answer, Request, Told
from statelink_demo.pools import KV, MAMBA, METADATA, StatePools

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statelink_demo.pools import Held

DEADLINE = 120.0  # seconds that a request may take


def describe_pools(instance: str, pools: StatePools, revision: str) -> state.Inventory:
    """Describe every pool of a rank that holds the whole model. Sides whose revisions differ refuse each other."""
    pages = {layer: (pools.k[layer], pools.v[layer]) for layer in pools.k}
    groups, heads = pools.conv_groups, pools.value_heads
    components = [
        state.kv_pages(pages, heads=pools.kv_heads, name=KV),
        state.mamba_slots(conv=pools.conv, ssm=pools.recurrent, conv_groups=groups, heads=heads, name=MAMBA),
        state.aux_rows(pools.rows, name=METADATA),
    ]
    return state.describe(instance, components, model=revision)


class Reference:
    """The same model in one process, with nothing moved."""

    def __init__(self, seed: int, tokens: int) -> None:
        self._model, self._tokens = build_model(seed), tokens

    def answer(self, requests: Sequence[Request]) -> dict[int, Answer]:
        """Answer prompts."""
        return {each.room: reference(self._model, each.prompt, self._tokens) for each in requests}


class Side:
    """A process with a link over all of its pools, which hold `most` requests at once."""

    def __init__(self, role: Any, backend: str, most: int, seed: int, tokens: int) -> None:
        self._model, self._tokens = build_model(seed), tokens
        more = len(role)  # other sizes and another order on each side: only the transfer makes the two agree
        self._pools = StatePools(self._model.config, 14 * most + more, most + more, seed=more)
        inventory = describe_pools(role, self._pools, f"weights of seed {seed}")
        self.link = statelink.open({"role": role, "backend": backend, "deadline": DEADLINE}, inventory)

    def prefill(self, requests: Sequence[Request], by_layer: bool) -> dict[int, Told]:
        """Compute prompts, and push their state while it is computed."""
        rooms = []
        for each in requests:
            prompt, room = Prefilling(self._model, self._pools, *each[::3]), self.link.send(each.room, each.tokens)
            pushed: dict[str, list[float]] = {}
            while prompt.computed < each.tokens:
                self._compute(prompt, room, by_layer, pushed)
            rooms.append((room, prompt.held, self._pools.digests(prompt.held, each.tokens), pushed))
        return {room.room: Told(self._released(room, held), said, pushed) for room, held, said, pushed in rooms}

    def _compute(self, prompt: Prefilling, room: Any, by_layer: bool, pushed: dict[str, list[float]]) -> None:
        """Compute a chunk, and push its state: layer by layer during the forward pass, or all of it afterwards."""
        (start, stop), held, pools = prompt.span, prompt.held, self._pools
        # A chunk begins on a page. Recurrent state is final, and pushed, at the end of the prompt.
        items: dict[str, Any] = {KV: held[KV][start // pools.page_size : pools.pages_for(stop)]}
        if stop == len(prompt.prompt):
            items[MAMBA] = held[MAMBA]

        def push(names: dict[str, Any], **more: Any) -> None:
            for name in names:
                pushed.setdefault(name, []).append(time.monotonic())
            if names:
                room.push(names, span=(start, stop), **more)

        def push_layer(layer: int) -> None:
            names = {KV} if layer in pools.k else {MAMBA}
            push({name: items[name] for name in names & {*items}}, layers=(layer, layer + 1), last=False)

        last = prompt.step(push_layer if by_layer else None)
        push(({} if by_layer else items) | ({METADATA: held[METADATA]} if last else {}), last=last)

    def decode(self, requests: Sequence[Request], peer: str) -> dict[int, Told]:
        """Open every room at once, and answer each as soon as it has arrived."""
        labels = [pool.label for pool in self._pools.all]
        if unknown := {each.sabotage for each in requests} - {"", *labels}:
            raise ConfigError(f"no pool named {unknown.pop()!r} to zero; there are {', '.join(labels)}")
        rooms, found = [], {}
        for each in requests:
            held, opened = self._pools.allocate(each.tokens), time.monotonic()
            rooms.append((each, self.link.receive(each.room, peer, each.tokens, held), held, opened))
        for each, room, held, opened in rooms:
            room.wait(DEADLINE)
            found[each.room] = told = self._answer(each, room, held, opened)
            told.failed = self._released(room, held) or told.failed
        return found

    def _answer(self, request: Request, room: statelink.Receiving, held: Held, opened: float) -> Told:
        if room.status is not statelink.Status.SUCCEEDED:
            return Told()
        for pool in self._pools.all:
            if pool.label == request.sabotage:
                pool.raw()[held[pool.by]] = 0
        arrived = opened + room.report.waited + room.report.transferred  # the link's measure, however busy we were
        moved = {name: (each.nbytes, each.blocks) for name, each in room.report.moved.items()}
        told = Told(digests=self._pools.digests(held, request.tokens), arrived=arrived, moved=moved)
        try:
            told.answer = decode(self._model, self._pools, held, request.room, self._tokens)
        except ValueError as error:
            told.failed = f"decode refused it: {error}"
        return told

    def _released(self, room: statelink.Room, held: Held) -> str:
        """Give memory back, but not before nothing can read or write it any more; why the room failed."""
        room.wait(DEADLINE, quiesced=True)
        if room.quiesced:
            self._pools.release(held)
        return "" if room.status is statelink.Status.SUCCEEDED else f"the room failed: {room.reason}"

    def close(self) -> None:
        """Close the link before the process may end well."""
        if not self.link.close():
            sys.exit("the link did not close in time")
