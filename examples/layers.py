"""Hands a request over while its forward pass runs. Run it: `python examples/layers.py`.

The device is a thread here. As a graphics card does, it works behind the thread that launches, and an event says how
far it is.
"""

import queue
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np

import statelink
from statelink import state

LAYERS, TOKENS = 8, 1000
GROUPS = (0, *statelink.layer_groups(LAYERS))


class Device:
    """Runs what is launched, in order, some milliseconds later."""

    def __init__(self) -> None:
        self._launched: queue.Queue[Callable[[], object]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            job = self._launched.get()
            time.sleep(0.005)
            job()

    def launch(self, job: Callable[[], object]) -> None:
        self._launched.put(job)

    def record(self) -> "Event":
        """An event that happens when everything that was launched before it is done."""
        event = Event()
        self.launch(event.set)
        return event


class Event(threading.Event):
    """What the engine gives with a push. `query`, as an event of torch has it, is all that a link asks for."""

    def query(self) -> bool:
        return self.is_set()


def describe(instance: str, pools: np.ndarray) -> state.Inventory:
    layers = {layer: (k, v) for layer, (k, v) in enumerate(pools)}
    return state.describe(instance, [state.kv_pages(layers, heads=8)], model="my-model@1")


def main() -> bool:
    shape = (LAYERS, 2, 64, 16, 8, 32)  # K and V of each layer: pages, tokens, heads, dim
    source, target = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    computed = np.random.default_rng(seed=0).random(shape, np.float32)
    pages, device = np.arange(63), Device()
    with (
        statelink.open({"role": "prefill", "backend": "tcp"}, describe("prefill-0", source)) as prefill,
        statelink.open({"role": "decode", "backend": "tcp"}, describe("decode-0", target)) as decode,
    ):
        receiving = decode.receive(7, prefill.address, TOKENS, {"kv": pages})
        sending = prefill.send(7, TOKENS)
        for layer in range(LAYERS):  # the forward pass: each layer is launched, and its group's end is pushed
            device.launch(partial(np.copyto, source[layer], computed[layer]))
            if layer + 1 in GROUPS:
                first = GROUPS[GROUPS.index(layer + 1) - 1]
                ready, last = device.record(), layer + 1 == LAYERS
                sending.push({"kv": pages}, span=(0, TOKENS), layers=(first, layer + 1), ready=ready, last=last)
        for room in (receiving, sending):
            room.wait(timeout=30)
            room.check()
    equal = np.array_equal(computed[:, :, pages], target[:, :, pages])
    print("the bytes are equal" if equal else "the bytes differ")
    return equal


if __name__ == "__main__":
    sys.exit(not main())
