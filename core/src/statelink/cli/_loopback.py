"""Moves bytes from one process of this machine to another. Each opens a link. This process checks what arrived."""

from __future__ import annotations

import hashlib
import secrets
import subprocess
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

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
from statelink.testing.process import Process, ProcessError
from statelink.wire import ENVIRONMENT

from ._alone import ended_with
from ._files import FolderError, few_files, temporary_folder
from ._output import ended_by_signal

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Meant", "Transfer", "loopback", "unsuited"]

PAGES, TOKENS, MOVED = 64, 16, 48
SHAPE = (PAGES, TOKENS, 8, 512)
"""Shape of keys and of values: pages of 64 KiB."""
TRANSFER_SECONDS = 60.0
"""Seconds for the whole transfer, with the start of both processes."""
BUSY = "a busy machine may be the reason: run it again when the machine is quiet"
CLAUSES = "statelink conform runs every clause of the contract"
STACKS = "Fatal Python error: "
"""After this, Python prints the stacks of a process that crashes."""
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


class _Job(NamedTuple):
    """What both sides are given. ``seed`` makes the bytes that are moved."""

    transfer: Transfer
    memory: Meant
    seed: int


class _Moved(NamedTuple):
    """What decode found: the digest of its memory, and of a request the transports, the bytes and the seconds."""

    sha256: str
    transport: str
    nbytes: int
    seconds: float


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
    job = _Job(transfer, memory, secrets.randbits(60))
    try:
        with ended_by_signal(), temporary_folder("statelink-doctor-") as folder:
            try:
                moved = _run(folder, job, patience)
            except StatelinkError as error:
                return _failed(error, _noise(folder))
    except FolderError as error:
        return Check(what=WHAT, verdict=Verdict.PROBLEM, found=error.reason.clause, hint=error.hint, code=error.code)
    if moved.sha256 != _digest(_arrived(job.seed)):
        found = "the request succeeded, and other bytes arrived than were sent"
        return Check(what=WHAT, verdict=Verdict.PROBLEM, found=found, hint=few_files() or CLAUSES)
    of = memory.kind or "dram"
    speed = moved.nbytes / moved.seconds / 1e9
    found = f"{moved.nbytes >> 10} KiB of {of} in {moved.seconds * 1e3:.0f} ms ({speed:.1f} GB/s), every byte right"
    found = f"{found}; transport: {moved.transport}"
    if family(of) == "cuda" and speed < LEAST_GB_PER_SECOND:
        slow = f"{found}; below {LEAST_GB_PER_SECOND:g} GB/s, memory of a card is copied through the host"
        hint = "docs/gpu.md: how memory is allocated, CUDA's IPC in containers, and the transports that are left"
        return Check(what=WHAT, verdict=Verdict.PROBLEM, found=slow, hint=hint)
    return Check(what=WHAT, verdict=Verdict.OK, found=found)


def _failed(error: StatelinkError, noise: str) -> Check:
    """Why nothing was moved."""
    if error.code == "peer.transport":
        hint = "`statelink bench --peer` moves bytes between two hosts, where another transport may carry them"
        found = f"on one host: {error.reason.clause}"
        return Check(what=WHAT, verdict=Verdict.NOT_APPLICABLE, found=found, hint=hint)
    found = f"{_words(error)}{noise}"
    return Check(what=WHAT, verdict=Verdict.PROBLEM, found=found, hint=few_files() or error.hint or CLAUSES)


def _words(error: StatelinkError) -> str:
    return str(error).partition("\nhint:")[0]


