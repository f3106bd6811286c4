"""What a link is doing, as plain values, and a Unix socket on which it tells its own user that.

The values are bounded, and nothing blocks to find them. The socket is ``PID-incarnation.sock`` in a directory that only
the user can enter: ``$XDG_RUNTIME_DIR/statelink``, or ``/tmp/statelink-UID``. A client that connects gets one snapshot
as JSON; then the link ends the stream, from which it never reads. A thread of its own answers, so that no client delays
the link.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from statelink._json import decode_json
from statelink._logs import logger
from statelink.backend import close_in_children

from ._reasons import seconds_since
from ._status import ENDED, Status

if TYPE_CHECKING:
    from statelink.backend import Strategy

    from ._context import Context
    from ._control import Control, Role
    from ._room_state import RoomState
    from ._room_table import RoomTable

__all__ = ["MOST_LISTED", "Inspection", "ask", "folders", "snapshot", "sockets"]

log = logger("statelink.link")

CLIENT_SECONDS = 2.0
"""Seconds that a client may take to read the answer. Other clients wait meanwhile; the link does not."""
PAUSE_SECONDS = 0.1
"""Seconds to wait after a client could not be accepted, as where the process has no file descriptor left."""
MOST_ANSWER_BYTES = 16 << 20

MOST_LISTED = 64
"""Most rooms, and most ranks, that are listed one by one; the counts have all of them."""

NOT_QUIESCED = "proof that nothing writes to or reads its memory"


def folders() -> list[Path]:
    """Where sockets may be, the preferred one first."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    shared = Path("/tmp") / f"statelink-{os.getuid()}"
    return [Path(runtime) / "statelink", shared] if runtime else [shared]


def sockets() -> list[Path]:
    """Sockets of this user's links on this machine. Removes sockets on which no process listens."""
    found = []
    for folder in folders():
        if not _private(folder):
            continue
        for path in sorted(folder.glob("*.sock")):
            if _answers(path):
                found.append(path)
            else:
                with contextlib.suppress(OSError):
                    path.unlink()
    return found


def ask(path: Path) -> dict[str, Any]:
    """The snapshot that a link gives.

    Raises:
        OSError: No process listens there, or the answer does not come or end in time.
        ValueError: The answer is not a snapshot.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(2 * CLIENT_SECONDS)
        asking.connect(str(path))
        parts, nbytes = [], 0
        while part := asking.recv(1 << 16):
            parts.append(part)
            nbytes += len(part)
            if nbytes > MOST_ANSWER_BYTES:
                raise ValueError(f"{path} answers more than {MOST_ANSWER_BYTES} bytes")
    return decode_json(b"".join(parts), dict[str, Any])


class Inspection:
    """The socket of one link, and the thread that answers on it, after `start`.

    Args:
        link: The link's name.
        look: Takes a snapshot; called on that thread.
    """

    def __init__(self, link: str, look: Callable[[], dict[str, Any]]) -> None:
        self._look = look
        self._path: Path | None = None
        name = f"{os.getpid()}-{link.rpartition('-')[2]}"
        self._thread = threading.Thread(target=self._serve, name="statelink-inspect", daemon=True)
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        for folder in folders():
            try:
                self._listen(folder, name)
                break
            except OSError as error:
                log.debug("no socket for statelink inspect in %s: %s", folder, error)
        else:
            self._listening.close()

    def start(self) -> None:
        """Start the thread."""
        if self._path is not None:
            try:
                self._thread.start()
            except RuntimeError as error:  # the system has no thread left
                log.warning("nobody answers statelink inspect: %s", error)
                self.close()

    def _listen(self, folder: Path, name: str) -> None:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        if not _private(folder):
            raise PermissionError(f"{folder} is not this user's alone")
        for path in folder.glob("*.sock"):
            if not _alive(path) and not _answers(path):
                path.unlink(missing_ok=True)
        # Listen first, then rename: other processes remove a socket under its final name if no process listens on it.
        early = folder / f".{name}"
        try:
            self._listening.bind(str(early))
            early.chmod(0o600)
            self._listening.listen(8)
            close_in_children(self._listening)
            self._path = folder / f"{name}.sock"
            early.rename(self._path)
        except BaseException:
            early.unlink(missing_ok=True)
            self._remove()
            raise

    def _serve(self) -> None:
        while True:
            try:
                asking, _ = self._listening.accept()
            except OSError as error:
                if self._path is None:
                    return  # closed
                log.debug("statelink inspect cannot be answered: %s", error)
                time.sleep(PAUSE_SECONDS)
                continue
            with asking, contextlib.suppress(OSError):
                asking.settimeout(CLIENT_SECONDS)
                try:
                    answer = msgspec.json.encode(self._look())
                except BaseException:
                    log.exception("a snapshot failed")
                    continue
                asking.sendall(answer)

    def _remove(self) -> bool:
        """Remove the socket from its folder. Returns whether it was there."""
        path, self._path = self._path, None
        if path is not None:
            path.unlink(missing_ok=True)
        return path is not None

    def close(self) -> None:
        """Remove the socket and end the thread."""
        if not self._remove():
            return
        if self._thread.is_alive():
            with contextlib.suppress(OSError):
                self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread
            self._thread.join(2 * CLIENT_SECONDS)
        self._listening.close()


def _private(folder: Path) -> bool:
    """Whether a directory belongs to this user, and nobody else can get into it."""
    try:
        seen = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.getuid() and not seen.st_mode & 0o077


def _alive(path: Path) -> bool:
    """Whether the process that a socket is named after runs, as far as this one can see."""
    try:
        os.kill(int(path.name.partition("-")[0]), 0)
    except (ValueError, OverflowError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


def _answers(path: Path) -> bool:
    """Whether a process listens there, even if it is too busy to accept."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        try:
            asking.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True


