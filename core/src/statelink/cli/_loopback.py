"""Moves bytes from one process of this machine to another. Each opens a link. This process checks what arrived."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

import statelink
from statelink import Status, state
from statelink._devices import allocate, family
from statelink.backend import Backend, Check, Verdict
from statelink.backend._interface import cannot_register
from statelink.config import read_options
from statelink.errors import StatelinkError
from statelink.wire import ENVIRONMENT

from ._alone import ended_with
from ._files import few_files, temporary_folder
from ._output import ended_by_signal

__all__ = ["Meant", "Transfer", "loopback", "unsuited"]

PAGES, TOKENS, MOVED = 64, 16, 48
SHAPE = (PAGES, TOKENS, 8, 512)
"""Shape of keys and of values: pages of 64 KiB."""
TRANSFER_SECONDS = 60.0
"""Seconds for the whole transfer, with the start of both processes."""
BUSY = "a busy machine may be the reason: run it again when the machine is quiet"
WHAT = "loopback transfer"
ROOMS = 3
"""Requests that are moved, all to the same pages. The fastest counts: the first one may connect the two."""
LEAST_GB_PER_SECOND = 2.0
"""Of memory of a card. Within a card or between two of a host, the slowest way that is none through the host has
several times as much; through TCP, it is 0.3 to 0.5."""


class Meant(NamedTuple):
    """Which memory the user wants the transfer to use on both sides.

    Attributes:
        kind: Kind of memory, such as ``cuda:0``; empty for host memory.
        allocator: Name of the function that allocates memory of a device, as ``module:name``. torch allocates it if
            this is empty. See `statelink._devices.allocate`.
    """

    kind: str = ""
    allocator: str = ""


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """A transfer that can be made.

    Attributes:
        backend: Name of the backend.
        options: Its options.
        require: Transports, one of which must carry the bytes; empty for any.
    """

    backend: str
    options: dict[str, Any]
    require: tuple[str, ...] = ()


def unsuited(kind: type[Backend], options: Mapping[str, Any], memory: Meant) -> Check | None:
    """Why no transfer can be made over a backend; ``None`` if one can."""
    declared, of = kind.capabilities, memory.kind or "dram"
    if not declared.moves("kv"):
        return Check(what=WHAT, verdict=Verdict.NOT_APPLICABLE, found="it does not move pages, which are moved here")
    parsed = read_options(kind.Options, options, f"options of backend {kind.name!r}")
    cause = cannot_register(kind, parsed, of)
    if not cause:
        return None
    found = f"memory of kind {of!r} would be moved: {cause}"
    if not memory.kind:
        hint = "--memory says what to move, such as cuda:0 or npu:0"
        return Check(what=WHAT, verdict=Verdict.NOT_APPLICABLE, found=found, hint=hint)
    kinds = [each for each in sorted(declared.memory_kinds) if not cannot_register(kind, parsed, each)]
    words = " or ".join(f"--memory {each if each == 'dram' else f'{each}:0'}" for each in kinds)
    return Check(what=WHAT, verdict=Verdict.PROBLEM, found=found, hint=words or "choose another backend")


def loopback(transfer: Transfer, memory: Meant, patience: float = TRANSFER_SECONDS) -> Check:
    """Move a request between two processes of this machine over a backend, and compare every byte.

    If none of the transports that are required carries the bytes, that is no problem: between two hosts, another
    transport may carry them.
    """
    of, seed = memory.kind or "dram", secrets.randbits(60)
    job = {**msgspec.to_builtins(transfer), "seed": seed, "memory": [of, memory.allocator]}
    try:
        with ended_by_signal(), temporary_folder("statelink-doctor-") as folder:
            said = _run(folder, job, patience)
            noise = _noise(folder)
    except StatelinkError as error:
        return Check(what=WHAT, verdict=Verdict.PROBLEM, found=error.reason.clause, hint=error.hint, code=error.code)
    hint = few_files() or said.get("hint") or "statelink conform runs every clause of the contract"
    if said.get("code") == "peer.transport":
        hint = "`statelink bench --peer` moves bytes between two hosts, where another transport may carry them"
        return Check(what=WHAT, verdict=Verdict.NOT_APPLICABLE, found=f"on one host: {said['clause']}", hint=hint)
    if "error" in said:
        found = f"{said['error']}{noise}"
        return Check(what=WHAT, verdict=Verdict.PROBLEM, found=found, hint=hint)
    if said["sha256"] != _digest(_arrived(seed)):
        found = "the request succeeded, and other bytes arrived than were sent"
        return Check(what=WHAT, verdict=Verdict.PROBLEM, found=found, hint=hint)
    speed = said["nbytes"] / said["seconds"] / 1e9
    moved = f"{said['nbytes'] >> 10} KiB of {of} in {said['seconds'] * 1e3:.0f} ms ({speed:.1f} GB/s), every byte right"
    found = f"{moved}; transport: {said['transport']}"
    if family(of) == "cuda" and speed < LEAST_GB_PER_SECOND:
        slow = f"{found}; below {LEAST_GB_PER_SECOND:g} GB/s, memory of a card is copied through the host"
        hint = "docs/gpu.md: how memory is allocated, CUDA's IPC in containers, and the transports that are left"
        return Check(what=WHAT, verdict=Verdict.PROBLEM, found=slow, hint=hint)
    return Check(what=WHAT, verdict=Verdict.OK, found=found)


def _run(folder: Path, job: dict[str, Any], patience: float) -> dict[str, Any]:
    """Run both processes, for ``patience`` seconds at most. Returns decode's answer, or a failure under ``error``."""
    until = time.monotonic() + patience
    with contextlib.ExitStack() as stack:
        prefill = stack.enter_context(_process(folder, "prefill", job))
        address = _answer(folder, "prefill", prefill, until, patience)
        if "error" in address:
            return address
        decode = stack.enter_context(_process(folder, "decode", {**job, "peer": address["address"]}))
        said = _answer(folder, "decode", decode, until, patience)
        if "error" in said:
            status = prefill.poll()
            if status:
                said["error"] = f"prefill ended with {ended_with(status)}; decode says: {said['error']}"
        else:
            for role, process in (("decode", decode), ("prefill", prefill)):
                assert process.stdin is not None
                process.stdin.close()
                try:
                    status = process.wait(max(1.0, until - time.monotonic()))
                except subprocess.TimeoutExpired:
                    found = f"the bytes arrived, and {role} did not end within {patience:g} seconds"
                    return {"error": found, "hint": BUSY}
                if status:
                    return {"error": f"the bytes arrived, and {role} ended with {ended_with(status)}"}
        return said


