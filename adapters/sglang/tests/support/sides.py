"""Both sides of a transfer in one process: real pools, real links, real senders and receivers, no scheduler."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import statelink
from statelink import state
from statelink_sglang import _hooks
from statelink_sglang._directory import Prefill
from statelink_sglang._inventory import describe_pools
from statelink_sglang._manager import Manager, Timeouts
from statelink_sglang._receiver import Receiver
from statelink_sglang._sender import Sender

from .pools import WINDOW, Made, make

if TYPE_CHECKING:
    import numpy.typing as npt

rooms = itertools.count(1)
FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = range(5)
ADDRESS = "127.0.0.1:1"


class Side:
    """One rank: what a `Manager` is to senders and receivers."""

    hold, is_abort_release_safe = Manager.hold, Manager.is_abort_release_safe
    clear_deferred_abort_state = Manager.clear_deferred_abort_state

    def __init__(self, role: str, made: Made, config: statelink.LinkConfig | None = None) -> None:
        self.made = made
        components, self.lists = describe_pools(made.pools, made.kv_args)
        rank, ranks = made.pools.tp
        inventory = state.describe(role, components, rank=rank, ranks=ranks)
        self.link = statelink.open(config or _config(role), inventory)
        self.timeouts = Timeouts(bootstrap=60.0, waiting=60.0)
        self.prefill_info_table: dict[str, Prefill] = {}
        self._held: dict[int, Any] = {}

    def why_unknown(self, address: str) -> str:
        return ""

    def sender(self, room: int, tokens: int) -> Sender:
        manager: Any = self
        with announcing(room, tokens):
            return Sender(manager, "unused", room)

    def receiver(self, room: int, tokens: int) -> Receiver:
        manager: Any = self
        with announcing(room, tokens):
            return Receiver(manager, ADDRESS, room)

    def buffers(self, part: str) -> list[npt.NDArray[np.uint8]]:
        """Each buffer of ``kv``, ``aux`` or a state type as SGLang lists it: ``[items, bytes]`` over its memory."""
        args = self.made.kv_args
        if part in ("kv", "aux"):
            lists = [getattr(args, f"{part}_{what}s") for what in ("data_ptr", "data_len", "item_len")]
        else:
            number = [each.value for each in args.state_types].index(part)
            lists = [getattr(args, f"state_{what}s")[number] for what in ("data_ptr", "data_len", "item_len")]
        return [_memory(*each) for each in zip(*lists, strict=True) if each[1]]

    def fill(self, seed: int) -> None:
        """Random bytes everywhere."""
        draw = np.random.default_rng(seed)
        for part in self.parts:
            for buffer in self.buffers(part):
                buffer[:] = draw.integers(0, 256, buffer.shape, np.uint8)

    @property
    def parts(self) -> list[str]:
        return ["kv", *(each.value for each in self.made.kv_args.state_types), "aux"]


class Lists(NamedTuple):
    """What one side's queue has of a request: pages by number, the window's pages, a slot, and a metadata row."""

    pages: npt.NDArray[np.int32]
    window: npt.NDArray[np.int64]
    slot: int
    row: int

    @classmethod
    def draw(cls, side: Side, tokens: int, seed: int) -> Lists:
        draw = np.random.default_rng(seed)
        count = -(-tokens // side.made.kv_args.page_size_of_pool)

        def some(part: str) -> npt.NDArray[Any]:
            items = min(len(each) for each in side.buffers(part))
            return 1 + draw.permutation(items - 1)[:count]

        window = some("swa") if "swa" in side.parts else np.arange(count)
        return cls(some("kv").astype(np.int32), window, int(draw.integers(1, 8)), int(draw.integers(1, 8)))

    def states(self, side: Side, tokens: int, prefix: int) -> list[Any]:
        """The lists of each state type, as SGLang's queues make them on both sides."""
        page = side.made.kv_args.page_size_of_pool
        made: dict[str, Callable[[], Any]] = {
            "swa": lambda: self.window[max(prefix, tokens - WINDOW) // page :],
            "dsa": lambda: self.pages[prefix // page :],
            "mamba": lambda: [np.array(self.slot, np.int32)],
        }
        return [made[each.value]() for each in side.made.kv_args.state_types]

    def indices(self, part: str, side: Side, tokens: int, prefix: int) -> Any:
        """The items of a part that must arrive, in the order of positions."""
        if part == "kv":
            return self.pages[prefix // side.made.kv_args.page_size_of_pool :]
        if part == "aux":
            return np.array([self.row])
        number = [each.value for each in side.made.kv_args.state_types].index(part)
        return np.asarray(self.states(side, tokens, prefix)[number]).reshape(-1)


@contextlib.contextmanager
def announcing(room: Any, tokens: int) -> Iterator[None]:
    """What the hooks on SGLang's queues do around a constructor."""
    with _hooks._set(_hooks._request, _hooks.Announced(room, tokens)):
        yield


@contextlib.contextmanager
def sides(kind: str, prefill: int = 1, decode: int = 1, **config: Any) -> Iterator[tuple[list[Side], list[Side]]]:
    """Ranks of a prefill instance and of a decode instance that know each other."""
    with contextlib.ExitStack() as opened:

        def ranks(role: str, width: int, configs: Sequence[Any]) -> list[Side]:
            made = [Side(role, _made(kind, (rank, width)), configs[rank]) for rank in range(width)]
            for side in made:
                opened.callback(side.link.close)
            return made

        sources = ranks("prefill", prefill, [_config("prefill", **config)] * prefill)
        targets = ranks("decode", decode, [_config("decode", **config)] * decode)
        for target in targets:
            target.link.siblings([each.link.address for each in targets if each is not target])
        for target in targets:
            target.prefill_info_table[ADDRESS] = Prefill("prefill", tuple(each.link.address for each in sources))
        yield sources, targets


def until(poll: Callable[[], int], *states: int, seconds: float = 60.0) -> list[int]:
    """Poll as a scheduler's loop does, until one of some states is seen; what was seen before, each state once."""
    seen: list[int] = []
    end = time.monotonic() + seconds
    while True:
        found = poll()
        if not seen or seen[-1] != found:
            seen.append(found)
        if found in states:
            return seen
        assert found not in (FAILED, SUCCESS), seen
        assert time.monotonic() < end, seen
        time.sleep(0.002)


def send(sender: Sender, side: Side, lists: Lists, tokens: int, ends: Sequence[int]) -> None:
    """Send a request in chunks, as SGLang's queue does once decode has named its memory."""
    page = side.made.kv_args.page_size_of_pool
    prefix = sender.pop_decode_prefix_len()
    sender.init(-(-(tokens - prefix) // page), lists.row)
    start = prefix
    for end in [*(each for each in ends if each > prefix), tokens]:
        pages = lists.pages[start // page : -(-end // page)]
        last = end == tokens
        assert sender.should_send_kv_chunk(len(pages), last)
        states = lists.states(side, tokens, prefix) if last else None
        sender.send(pages, states, num_kv_tokens=end - start)
        start = end


def accept(receiver: Receiver, side: Side, lists: Lists, tokens: int, prefix: int = 0) -> None:
    """Name decode's memory, as SGLang's queue does."""
    page = side.made.kv_args.page_size_of_pool
    states = lists.states(side, tokens, prefix)
    receiver.send_metadata(lists.pages[prefix // page :], lists.row, states, decode_prefix_len=prefix)


def _made(kind: str, tp: tuple[int, int]) -> Made:
    made = make(kind, tp)
    made.kv_args.page_size_of_pool = made.pools.pages.page_size
    return made


def _config(role: str, **more: Any) -> statelink.LinkConfig:
    return statelink.LinkConfig.read({"role": role, "backend": "tcp", **more})


def _memory(address: int, nbytes: int, item: int) -> npt.NDArray[np.uint8]:
    raw = memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B")
    return np.frombuffer(raw, np.uint8).reshape(nbytes // item, item)