def snapshot(context: Context, table: RoomTable, control: Control) -> dict[str, Any]:
    """Peers, rooms, memory and queues of a link. Callable from any thread."""
    now = context.now()
    rooms = [state for state, _ in table.all()]
    held, quarantined = _held(rooms)
    ranks = [rank for role in control.roles for rank in role.ranks(now)]
    load = {name: count for role in control.roles for name, count in role.load().items()}
    busy = sorted((room for room in rooms if not room.over), key=lambda room: room.opened)
    return {
        "link": context.name,
        "address": str(context.channel.endpoint),
        "role": context.config.role,
        "backend": context.backend.name,
        "suspended": table.is_shut,
        "rejected": dict(context.rejected),
        "require": list(context.config.require),
        "instance": context.inventory.instance,
        "rank": context.inventory.rank,
        "memory": {kind: dict(known) for kind, known in context.memory.items()},
        "peers": _peers(control.roles),
        "ranks": ranks[:MOST_LISTED],
        "rooms": {status.name.lower(): sum(room.status is status for room in rooms) for status in Status},
        "oldest": [_room(room, now) for room in busy[:MOST_LISTED]],
        "quarantined": sorted(room.room for room in rooms if room.status is Status.FAILED and not room.memory.quiesced),
        "taken_back": [room.room for room in table.unproven()[-MOST_LISTED:]],
        "quarantined_bytes": dict(quarantined),
        "held_bytes": dict(held),
        "strategies": _strategies(context.strategies.values()),
        "switch_interval": sys.getswitchinterval(),
        "totals": table.totals.snapshot(),
        "load": {**table.load(), **context.workers.waiting(), **load},
        "dropped_frames": dict(context.channel.dropped),
        "refused_keys": context.channel.refused,
    }


def _peers(roles: Iterable[Role]) -> dict[str, str]:
    """The state of each peer. One that a link of both roles knows in both has both states, under its link name."""
    found: dict[str, str] = {}
    for role in roles:
        for name, (state, ranks) in role.snapshot().items():
            known = bool(ranks) and all(rank in found for rank in ranks)
            for each in ranks if known else [name]:
                found[each] = f"{found[each]}, {state}" if each in found else state
    return found


def _strategies(strategies: Iterable[Strategy]) -> dict[str, dict[str, int]]:
    """The numbers of strategies, by name. Those of strategies that have one name are added up."""
    found: dict[str, dict[str, int]] = {}
    # By identity, because equal strategies may be different objects.
    for strategy in {id(each): each for each in strategies}.values():
        for what, number in strategy.snapshot().items():
            numbers = found.setdefault(strategy.name, {})
            numbers[what] = numbers.get(what, 0) + number
    return found


def _room(room: RoomState, now: float) -> dict[str, Any]:
    return {
        "room": room.room,
        "role": room.role,
        "status": room.status.name.lower(),
        "age": seconds_since(room.opened, now),
        "waits_for": room.waits_for() if room.status not in ENDED else NOT_QUIESCED,
        "holds": not room.memory.quiesced,
        "reason": "" if room.reason is None else room.reason.code,
    }


def _held(rooms: list[RoomState]) -> tuple[Counter[str], Counter[str]]:
    """Bytes of rooms that are not quiesced, by status. Then those of failed rooms, by what they wait for."""
    held: Counter[str] = Counter()
    quarantined: Counter[str] = Counter()
    for room in rooms:
        if not room.memory.quiesced:
            nbytes, why = room.held()
            if room.status is Status.FAILED:
                quarantined[why] += nbytes
            else:
                held[room.status.name.lower()] += nbytes
    return held, quarantined