def _run(folder: Path, job: _Job, patience: float) -> _Moved:
    """Run both processes, for ``patience`` seconds at most.

    Raises:
        StatelinkError: A side failed, ended, or took too long.
    """
    until = time.monotonic() + patience
    with _process(folder, "prefill", job) as prefill:
        prefill.start(_Side.send)
        address = _result(prefill, until, patience)
        with _process(folder, "decode", job) as decode:
            decode.start(_Side.receive, address)
            try:
                moved: _Moved = _result(decode, until, patience)
            except StatelinkError as error:
                if status := prefill.popen.poll():
                    what = f"prefill ended with {ended_with(status)}; decode says: {_words(error)}"
                    raise StatelinkError(what, hint=error.hint) from error
                raise
            for process in (decode, prefill):
                process.dismiss()
                try:
                    status = process.popen.wait(max(1.0, until - time.monotonic()))
                except subprocess.TimeoutExpired:
                    what = f"the bytes arrived, and {process.name} did not end within {patience:g} seconds"
                    raise StatelinkError(what, hint=BUSY) from None
                if status:
                    raise StatelinkError(f"the bytes arrived, and {process.name} ended with {ended_with(status)}")
    return moved


def _process(folder: Path, role: str, job: _Job) -> Process[_Side]:
    # On loopback, the links need no keys. Those of the environment need not allow each other.
    environment = dict.fromkeys(ENVIRONMENT)
    with open(folder / role, "wb") as output:
        return Process(partial(_Side, role, job), name=role, environment=environment, output=output)


def _result(process: Process[_Side], until: float, patience: float) -> Any:
    """What a side found, or a `StatelinkError` that says why it found nothing."""
    while time.monotonic() < until:
        if not process.returns(0.1):
            continue
        try:
            return process.result()
        except ProcessError as error:
            raise StatelinkError(f"{process.name} ended with {ended_with(process.popen.wait())}") from error
        except StatelinkError:
            raise
        except Exception as error:
            raise StatelinkError(f"{process.name} failed: {type(error).__name__}: {error}") from error
    raise StatelinkError(f"{process.name} came to no end within {patience:g} seconds", hint=BUSY)


def _noise(folder: Path) -> str:
    """The last lines that the processes printed. A library may say there why it failed."""
    printed = [path.read_text(errors="replace") for path in sorted(folder.iterdir(), reverse=True)]
    # The stacks that follow are those of this module.
    lines = [line for each in printed for line in each.partition(STACKS)[0].splitlines() if line.strip()]
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


class _Pages:
    """Keys and values, on the host or on a device. They are freed with this object."""

    def __init__(self, memory: Meant, arrays: npt.NDArray[np.uint8]) -> None:
        kind = memory.kind or "dram"
        self._arrays = arrays
        self._device = None if kind == "dram" else allocate(kind, arrays.nbytes, memory.allocator)
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


class _Side:
    """A side with its open link."""

    def __init__(self, role: str, job: _Job) -> None:
        arrays, self._computed, self._allocated = _source(job.seed)
        self._pages = _Pages(job.memory, arrays if role == "prefill" else np.zeros_like(arrays))
        keys, values = self._pages.described
        inventory = state.describe(f"doctor-{role}", [state.kv_pages({0: (keys, values)}, heads=8)])
        config = {"role": role, "inspect": False, **msgspec.to_builtins(job.transfer)}
        self._link = statelink.open(config, inventory)

    def send(self) -> str:
        """Send the requests. Returns the link's address."""
        for room in range(1, ROOMS + 1):
            sending = self._link.send(room, MOVED * TOKENS, deadline=TRANSFER_SECONDS)
            sending.push({"kv": self._computed})
        return self._link.address

    def receive(self, peer: str) -> _Moved:
        """Receive them, one after the other."""
        seconds: list[float] = []
        for room in range(1, ROOMS + 1):
            items = {"kv": self._allocated}
            receiving = self._link.receive(room, peer, MOVED * TOKENS, items, deadline=TRANSFER_SECONDS / 2)
            if receiving.wait(TRANSFER_SECONDS) is not Status.SUCCEEDED:
                receiving.check()
                raise StatelinkError("the request did not end")
            report = receiving.report
            seconds.append(report.transferred)
        transport = ", ".join(report.transports.values()) or "unknown"
        nbytes = sum(moved.nbytes for moved in report.moved.values())
        return _Moved(_digest(self._pages.read()), transport, nbytes, min(seconds))

    def close(self) -> None:
        """Close the link, at the end of the process."""
        self._link.close()
