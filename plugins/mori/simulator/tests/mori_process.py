"""The other process of the simulator's tests: an engine with one memory in a shared file.

Run as a program: ``mori_process.py <file> <key> <transport> <port>``. It says who it is, and then does what it is told.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import numpy as np


def main(path: str, key: str, transport: str, port: str) -> None:
    from mori.io import BackendType, EngineDesc, IOEngine, IOEngineConfig, MemoryDesc, MemoryLocationType

    statuses = []
    memory = np.memmap(path, np.uint8, "r+")
    engine = IOEngine(key, IOEngineConfig("127.0.0.1", int(port)))
    engine.create_backend(BackendType[transport])
    place = MemoryLocationType.GPU if transport == "XGMI" else MemoryLocationType.CPU
    desc = engine.register_memory(memory.ctypes.data, len(memory), 0, place)
    print(json.dumps({"engine": engine.get_engine_desc().pack().hex(), "memory": desc.pack().hex()}), flush=True)
    for line in sys.stdin:
        answer: Any = None
        what, *arguments = json.loads(line)
        if what == "deregister":
            engine.deregister_memory(desc)
        elif what == "pop":
            status = engine.pop_inbound_transfer_status(*arguments)
            answer = status and [status.Code().name, status.Message()]
        elif what == "write":
            theirs, target, size = arguments
            engine.register_remote_engine(EngineDesc.unpack(bytes.fromhex(theirs)))
            session = engine.create_session(desc, MemoryDesc.unpack(bytes.fromhex(target)))
            statuses.append(session.write(0, 0, size, session.allocate_transfer_uid()))
            sent = threading.Event()
            engine._core.backends[BackendType[transport]].later(sent.set)
            sent.wait()  # its kernel has the bytes
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
