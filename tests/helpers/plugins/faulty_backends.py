"""Backends that work like another one until they are told to fail; found as any installed package's are.

A process is told by calls of `plan` and `heal`, or, if it is an engine's, by a file: see `ORDERS`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fnmatch
import json
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from statelink.backend import Backend, BackendContext, Batch, Probe, Side, Transfer
from statelink.errors import TransferError
from statelink.registry import load_backend

if TYPE_CHECKING:
    from statelink.state import Region


ORDERS = "STATELINK_FAULTS"
"""A variable that names a folder. A file there has a call of `plan` or `heal` as JSON: a list of its name and its
arguments. Its own name is a pattern. A process that has a link with a name of this pattern takes the file away, and
makes the call. What then happens to calls of the backend stands in a file with the link's name and the ending
``.struck``."""
BLOCKED_SECONDS = 30.0
"""Seconds for which a call is blocked at most."""


class Fault(NamedTuple):
    """What happens to some calls of one method.

    Attributes:
        call: The method; or ``flip``, a submission whose bytes are not those of the source.
        what: See `Faulty._strike`; for ``flip`` the block of which a byte is another.
        skip: Calls that go well before.
        times: Calls that it happens to.
        peer: A pattern of names of links. Only calls that concern such a peer are looked at.
    """

    call: str
    what: str
    skip: int
    times: int
    peer: str


_faults: deque[Fault] = deque()
_hanging: list[Transfer] = []
_gate = threading.Event()
_struck: Counter[str] = Counter()
_links: list[str] = []


def plan(call: str, what: str, skip: int = 0, times: int = 1, peer: str = "*") -> None:
    """Let something happen in this process."""
    _gate.clear()
    _faults.append(Fault(call, what, skip, times, peer))


def heal() -> None:
    """Nothing happens any more; what hangs or waits goes on."""
    _faults.clear()
    _struck.clear()
    _gate.set()
    for transfer in _hanging:
        if transfer.outcome is None:
            transfer.fail("it hung, and ended", settled=True)
    _hanging.clear()


def struck(what: str) -> int:
    """How often something happened."""
    return _struck[what]


def _obey() -> None:
    """Do what the files for this process say. Any thread: only one of them can take a file away."""
    for file in Path(os.environ[ORDERS]).iterdir() if ORDERS in os.environ else ():
        if any(fnmatch.fnmatch(link, file.name) for link in _links):
            with contextlib.suppress(FileNotFoundError):
                name, *arguments = json.loads(file.replace(file.with_name(f"{file.name}.taken")).read_text())
                if name == "plan":
                    plan(*arguments)
                else:
                    heal()


def _due(call: str, peer: str = "") -> str:
    _obey()
    what = _planned(call, peer)
    if what and ORDERS in os.environ:
        for link in _links:
            with Path(os.environ[ORDERS], f"{link}.struck").open("a") as struck:
                struck.write(f"{what}\n")
    return what


def _planned(call: str, peer: str) -> str:
    for number, fault in enumerate(_faults):
        if fault.call != call or not fnmatch.fnmatch(peer, fault.peer):
            continue
        if fault.skip:
            _faults[number] = fault._replace(skip=fault.skip - 1)
            return ""
        if fault.times:
            _faults[number] = fault._replace(times=fault.times - 1)
            _struck[fault.what] += 1
            return fault.what
    return ""


class Faulty(Backend):
    """The part that is laid over a real backend."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)  # type: ignore[safe-super]
        _links.append(context.link)

    def register(self, regions: Sequence[Region]) -> None:
        self._strike("register")
        super().register(regions)  # type: ignore[safe-super]

    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        self._strike("connect", peer)
        super().connect(peer, descriptor, regions)  # type: ignore[safe-super]

    def submit(self, peer: str, batch: Batch) -> Transfer:
        flipped = _due("flip", peer)
        if flipped:
            return self._flip(peer, batch, int(flipped) % batch.blocks.count)
        return self._strike("submit", peer) or super().submit(peer, batch)  # type: ignore[safe-super]

    def _flip(self, peer: str, batch: Batch, block: int) -> Transfer:
        """Another byte than the source's is on its way: the source is as it was before anybody can look."""
        at = int(batch.blocks.source[block]) + int(batch.blocks.nbytes[block]) // 2
        byte = ctypes.c_ubyte.from_address(at)
        byte.value ^= 0x10
        transfer = super().submit(peer, batch)  # type: ignore[safe-super]
        while transfer.outcome is None:
            super().poll([transfer])  # type: ignore[safe-super]
        byte.value ^= 0x10
        return transfer

    def poll(self, transfers: Sequence[Transfer]) -> None:
        self._strike("poll")
        super().poll([each for each in transfers if each not in _hanging])  # type: ignore[safe-super]

    @classmethod
    def probe(cls, options: Any) -> Probe:
        what = _due("probe")
        if what:
            return Probe(ok=False, reason=what, hint="plug it in")
        return super().probe(options)

    def _strike(self, call: str, peer: str = "") -> Transfer | None:
        """What happens to a call, if anything is due: a transfer of its own, or an error, or a delay."""
        match _due(call, peer):
            case "":
                return None
            case "refuse":
                raise TransferError("the transport refused", cause="ENOBUFS")
            case "defect":
                raise ZeroDivisionError("a defect of this backend")
            case "fail" | "lose" | "stray" as what:
                settled: dict[str, bool | Side] = {"fail": True, "lose": False, "stray": Side.SOURCE}
                failed = Transfer()
                failed.fail("the transport failed: EIO", settled=settled[what])
                return failed
            case "hang":
                _hanging.append(Transfer())
                return _hanging[-1]
            case "block":
                until = time.monotonic() + BLOCKED_SECONDS
                while not _gate.wait(0.05) and time.monotonic() < until:
                    _obey()
            case "slow":
                time.sleep(0.05)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case what:
                raise AssertionError(f"there is no fault {what!r}")
        return None


class FaultyFence(Faulty):
    """The same over a backend whose memory's owner can stop what comes."""

    def grant(self, peer: str, *arguments: Any) -> None:
        self._strike("grant", peer)
        super().grant(peer, *arguments)  # type: ignore[misc]

    def revoke(self, peer: str, *arguments: Any) -> Transfer:
        return self._strike("revoke", peer) or super().revoke(peer, *arguments)  # type: ignore[misc]


def __getattr__(name: str) -> type[Backend]:
    """Backends whose library is imported when they are picked."""
    if name == "Narrow":
        real = load_backend("tcp")
        declared = dataclasses.replace(real.capabilities, state_types=frozenset({"kv", "aux"}))
        narrow = {
            "name": "narrow",
            "capabilities": declared,
            "strategies": {each: real.strategies["*"] for each in declared.state_types},
        }
        return type("Narrow", (real,), narrow)
    if name not in ("Tcp", "Nixl", "Mooncake"):
        raise AttributeError(name)
    real = load_backend(name.lower())
    blocks: dict[str, Any] = {"ends_unpolled": False, "prompt_fences": False, "prompt_bytes": 0}  # any call may block
    attributes: dict[str, Any] = {
        "name": f"faulty-{name.lower()}",
        "capabilities": dataclasses.replace(real.capabilities, **blocks),
    }
    return type(name, (FaultyFence if hasattr(real, "revoke") else Faulty, real), attributes)
