"""Hands requests from one link to another for a minute, so that there is something to look at.

Run it: `python examples/one_minute.py 60 9464`, with the seconds and the port of the metrics. With `--role prefill` in
one terminal and `--role decode` and another port in a second one, each side is a process of its own, and may be killed
and started again.
"""

import argparse
import os
import sys
import time

import numpy as np

import statelink
from statelink import Room, state
from statelink.errors import StatelinkError

PAGES = np.arange(63)
DEADLINE = 0.9
"""Seconds for a request between two processes, which begin one each second. So both always begin the same one."""


def describe(instance: str, pages: np.ndarray) -> state.Inventory:
    return state.describe(instance, [state.kv_pages({0: (pages[0], pages[1])}, heads=8)], model="my-model@1")


def memory(role: str) -> np.ndarray:
    shape = (2, 64, 16, 8, 32)
    return np.zeros(shape, np.float32) if role == "decode" else np.random.default_rng(seed=0).random(shape, np.float32)


def send(link: statelink.Link, room: int, deadline: float | None = None) -> Room:
    sending = link.send(room, tokens=1000, deadline=deadline)
    sending.push({"kv": PAGES})
    return sending


def in_one_process(seconds: float, port: int) -> bool:
    config = {"backend": "tcp", "telemetry": {"prometheus": {"port": port}}}
    source, target = memory("prefill"), memory("decode")
    rooms, end = 0, time.monotonic() + seconds
    with (
        statelink.open({**config, "role": "prefill"}, describe("prefill-0", source)) as prefill,
        statelink.open({**config, "role": "decode"}, describe("decode-0", target)) as decode,
    ):
        while not rooms or time.monotonic() < end:
            rooms += 1
            sending = send(prefill, rooms)
            receiving = decode.receive(rooms, prefill.address, 1000, {"kv": PAGES})
            for room in (receiving, sending):
                room.wait(timeout=30, quiesced=True)
                room.check()
            for link in (prefill, decode):
                link.changes()  # an engine would look here which rooms have changed
            if rooms == 1:
                print(f"process {os.getpid()} hands requests over", flush=True)
    equal = np.array_equal(source[:, PAGES], target[:, PAGES])
    print(f"{rooms} requests, and the bytes {'are equal' if equal else 'differ'}")
    return equal


def on_one_side(role: str, seconds: float, port: int, address: str) -> bool:
    config = {"backend": "tcp", "role": role, "telemetry": {"prometheus": {"port": port}}}
    if role == "prefill":
        config["listen"] = address
    pages, good, end = memory(role), 0, time.monotonic() + seconds
    with statelink.open(config, describe(f"{role}-0", pages)) as link:
        print(f"process {os.getpid()} is {role}", flush=True)
        while time.monotonic() < end:
            time.sleep(1 - time.time() % 1)  # a router would tell both sides the number of a request
            number = round(time.time())
            if role == "prefill":
                room = send(link, number, DEADLINE)
            else:
                room = link.receive(number, address, 1000, {"kv": PAGES}, deadline=DEADLINE)
            room.wait(timeout=30, quiesced=True)
            link.changes()
            try:
                room.check()
            except StatelinkError as error:
                print(f"request {number}: {error}", flush=True)
            else:
                good += 1
                print(f"request {number}: succeeded", flush=True)
    return good > 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Hand requests from one link to another, for others to look at.")
    parser.add_argument("seconds", type=float)
    parser.add_argument("port", type=int, help="of the metrics")
    parser.add_argument("--role", choices=("prefill", "decode"), help="be one side; without it, be both")
    parser.add_argument("--address", default="tcp://127.0.0.1:7100", help="where prefill listens, with --role")
    given = parser.parse_args()
    if given.role is None:
        good = in_one_process(given.seconds, given.port)
    else:
        good = on_one_side(given.role, given.seconds, given.port, given.address)
    sys.exit(not good)


if __name__ == "__main__":
    main()
