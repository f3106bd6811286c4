"""Hands one request from a prefill process to a decode process. Run it: `python examples/two_processes.py`."""

import multiprocessing
import sys
from multiprocessing.connection import Connection

import numpy as np

import statelink
from statelink import state


def describe(instance: str, k: np.ndarray, v: np.ndarray) -> state.Inventory:
    # Arrays [pages, tokens, heads, dim], of torch or numpy: one pair for each layer.
    return state.describe(instance, [state.kv_pages({0: (k, v)}, heads=8)], model="my-model@1")


def prefill(pipe: Connection) -> None:
    k, v = np.random.default_rng(seed=0).random((2, 64, 16, 8, 32), np.float32)
    pages = np.random.permutation(64)[:63]  # of the request's 1000 tokens, 16 in each
    with statelink.open({"role": "prefill", "backend": "tcp"}, describe("prefill-0", k, v)) as link:
        pipe.send(link.address)
        sending = link.send(room=7, tokens=1000)  # before or after decode asks
        sending.push({"kv": pages[:32]}, span=(0, 512))  # while the rest is still being computed
        sending.push({"kv": pages[32:]})  # reaches the end: the last push
        sending.wait(timeout=30, quiesced=True)  # or poll() from a scheduler's loop
        sending.check()  # raises if the room failed, or has not ended by then
        assert sending.quiesced  # now the pages may be used again
    pipe.send((k[pages], v[pages]))


def decode(pipe: Connection) -> None:
    k, v = np.zeros((2, 64, 16, 8, 32), np.float32)
    pages = np.random.permutation(64)[:63]
    with statelink.open({"role": "decode", "backend": "tcp"}, describe("decode-0", k, v)) as link:
        receiving = link.receive(room=7, peer=pipe.recv(), tokens=1000)  # needs no memory yet
        receiving.accept({"kv": pages})  # now it does
        receiving.wait(timeout=30)  # or poll() from a scheduler's loop: one attribute read
        receiving.check()  # returns if every byte is there; else raises why not: the room failed, or has not ended
    equal = np.array_equal((k[pages], v[pages]), pipe.recv())
    print("the bytes are equal" if equal else "the bytes differ")
    sys.exit(not equal)


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ends = context.Pipe()
    processes = [context.Process(target=side, args=(end,)) for side, end in zip((prefill, decode), ends, strict=True)]
    for process, end in zip(processes, ends, strict=True):
        process.start()
        end.close()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))
