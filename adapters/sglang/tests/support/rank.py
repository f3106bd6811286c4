"""One rank in a process of its own: real pools, a real manager, and requests that a test drives step by step."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from .sides import FAILED, SUCCESS, Lists, Memory, announcing

if TYPE_CHECKING:
    import numpy.typing as npt

    from .connectors import Classes
    from .pools import Made

PAUSE = 0.001


class Rank(Memory):
    """Requests of one rank, by room.

    Args:
        role: ``prefill`` or ``decode``.
        connector: See `support.connectors.CONNECTORS`.
        published: What `support.connectors.publish` returned.
        made: The pools.
        where: Host and port of the bootstrap server. Prefill starts it.
        spoil: What is wrong with `KVArgs`: a name of a function in `support.spoiled`.
        timeouts: The adapter's, if they are to be others than SGLang's.
    """

    def __init__(
        self,
        role: str,
        connector: str,
        published: tuple[Any, Classes],
        made: Made,
        where: tuple[str, int],
        spoil: str = "",
        timeouts: tuple[float, ...] = (),
    ) -> None:
        from . import connectors, spoiled

        given, self.classes = published
        self.role, self.made = role, made
        made.kv_args.page_size_of_pool = made.pools.pages.page_size
        if spoil:
            getattr(spoiled, spoil)(made.kv_args)
        self.address = f"{where[0]}:{where[1]}"
        server: Any = self.classes.server(*where) if role == "prefill" else None
        self.server = server
        try:
            self.manager = connectors.make_manager(role, connector, given, self.classes, made, where[1])
        except BaseException:
            if hasattr(self.server, "close"):
                self.server.close()
            raise
        if timeouts:
            self.manager.timeouts = type(self.manager.timeouts)(*timeouts)
        self._rooms: dict[int, tuple[Any, Lists, int, int]] = {}

    # What a test calls.

    def meet(self, seconds: float = 60.0) -> None:
        """Decode: wait until the prefill server is known."""
        end = time.monotonic() + seconds
        while not self.manager.try_ensure_parallel_info(self.address):
            assert time.monotonic() < end, "the prefill server is not known"
            time.sleep(0.05)

    def known(self) -> bool:
        """Decode: whether the prefill server is known."""
        return bool(self.manager.try_ensure_parallel_info(self.address))

    def ports(self) -> dict[str, str]:
        """Where this rank listens."""
        return {"link": self.manager.link.address, "bootstrap": self.address}

    def open(self, room: int, tokens: int, prefix: int = 0) -> None:
        """A request has arrived: make its sender or receiver, as SGLang's queue does."""
        lists = Lists.draw(self, tokens, room)
        transfer: Any
        with announcing(room, tokens):
            if self.role == "prefill":
                transfer = self.classes.sender(self.manager, self.address, room)
            else:
                transfer = self.classes.receiver(self.manager, self.address, room)
                transfer.init(0)
        self._rooms[room] = transfer, lists, tokens, prefix

    def name(self, room: int, **spoil: Any) -> None:
        """Decode: name the memory. For ``spoil`` see `_states`; ``pages`` is how many pages are named."""
        transfer, lists, tokens, prefix = self._rooms[room]
        pages = lists.pages[prefix // self._page :]
        states = self._states(lists, tokens, prefix, spoil)
        transfer.send_metadata(pages[: spoil.get("pages")], lists.row, states, decode_prefix_len=prefix)

    def begin(self, room: int) -> None:
        """Prefill: `init` with the number of pages that decode asks for."""
        transfer, _, tokens, _ = self._rooms[room]
        prefix = transfer.pop_decode_prefix_len()
        self._rooms[room] = (*self._rooms[room][:3], prefix)
        transfer.init(-(-(tokens - prefix) // self._page), self._rooms[room][1].row)

    def chunk(self, room: int, start: int, end: int, **spoil: Any) -> None:
        """Prefill: send the pages of tokens ``[start, end)``; with the last ones, the rest."""
        transfer, lists, tokens, prefix = self._rooms[room]
        pages = lists.pages[start // self._page : -(-end // self._page)]
        states = self._states(lists, tokens, prefix, spoil) if end == tokens else None
        transfer.send(pages[: spoil.get("pages")], states, num_kv_tokens=end - start)

    def send(self, room: int, *ends: int, **spoil: Any) -> None:
        """Prefill: `begin`, and all chunks."""
        self.begin(room)
        _, _, tokens, prefix = self._rooms[room]
        start = prefix
        for end in [*(each for each in ends if each > prefix), tokens]:
            self.chunk(room, start, end, **spoil)
            start = end

    def poll(self, room: int) -> int:
        return int(self._rooms[room][0].poll())

    def reach(self, room: int, *states: int, seconds: float = 60.0) -> list[int]:
        """Poll as a scheduler does until one of the states is seen; each state that was seen, once."""
        seen: list[int] = []
        end = time.monotonic() + seconds
        while True:
            found = self.poll(room)
            if not seen or seen[-1] != found:
                seen.append(found)
            if found in (*states, FAILED, SUCCESS):
                return seen
            if time.monotonic() > end:
                raise TimeoutError(f"room {room} was {seen} for {seconds} s")
            time.sleep(PAUSE)

    def soon(self, room: int, state: int) -> bool:
        """Whether a state is reached within some seconds."""
        try:
            return self.reach(room, state, seconds=4.0)[-1] == state
        except TimeoutError:
            return False

    def reason(self, room: int) -> str:
        """Why a request failed, as the client reads it."""
        try:
            self._rooms[room][0].failure_exception()
        except Exception as error:
            return str(error)
        raise AssertionError("failure_exception raises nothing")

    def abort(self, room: int) -> None:
        self._rooms[room][0].abort()

    def end(self, room: int) -> None:
        """SGLang is done with the request."""
        self._rooms.pop(room)[0].clear()

    def release(self, room: int, seconds: float) -> float:
        """Decode: after a failure, wait as SGLang's queue does until the memory may be used again; the seconds."""
        transfer = self._rooms[room][0]
        transfer.ensure_abort_notified(force_arm=True)
        began = time.monotonic()
        while not self.manager.is_abort_release_safe(room, len(transfer.bootstrap_infos)):
            if time.monotonic() - began > seconds:
                return float("inf")
            time.sleep(PAUSE)
        self.manager.clear_deferred_abort_state(room)
        transfer.clear()
        return time.monotonic() - began

    def taken_back(self) -> dict[str, dict[str, int]]:
        """How often memory was taken back without proof, by role and by whom, as soon as the link knows of any."""
        end = time.monotonic() + 2.0
        while not (found := self.manager.link.snapshot()["totals"]["taken_back"]) and time.monotonic() < end:
            time.sleep(PAUSE)
        return dict(found)

    # The bytes, read from the pools' memory and not through the connector.

    def wipe(self) -> None:
        """Decode: zeros everywhere."""
        for part in self.parts:
            for buffer in self.buffers(part):
                buffer[:] = 0

    def items(self, room: int) -> dict[str, list[npt.NDArray[np.uint8]]]:
        """The bytes of a request, by part and buffer, in the order of positions."""
        _, lists, tokens, prefix = self._rooms[room]
        return {
            part: [buffer[lists.indices(part, self, tokens, prefix)] for buffer in self.buffers(part)]
            for part in self.parts
        }

    def stray(self, room: int) -> int:
        """Decode, after `wipe`: items that the request did not name, and that have changed."""
        _, lists, tokens, prefix = self._rooms[room]
        found = 0
        for part in self.parts:
            named = lists.indices(part, self, tokens, prefix)
            for buffer in self.buffers(part):
                others = np.setdiff1d(np.arange(len(buffer)), named)
                found += int(np.count_nonzero(buffer[others].any(axis=1)))
        return found

    def arrived(self, room: int) -> int:
        """Decode, after `wipe`: bytes of the request that are there."""
        return sum(int(np.count_nonzero(each)) for part in self.items(room).values() for each in part)

    @property
    def _page(self) -> int:
        return int(self.made.pools.pages.page_size)

    def _states(self, lists: Lists, tokens: int, prefix: int, spoil: dict[str, Any]) -> list[Any]:
        """The lists of all state types; ``window`` and ``slots`` say how many items some of them have instead."""
        states = lists.states(self, tokens, prefix)
        for number, kind in enumerate(self.made.kv_args.state_types):
            if kind.value == "swa" and "window" in spoil:
                states[number] = states[number][: spoil["window"]]
            if kind.value == "mamba" and "slots" in spoil:
                states[number] = [np.arange(1, 1 + spoil["slots"], dtype=np.int32)]
        return states
