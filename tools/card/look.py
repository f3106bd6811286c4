"""Which card, driver and torch there are; whether UCX knows CUDA; and how fast the card copies.

python -m tools.card.look [--mib 256]
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.metadata
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import statelink
from statelink import state
from statelink.errors import StatelinkError

from .device import Card, cuda_torch
from .say import answer

MIB = 1 << 20
SIZE = "STATELINK_GPU_MIB"
"""The variable that tells the process which measures copies how large they are."""


def software() -> None:
    """Names and versions."""
    answer("kernel", platform.release())
    answer("python", f"{platform.python_version()} {sys.executable}")
    for name in ("nixl", "nixl-cu13", "nixl-cu12", "torch", "numpy", "statelink"):
        try:
            answer(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            answer(name, "not installed")
    torch = cuda_torch()
    answer("torch reaches a card", torch is not None)
    if torch is not None:
        answer("CUDA of torch", str(torch.version.cuda))
    if shutil.which("nvidia-smi"):
        asked = "--query-gpu=name,driver_version,memory.total,memory.used,pcie.link.gen.current,mig.mode.current"
        command = ["nvidia-smi", asked, "--format=csv,noheader"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        answer("nvidia-smi", (said.stdout or said.stderr).strip())
    else:
        answer("nvidia-smi", "not on PATH")
    cards = [path.parent.name for path in Path("/sys/bus/pci/devices").glob("*/vendor") if nvidia(path)]
    answer("NVIDIA devices in sysfs", ", ".join(cards) or "none")
    modules = [name for name in ("nvidia_peermem", "gdrdrv", "nvidia_uvm") if Path("/sys/module", name).exists()]
    answer("kernel modules", ", ".join(modules) or "none of nvidia_peermem, gdrdrv, nvidia_uvm")


def nvidia(vendor: Path) -> bool:
    """Whether a device of the PCI bus is of NVIDIA."""
    try:
        return vendor.read_text().strip() == "0x10de"
    except OSError:
        return False


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


def without_cuda() -> None:
    """Whether NIXL takes a UCX_TLS that names no transport for CUDA, with host memory alone."""
    for tls in ("tcp", "tcp,cuda_copy"):
        array = np.zeros((4, 16, 8, 32), np.float32)
        inventory = state.describe("look", [state.kv_pages({0: (array, array.copy())}, heads=8)], model="look")
        config = {"role": "decode", "backend": "nixl", "options": {"ucx": {"TLS": tls}}}
        try:
            with statelink.open(config, inventory):
                answer(f"host memory with UCX_TLS={tls}", "opened")
        except StatelinkError as error:
            answer(f"host memory with UCX_TLS={tls}", str(error))


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
    for question in (modules, components, speeds, without_cuda, software):
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
