"""Both sides of a transfer in one process: real pools, real links, real senders and receivers, no scheduler."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from late_device import BACKEND, reachable

import statelink
from statelink_sglang import backend
from statelink_sglang.backend import Instance, Manager, Prefill, Receiver, Sender, Timeouts, TransferFailed

from .models import VOCABULARY
from .newest import OLDER
from .pools import PAGE, Made, make

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    import numpy.typing as npt

rooms = itertools.count(1)
FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = range(5)
ADDRESS = "127.0.0.1:1"


class Memory:
    """A rank's memory, by the addresses that SGLang lists."""

    made: Made

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


class Side(Manager, Memory):
    """One rank: a `Manager` that is not made by a scheduler, and that knows no bootstrap server."""

    dp = (0, 1)
    prefill_info_table: Any = None

    def __init__(self, role: str, made: Made, config: statelink.LinkConfig | None = None, model: str = "tiny") -> None:
        self.made = made
        self.page_size = made.pools.pages.page_size
        self.rows_optional, self.metadata, self.vocabulary = made.pools.rows_optional, made.pools.metadata, VOCABULARY
        self._components, self.lists = backend.describe_pools(made.pools, made.kv_args)
        self._instance, self._model, self.stages, self._stage = role, model, 1, 0
        self._place = self._rank, self._ranks = made.pools.tp
        self._inventory = self.describe()
        self._config = config or link_config(role)
        self.link = self._open()
        self.calls = self.pushes = backend.Calls()
        self.set_layers()
        self.role, self._reopens = role, False
        self._groups: list[Any] = []
        self.has_rows, self.follows, self._registrar, self._finder = True, True, None, None
        self.timeouts = Timeouts(bootstrap=60.0, waiting=60.0)
        self.prefill_info_table = dict[str, Prefill]()
        self.declines = backend.Declines()
        self._held: dict[int, list[Any]] = {}
        self._executor: ThreadPoolExecutor | None = None

    def close(self) -> None:
        """Close the link, which may be another one than at first."""
        self.link.close()

    def _open(self) -> statelink.Link:
        return statelink.open(self._config, self._inventory)

    def register_to_bootstrap(self) -> None:
        """There is no bootstrap server."""

    def why_unknown(self, bootstrap_addr: str) -> str:
        return ""

    def sender(self, room: int) -> Sender:
        """A sender whose room is open. A scheduler goes on before that."""
        sender = Sender(self, "unused", room)
        self.calls.drain()
        return sender

    def receiver(self, room: int, tokens: int, request: Any = None) -> Receiver:
        with announcing(room, tokens, request):
            return Receiver(self, ADDRESS, room)


