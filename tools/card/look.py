"""Whether UCX knows CUDA, and how fast the card copies. `statelink doctor` says what else there is.

python -m tools.card.look [--mib 256]
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.metadata
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .device import Card
from .say import answer

MIB = 1 << 20
SIZE = "STATELINK_GPU_MIB"
"""The variable that tells the process which measures copies how large they are."""


def modules() -> None:
    """Whether the loader can load UCX's modules for CUDA, and what they need. Before torch is imported, if it is."""
    for name in ("libcuda.so.1", "libnvidia-ml.so.1", "libcudart.so.13", "libcudart.so.12"):
        answer(f"loads {name}", loads(name))
    api: Any = importlib.import_module("nixl._api")
    package = Path(api.__file__).parent
    answer("NIXL's build", package.name)
    libraries = package.parent / f"{package.name}.libs"
    for path in libraries.glob("libucs-*.so*"):
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)  # UCX's modules take names from it without asking for it
    for path in sorted((libraries / "ucx").glob("libuc[tm]_cuda.so*")):
        answer(f"loads {path.name}", loads(str(path)))


def loads(name: str) -> str:
    """``yes``, or the loader's reason."""
    try:
        ctypes.CDLL(name)
    except OSError as error:
        return str(error)
    return "yes"


def components() -> None:
    """What UCX itself lists: its components, which are groups of transports."""
    api: Any = importlib.import_module("nixl._api")
    package = Path(api.__file__).parent
    library = next((package.parent / f"{package.name}.libs").glob("libuct-*.so*"), None)
    if library is None:
        answer("UCX's components", "this build of NIXL has no libuct beside it")
        return
    uct = ctypes.CDLL(str(library))
    found, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_uint()
    status = uct.uct_query_components(ctypes.byref(found), ctypes.byref(count))
    if status:
        answer("UCX's components", f"uct_query_components says {status}")
        return

    class Attributes(ctypes.Structure):
        # uct_component_attr_t: a mask of the fields that are asked for, then the name.
        _fields_ = [("field_mask", ctypes.c_uint64), ("name", ctypes.c_char * 16), ("rest", ctypes.c_byte * 256)]

    names = []
    for number in range(count.value):
        attributes = Attributes(field_mask=1)
        if not uct.uct_component_query(ctypes.c_void_p(found[number]), ctypes.byref(attributes)):
            names.append(attributes.name.decode())
    answer("UCX's components", ", ".join(names))
    answer("UCX knows cuda", any(name.startswith("cuda") for name in names))


def speeds() -> None:
    """The card's own copies, beside which everything else is to be read."""
    card = Card()
    answer("card", card.name())
    size = int(os.environ[SIZE]) * MIB
    for way in ("card to card", "card to host", "host to card"):
        answer(f"copy, {way}", round(card.speed(way, size), 1), "GB/s")


def asked(question: Callable[[], None]) -> None:
    """Answer a question, and end the process without what its libraries do at the exit.

    UCX's modules bring a libnl of their own, which may end a process with SIGSEGV while it is unloaded.
    """
    question()
    sys.stdout.flush()
    os._exit(0)


def main() -> int:
    """Each question in a process of its own, so that none changes what another finds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the card's own copies")
    arguments = parser.parse_args()
    os.environ[SIZE] = str(arguments.mib)
    context, failed = multiprocessing.get_context("spawn"), 0
    for question in (modules, components, speeds):
        process = context.Process(target=asked, args=(question,))
        process.start()
        process.join(40)
        if process.exitcode is None:
            process.kill()
        if process.exitcode != 0:
            answer(question.__name__, f"no answer, exit status {process.exitcode}")
            failed += 1
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
