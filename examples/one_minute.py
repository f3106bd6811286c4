"""Hands requests from one link to another for a minute, so that there is something to look at.

Run it: `python examples/one_minute.py 60 9464`, with the seconds and the port of the metrics.
"""

import os
import sys
import time

import numpy as np

import statelink
from statelink import state


def describe(instance: str, pages: np.ndarray) -> state.Inventory:
    return state.describe(instance, [state.kv_pages({0: (pages[0], pages[1])}, heads=8)], model="my-model@1")


def main(seconds: float, port: int) -> None:
    config = {"backend": "tcp", "telemetry": {"prometheus": {"port": port}}}
    source = np.random.default_rng(seed=0).random((2, 64, 16, 8, 32), np.float32)
    target = np.zeros_like(source)
    pages, rooms, end = np.arange(63), 0, time.monotonic() + seconds
    with (
        statelink.open({**config, "role": "prefill"}, describe("prefill-0", source)) as prefill,
        statelink.open({**config, "role": "decode"}, describe("decode-0", target)) as decode,
    ):
        while not rooms or time.monotonic() < end:
            rooms += 1
            sending = prefill.send(rooms, tokens=1000)
            sending.push({"kv": pages})
            receiving = decode.receive(rooms, prefill.address, 1000, {"kv": pages})
            receiving.wait(timeout=30)
            receiving.check()
            sending.wait(timeout=30, quiesced=True)
            sending.check()
            if rooms == 1:
                print(f"process {os.getpid()} hands requests over", flush=True)
    equal = np.array_equal(source[:, pages], target[:, pages])
    print(f"{rooms} requests, and the bytes {'are equal' if equal else 'differ'}")
    sys.exit(not equal)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
