"""What decode knows of prefill servers: where their ranks are, and whether they were restarted.

SGLang asks from the scheduler's thread, which must not block. So a thread of this module asks the bootstrap servers,
and the scheduler reads a table.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from statelink.backend import logger

from ._http import Found, ask

__all__ = ["Directory", "Instance", "Prefill"]

log = logger("statelink.sglang")

INTERVAL_SECONDS = 1.0
"""Seconds between two questions to a server."""
ANSWER_SECONDS = 2.0
"""Seconds that a server may take for an answer."""
MISSES = 3
"""Unanswered questions after which a server counts as gone."""
ASKED_AT_ONCE = 128
"""Most servers that are asked at one time. Requests may name many that do not answer, and these delay the others."""
FORGET = 60
"""Unanswered questions after which nobody asks any more, until a request names the server again."""


class Instance:
    """One DP rank of one start of a prefill server.

    Attributes:
        name: Its name. It is another one after each start of the server.
        addresses: Where its ranks' links listen.
        gone: Why it is not there any more; empty while it is.
    """

    def __init__(self, name: str, addresses: tuple[str, ...]) -> None:
        self.name = name
        self.addresses = addresses
        self.gone = ""


class Prefill:
    """A prefill server. What SGLang reads of it is `dp_size` and `follow_bootstrap_room`.

    Attributes:
        instances: One for each DP rank.
        http_port: Where it takes requests.
        follow_bootstrap_room: Whether the room of a request says which DP rank has it.
    """

    def __init__(self, instances: tuple[Instance, ...], http_port: int = 0, follows: bool = True) -> None:
        self.instances = instances
        self.http_port = http_port
        self.follow_bootstrap_room = follows

    @property
    def dp_size(self) -> int:
        """DP ranks of the server."""
        return len(self.instances)

    @property
    def gone(self) -> str:
        """Why a DP rank is not there any more; empty while all are."""
        return next((each.gone for each in self.instances if each.gone), "")


class Directory:
    """Asks the bootstrap servers that requests name.

    `table` is what SGLang's schedulers read as ``prefill_info_table``: only servers that can be used are in it. The
    threads of this class write it; each access is a single operation on a dict.

    Args:
        interval: Seconds between two questions to a server.
        allow: Public keys that the links of prefill's ranks may have; ``None`` if they may have none.
    """

    def __init__(self, interval: float = INTERVAL_SECONDS, allow: frozenset[str] | None = None) -> None:
        self._interval, self._allow = interval, allow
        self.table: dict[str, Prefill] = {}
        self._misses: dict[str, int] = {}
        self._why: dict[str, str] = {}
        self._known: dict[str, Prefill] = {}
        self._asking: set[str] = set()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._pool = ThreadPoolExecutor(ASKED_AT_ONCE, thread_name_prefix="statelink-directory")
        self._thread = threading.Thread(target=self._watch, name="statelink-directory", daemon=True)
        self._thread.start()

    def find(self, address: str) -> Prefill | None:
        """The server at ``address``, if it is known by now. If not, it is asked. Does not block. Scheduler's thread."""
        with self._lock:
            if address not in self._misses or self._misses[address] >= MISSES:
                self._misses[address] = min(self._misses.get(address, 0), MISSES)
                self._wake.set()
        return self.table.get(address)

    def why(self, address: str) -> str:
        """Why the server at ``address`` is not known; empty if nobody asked yet."""
        return self._why.get(address, "")

    def close(self) -> None:
        """Stop asking. Does not wait for answers."""
        self._closed = True
        self._wake.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _watch(self) -> None:
        """Runs on a thread of its own."""
        while not self._closed:
            with self._lock:
                due = [address for address in self._misses if address not in self._asking]
                self._asking.update(due)
            for address in due:
                try:
                    self._pool.submit(self._ask, address)
                except RuntimeError:  # it was closed
                    return
            self._wake.wait(self._interval)
            self._wake.clear()

    def _ask(self, address: str) -> None:
        """Runs on a thread of the pool."""
        try:
            found = ask(address, ANSWER_SECONDS, self._allow)
        except (OSError, ValueError) as error:
            self._missed(address, str(error) or type(error).__name__)
        except Exception as error:  # a defect here must not end the questions
            log.exception("asking the bootstrap server at %s", address)
            self._missed(address, f"{type(error).__name__}: {error}")
        else:
            self._answered(address, found)
        finally:
            with self._lock:
                self._asking.discard(address)

    def _answered(self, address: str, found: Found) -> None:
        with self._lock:
            known = self._known.get(address)
            before = () if known is None else known.instances
            same = {(each.name, each.addresses): each for each in before}
            instances = tuple(same.get(each) or Instance(*each) for each in found.instances)
            for each in before:
                if each not in instances:
                    each.gone = f"the prefill server at {address} was started anew, or has opened its links anew"
            for each in instances:
                each.gone = ""
            if known is None or (instances, known.http_port, known.follow_bootstrap_room) != (before, *found[1:]):
                known = self._known[address] = Prefill(instances, found.http_port, found.follows)
            self._misses[address] = 0
            self._why.pop(address, None)
            self.table[address] = known

    def _missed(self, address: str, why: str) -> None:
        with self._lock:
            misses = self._misses[address] = self._misses.get(address, 0) + 1
            self._why[address] = why
            known = self._known.get(address)
            if misses >= MISSES and known is not None:
                for each in known.instances:
                    each.gone = each.gone or f"the prefill server at {address} does not answer: {why}"
                self.table.pop(address, None)
            if misses >= FORGET:
                del self._misses[address]
                self._why.pop(address, None)
                self._known.pop(address, None)