@contextlib.contextmanager
def _process(folder: Path, role: str, job: dict[str, Any]) -> Any:
    # On loopback, the links need no keys. Those of the environment need not allow each other.
    kept = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    environment = {**kept, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with open(folder / f"{role}.txt", "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import serve; serve()", role, str(folder), json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=environment,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()


def _answer(folder: Path, role: str, process: subprocess.Popen[bytes], until: float, patience: float) -> dict[str, Any]:
    """The answer that a process wrote to its file, or an ``error`` that says why it wrote none."""
    path = folder / f"{role}.json"
    while time.monotonic() < until:
        status = process.poll()  # read before the file, because the process may write the file last
        if path.exists():
            answer: dict[str, Any] = json.loads(path.read_text())
            return answer
        if status is not None:
            return {"error": f"{role} ended with {ended_with(status)}"}
        time.sleep(0.02)
    return {"error": f"{role} came to no end within {patience:g} seconds", "hint": BUSY}


def _noise(folder: Path) -> str:
    """The last lines that the processes printed. A library may say there why it failed."""
    lines = [
        line
        for role in ("prefill", "decode")
        if (folder / f"{role}.txt").exists()
        for line in (folder / f"{role}.txt").read_text(errors="replace").splitlines()
        if line.strip()
    ]
    return f"; printed: {' | '.join(lines[-4:])[-600:]}" if lines else ""


def _source(seed: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Keys and values, the request's pages on prefill, and its pages on decode."""
    rng = np.random.default_rng(seed)
    arrays = rng.integers(0, 256, (2, *SHAPE), dtype=np.uint8)
    return arrays, rng.permutation(PAGES)[:MOVED], rng.permutation(PAGES)[:MOVED]


def _arrived(seed: int) -> npt.NDArray[np.uint8]:
    """The whole memory of decode, as it must be at the end."""
    arrays, computed, allocated = _source(seed)
    target = np.zeros_like(arrays)
    target[:, allocated] = arrays[:, computed]
    return target


def _digest(arrays: npt.NDArray[np.uint8]) -> str:
    return hashlib.sha256(arrays.tobytes()).hexdigest()


# This part runs in a process of its own.


def serve() -> None:
    """Run one side. Writes its answer to a file, and runs until its standard input ends."""
    role, folder, job = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    try:
        said = _prefill(folder, job) if role == "prefill" else _decode(job)
    except StatelinkError as error:
        said = {
            "error": str(error).partition("\nhint:")[0],
            "hint": error.hint,
            "code": error.code,
            "clause": error.reason.clause,
        }
    if said:
        _say(folder, role, said)


def _say(folder: Path, role: str, said: dict[str, Any]) -> None:
    path = folder / f"{role}.part"
    path.write_text(json.dumps(said))
    path.rename(folder / f"{role}.json")


class _Pages:
    """Keys and values, on the host or on a device. They are freed with this object."""

    def __init__(self, job: dict[str, Any], arrays: npt.NDArray[np.uint8]) -> None:
        kind, allocator = job["memory"]
        self._arrays = arrays
        self._device = None if kind == "dram" else allocate(kind, arrays.nbytes, allocator)
        address = int(arrays.ctypes.data)
        if self._device is not None:
            self._device.write(0, arrays)
            address = self._device.address
        self.described = [
            state.Memory.pointer(address + at, SHAPE, "uint8", 1, kind=kind) for at in (0, arrays[0].nbytes)
        ]

    def read(self) -> npt.NDArray[np.uint8]:
        """Their current bytes."""
        if self._device is not None:
            self._device.read(0, self._arrays)
        return self._arrays


def _open(role: str, job: dict[str, Any], pages: _Pages) -> statelink.Link:
    config = {"role": role, "inspect": False, **{key: job[key] for key in ("backend", "options", "require")}}
    keys, values = pages.described
    inventory = state.describe(f"doctor-{role}", [state.kv_pages({0: (keys, values)}, heads=8)])
    return statelink.open(config, inventory)


def _prefill(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    arrays, computed, _ = _source(job["seed"])
    pages = _Pages(job, arrays)
    with _open("prefill", job, pages) as link:
        for room in range(1, ROOMS + 1):
            sending = link.send(room, MOVED * TOKENS, deadline=TRANSFER_SECONDS)
            sending.push({"kv": computed})
        _say(folder, "prefill", {"address": link.address})
        sys.stdin.read()
    return {}


def _decode(job: dict[str, Any]) -> dict[str, Any]:
    _, _, allocated = _source(job["seed"])
    pages = _Pages(job, np.zeros((2, *SHAPE), np.uint8))
    with _open("decode", job, pages) as link:
        seconds: list[float] = []
        for room in range(1, ROOMS + 1):
            items = {"kv": allocated}
            receiving = link.receive(room, job["peer"], MOVED * TOKENS, items, deadline=TRANSFER_SECONDS / 2)
            if receiving.wait(TRANSFER_SECONDS) is not Status.SUCCEEDED:
                receiving.check()
                raise StatelinkError("the request did not end")
            report = receiving.report
            seconds.append(report.transferred)
        return {
            "sha256": _digest(pages.read()),
            "transport": ", ".join(report.transports.values()) or "unknown",
            "nbytes": sum(moved.nbytes for moved in report.moved.values()),
            "seconds": min(seconds),
        }
