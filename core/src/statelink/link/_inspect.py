"""A Unix socket on which a link tells its own user what it is doing. Read-only: the link never reads from it.

The socket is ``PID-incarnation.sock`` in a directory that only the user can enter: ``$XDG_RUNTIME_DIR/statelink``, or
``/tmp/statelink-UID``. A client that connects gets one snapshot as JSON; then the link ends the stream. A thread of its
own answers, so that no client delays the link.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from statelink._json import decode_json
from statelink._logs import logger
from statelink.backend import close_in_children

__all__ = ["Inspection", "ask", "folders", "sockets"]

log = logger("statelink.link")

CLIENT_SECONDS = 2.0
"""Seconds that a client may take to read the answer. Other clients wait meanwhile; the link does not."""
PAUSE_SECONDS = 0.1
"""Seconds to wait after a client could not be accepted, as where the process has no file descriptor left."""
MOST_ANSWER_BYTES = 16 << 20


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
