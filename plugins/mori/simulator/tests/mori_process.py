"""A process with an engine of the simulated ``mori``, whose memory is a file; it ends with its standard input."""

from __future__ import annotations

import json
import sys

import numpy as np


def main(path: str, key: str, transport: str, port: str) -> None:
    from mori.io import BackendType, IOEngine, IOEngineConfig, MemoryLocationType

    memory = np.memmap(path, np.uint8, "r+")
    engine = IOEngine(key, IOEngineConfig("127.0.0.1", int(port)))
    engine.create_backend(BackendType[transport])
    place = MemoryLocationType.GPU if transport == "XGMI" else MemoryLocationType.CPU
    desc = engine.register_memory(memory.ctypes.data, memory.nbytes, 0, place)
    print(json.dumps({"engine": engine.get_engine_desc().pack().hex(), "memory": desc.pack().hex()}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