class Lists(NamedTuple):
    """What one side's queue has of a request: pages by number, the window's pages, a slot, and a metadata row."""

    pages: npt.NDArray[np.int32]
    window: npt.NDArray[np.int64]
    slot: int
    row: int

    @classmethod
    def draw(cls, side: Memory, tokens: int, seed: int, without: Sequence[int] = ()) -> Lists:
        """Random ones. No page is one of ``without``."""
        draw = np.random.default_rng(seed)
        count = -(-tokens // side.made.kv_args.page_size_of_pool)

        def some(part: str) -> npt.NDArray[Any]:
            # A model without attention has no pages, and SGLang names them all the same.
            items = min((len(each) for each in side.buffers(part)), default=1 + count)
            drawn = 1 + draw.permutation(items - 1)
            return drawn[~np.isin(drawn, without)][:count]

        window = some("swa") if "swa" in side.parts else np.arange(count)
        return cls(some("kv").astype(np.int32), window, int(draw.integers(1, 8)), int(draw.integers(1, 8)))

    def states(self, side: Memory, tokens: int, prefix: int) -> list[Any]:
        """The lists of each state type, as SGLang's queues make them on both sides."""
        from sglang.srt.disaggregation.utils import get_dsa_tail_state_indices

        page = side.made.kv_args.page_size_of_pool
        made: dict[str, Callable[[], Any]] = {
            "swa": lambda: self.window[max(prefix, tokens - side.made.pools.window) // page :],
            # Older releases list those of the prefix, too: both sides of SGLang then move them again.
            "dsa": lambda: self.pages[0 if OLDER else prefix // page :],
            "dsa_tail": lambda: get_dsa_tail_state_indices(side.made.pools.pages, self.slot, tokens),
            "minimax_index_k": lambda: self.pages[0 if OLDER else prefix // page :],
            "minimax_dense_kv": lambda: self.pages,  # also of the prefix
            "block_scale": lambda: self.pages,
            "block_scale_swa": lambda: made["swa"](),
            "qsa_compressed": lambda: self.pages,
            "qsa_pending": lambda: np.array([self.slot], np.int32),
            "mamba": lambda: [np.array(self.slot, np.int32)],
        }
        return [made[each.value]() for each in side.made.kv_args.state_types]

    def indices(self, part: str, side: Memory, tokens: int, prefix: int) -> Any:
        """The items of a part that must arrive, in the order of positions."""
        if part in ("kv", "dsa", "minimax_index_k"):
            return self.pages[prefix // side.made.kv_args.page_size_of_pool :]
        if part == "aux":
            return np.array([self.row])
        number = [each.value for each in side.made.kv_args.state_types].index(part)
        return np.asarray(self.states(side, tokens, prefix)[number]).reshape(-1)


def announcing(room: Any, tokens: int, request: Any = None) -> AbstractContextManager[None]:
    """What the hook on decode's queue does around a receiver's constructor."""
    return backend.announcing(backend.Announced(room, tokens, request))


@contextlib.contextmanager
def sides(
    kind: str | Callable[[tuple[int, int]], Made],
    prefill: int = 1,
    decode: int = 1,
    *,
    pages: tuple[int, int] = (PAGE, PAGE),
    dtypes: tuple[str, str] = ("float32", "float32"),
    models: tuple[str, str] = ("tiny", "tiny"),
    own: tuple[dict[str, Any], dict[str, Any]] = ({}, {}),
) -> Iterator[tuple[list[Side], list[Side]]]:
    """Ranks of a prefill instance and of a decode instance that know each other.

    Args:
        kind: The pools of both, or what makes them for a rank of so many.
        prefill: Prefill's ranks.
        decode: Decode's ranks.
        pages: Tokens of a page on prefill and on decode.
        dtypes: Of the pools that can have another.
        models: What each side says which model it has.
        own: Each side's own keys of the link's configuration.
    """
    with contextlib.ExitStack() as opened:

        def ranks(role: str, width: int) -> list[Side]:
            end = ("prefill", "decode").index(role)
            made = []
            for rank in range(width):
                pools = _made(kind, (rank, width), pages[end], dtypes[end])
                made.append(Side(role, pools, link_config(role, **own[end]), models[end]))
                opened.callback(made[-1].close)
            return made

        sources, targets = ranks("prefill", prefill), ranks("decode", decode)
        for target in targets:
            target.link.siblings([each.link.address for each in targets if each is not target])
        for target in targets:
            target.prefill_info_table[ADDRESS] = at(*(each.link.address for each in sources))
        yield sources, targets


def at(*addresses: str) -> Prefill:
    """What the directory knows of a prefill server with one DP rank."""
    return Prefill((Instance("prefill", addresses),))


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


def reason(transfer: Any) -> TransferFailed:
    """What SGLang gets as the reason of a failed request."""
    try:
        transfer.failure_exception()
    except TransferFailed as failure:
        return failure
    raise AssertionError("it did not fail")


def safe(target: Side, room: int) -> Callable[[], int]:
    """Whether decode's queue may free the memory of a failed request, as a state."""
    return lambda: SUCCESS if target.is_abort_release_safe(room, 0) else TRANSFERRING


def give_back(receiver: Receiver) -> None:
    """SGLang has given the memory of a failed request to others, as decode's queue does it."""
    receiver.kv_mgr.clear_deferred_abort_state(receiver.bootstrap_room)
    receiver.clear()


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


def ask(
    target: Side, room: Any, theirs: Lists, tokens: int, *, prefix: int = 0, dp: int = 0, request: Any = None
) -> Receiver:
    """A request whose memory decode has named.

    Args:
        target: A rank of decode.
        room: The room.
        theirs: What decode's queue has of the request.
        tokens: Tokens of the request, as decode counts them.
        prefix: How many of them decode holds already.
        dp: The DP rank of prefill that decode asks.
        request: SGLang's, if something of it is looked at.
    """
    receiver = target.receiver(room, tokens, request)
    receiver.init(dp)
    accept(receiver, target, theirs, tokens, prefix)
    return receiver


def meet(
    source: Side, target: Side, room: int, theirs: Lists, tokens: int, *, prefix: int = 0, dp: int = 0
) -> tuple[Sender, Receiver]:
    """A request whose two sides have met, so that prefill may send. See `ask`."""
    sender, receiver = source.sender(room), ask(target, room, theirs, tokens, prefix=prefix, dp=dp)
    until(sender.poll, WAITING)
    return sender, receiver


def move(
    sources: Sequence[Side], targets: Sequence[Side], ours: Lists, theirs: Lists, tokens: int, ends: Sequence[int]
) -> None:
    """Move a request between all ranks of both servers. Every rank of a server has the same lists."""
    room = next(rooms)
    senders = [source.sender(room) for source in sources]
    receivers = [ask(target, room, theirs, tokens) for target in targets]
    for sender, source in zip(senders, sources, strict=True):
        until(sender.poll, WAITING)
        send(sender, source, ours, tokens, ends)
    for transfer in (*receivers, *senders):
        until(transfer.poll, SUCCESS)


def hand_over(source: Side, target: Side, room: int = 0, without: Sequence[int] = ()) -> None:
    """A whole request, whose bytes must arrive. No page is one of ``without``."""
    room, tokens = room or next(rooms), 100
    ours, theirs = (Lists.draw(side, tokens, 20 + number, without) for number, side in enumerate((source, target)))
    sender, receiver = meet(source, target, room, theirs, tokens)
    send(sender, source, ours, tokens, [])
    until(receiver.poll, SUCCESS)
    until(sender.poll, SUCCESS)
    for a, b in zip(source.buffers("kv"), target.buffers("kv"), strict=True):
        assert np.array_equal(a[ours.pages], b[theirs.pages])


class Event:
    """A device's event that another stream has not reached yet."""

    done = False

    def query(self) -> bool:
        return self.done


def _made(kind: str | Callable[[tuple[int, int]], Made], tp: tuple[int, int], page: int, dtype: str) -> Made:
    made = make(kind, tp, page, dtype) if isinstance(kind, str) else kind(tp)
    made.kv_args.page_size_of_pool = made.pools.pages.page_size
    return made


def link_config(role: str, **more: Any) -> statelink.LinkConfig:
    return statelink.LinkConfig.read({"role": role, "backend": BACKEND, **more})


def _memory(address: int, nbytes: int, item: int) -> npt.NDArray[np.uint8]:
    raw = memoryview((ctypes.c_uint8 * nbytes).from_address(reachable(address))).cast("B")
    return np.frombuffer(raw, np.uint8).reshape(nbytes // item, item)
