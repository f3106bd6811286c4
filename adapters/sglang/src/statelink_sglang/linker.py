"""Lets prefill take from decode what decode's prefix cache holds of a conversation.

SGLang 0.5.23 loads `Linker` by its name, on both servers (``--unified-cache-external-linker-backend dynamic``), when it
makes its prefix cache. The pools are described later, when SGLang makes the KV manager: that opens the linker, with a
link of its own, in the other direction. Decode offers the nodes of its cache (`_offers`), and tells them to the
bootstrap servers of prefill (`_publisher`). Prefill looks a request up in what it was told (`_catalogue`), and receives
pages into the memory that SGLang has allocated, before the forward pass (`_loads`).

Everything here runs on the scheduler's thread.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

import statelink
from statelink.errors import ConfigError

from ._catalogue import Catalogue
from ._http import Bootstrap
from ._loads import Load, Loads
from ._offering import offered_node
from ._offers import Offers
from ._options import read_options
from ._proofs import KeyPair
from ._publisher import Publisher
from ._serving import Serving

if TYPE_CHECKING:
    from statelink import Link

    from ._manager import Manager

__all__ = ["Linker"]

OPTIONS = {"lease": 300.0, "deadline": 10.0}
"""What ``linker_extra_config`` may have: seconds for which decode offers a node of its cache, and for a load."""

COMPONENTS = {ComponentType.FULL: PoolName.KV, ComponentType.SWA: PoolName.SWA, ComponentType.MAMBA: PoolName.MAMBA}
"""Parts of SGLang's prefix cache, and how it names their memory."""
HELD = {"swa": PoolName.SWA, "mamba": PoolName.MAMBA}
"""State types beside pages that SGLang's prefix cache holds, and how it names their memory."""

SPARE_SHARE, SCARCE_SHARE = 0.25, 0.0625
"""Shares of a pool. If less is free or can be evicted, decode offers less; and at the smaller share, at once."""

MOST_ROOM = (1 << 63) - 1
CLEARING_SECONDS = 30.0
"""Seconds in which what is sent has to end before SGLang clears its cache."""


class Linker(UnifiedCacheLinker):
    """What SGLang's prefix cache calls. It does nothing before `open`.

    Args:
        server_args: SGLang's ``ServerArgs``.
        params: SGLang's ``CacheInitParams``.
        components: The parts of the prefix cache.
        extra_config: ``linker_extra_config``: see `OPTIONS`.
        forward_stream: Where forward passes run.

    Raises:
        ConfigError: The server cannot use it; the text says why.
    """

    def __init__(
        self, server_args: Any, params: Any, *, components: Any, extra_config: Any, forward_stream: Any = None
    ) -> None:
        role, backend = server_args.disaggregation_mode, server_args.disaggregation_transfer_backend
        if role not in ("prefill", "decode") or backend != "statelink":
            raise _refused(f"the server has the mode {role!r} and the transfer backend {backend!r}")
        unknown = [repr(each) for each in {*extra_config} - {*OPTIONS}]
        wrong = [name for name in OPTIONS if not _is_time(extra_config.get(name, 1.0))]
        if unknown or wrong:
            raise _refused(
                f"its linker_extra_config has {', '.join(unknown) or f'no seconds for {wrong[0]!r}'}",
                f"it may have {' and '.join(OPTIONS)}, seconds above zero",
            )
        self._times = {name: float(extra_config.get(name, default)) for name, default in OPTIONS.items()}
        self.forward_stream = forward_stream
        self.pools = {COMPONENTS[each]: None for each in components if each in COMPONENTS}
        self._page, self._allocator = params.page_size, params.token_to_kv_pool_allocator
        self._requests = params.req_to_token_pool
        self._role = role
        self._cache: Any = None
        self._manager: Manager | None = None
        self._link: Link | None = None
        self._offers = Offers(self._times["lease"])
        self._serving: Serving | None = None
        self._publisher: Publisher | None = None
        self._catalogue: Catalogue | None = None
        self._loads: Loads | None = None
        self._numbers, self._instance = itertools.count(1), ""
        self.layer_done_counter = Counter(self)

    # The manager calls these.

    def open(self, manager: Manager, bootstrap: str) -> None:
        """Open the link, and begin. Every rank of the server calls this at the same time. Blocks.

        Args:
            manager: The scheduler's manager.
            bootstrap: Where prefill's bootstrap server listens.

        Raises:
            StatelinkError: The server cannot use the linker; the text says why.
        """
        self._manager, self._cache = manager, manager.scheduler.tree_cache
        _check_state(manager)
        inventory = manager.describe("-cache", without="aux")
        self._instance, place = inventory.instance, inventory.rank
        sends, keys = self._role == "decode", KeyPair(read_options(self._role).keys)
        link = self._link = statelink.open(read_options("prefill" if sends else "decode").link, inventory)
        everyone = manager.gathered(link.address)
        if sends:
            slots = PoolName.MAMBA in self.pools
            self._serving = Serving(
                *(link, self._offers, self._page, self._window_pages(), slots, self._items, self._times["deadline"])
            )
            if place == 0:
                known = manager.prefill_info_table
                self._publisher = Publisher(self._offers, self._instance, everyone, keys, lambda: known)
            return
        if link.quiet_within is None:
            raise _refused(
                f"with the backend {link.backend!r}, nobody can say when memory is quiet whose writer was lost",
                "set 'take_back_after' in the link's configuration",
            )
        link.siblings([each for each in everyone if each != link.address])
        self._loads = Loads(link, manager.memory_is_free, self._times["deadline"])
        there, name = itertools.count(1), self._instance
        self._catalogue = Catalogue(Bootstrap(bootstrap, keys), link, lambda: _room(name, place, next(there)))

    def shut(self) -> None:
        """SGLang gives its memory away. `open` follows when the memory is back. Blocks."""
        self.reset()
        for each in (self._publisher, self._catalogue, self._serving, self._link):
            if each is not None:
                each.close()
        self._publisher = self._catalogue = self._serving = self._link = self._loads = None

    # Prefill. SGLang's tree calls these.

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """How many of a request's next pages can be had, each possible number."""
        pages = _by_name(transfers).get(PoolName.KV)
        if self._catalogue is None or pages is None or not pages.keys:
            return []
        return self._catalogue.lengths(pages.keys)

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """A request is to get pages, into memory that SGLang has allocated. Returns whether it will."""
        named = _by_name(transfers)
        pages = named.get(PoolName.KV)
        if self._catalogue is None or self._loads is None or self._manager is None or pages is None or not pages.keys:
            return False
        # Another rank may have heard of other offers by now, and all must ask the same server, or none.
        holder = self._manager.gathered(self._catalogue.holder(pages.keys[-1]))[0]
        number = next(self._numbers)
        if holder is None or holder.pages < len(pages.keys):
            return False
        end = holder.pages * self._page
        window, slot = named.get(PoolName.SWA), named.get(PoolName.MAMBA)
        self._loads.put(
            rid,
            Load(
                _room(self._instance, number),
                holder.addresses,
                end,
                end - len(pages.keys) * self._page,
                self._items(
                    self._named(pages),
                    None if window is None else self._named(window),
                    None if slot is None else int(slot.device_indices[0]),
                ),
                bytes.fromhex(pages.keys[-1]),
            ),
        )
        return True

    def start_layer_wise_loading(self) -> int:
        """Begin what the next batch loads."""
        return -1 if self._loads is None else self._loads.start()

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Whether a batch has got what it loads. Nothing writes to its memory any more."""
        return self._loads is not None and self._loads.finish(counter_index)

    def cancel_queued_load(self, rid: str) -> bool:
        """A request of the next batch is given up."""
        return self._loads is not None and self._loads.cancel(rid)

    def wait(self, number: int) -> None:
        """Block until a batch has got what it loads, or has failed to."""
        if self._loads is not None and number >= 0:
            self._loads.wait(number)

    # Decode. SGLang's tree calls these.

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Offer a node of the tree, which SGLang has locked. On prefill, nothing is offered."""
        named, node = _by_name(transfers), offered_node.get()
        pages = named.get(PoolName.KV)
        if self._serving is None or node is None or pages is None or not pages.keys:
            return False
        way = self._cache.path_device_indices(node)
        window, slot = None, named.get(PoolName.MAMBA)
        if PoolName.SWA in self.pools:
            window = self._pages_of(self._allocator.full_to_swa_index_mapping[way])
        offer = self._offers.add(
            pages.keys,
            self._pages_of(way),
            window,
            None if slot is None else _to_host(slot.device_indices[0]),
            self.record_offload_ready(),
        )
        self._serving.made.put(offer)
        return True

    def num_completed_offloads(self) -> int:
        """How many of the oldest offers have ended."""
        return self._offers.ended()

    def pop_completed_offload(self) -> bool:
        """Forget the oldest offer. SGLang may offer the node again when another request has used it."""
        self._offers.pop()
        return False

    def step(self, scheduler: Any) -> None:
        """Give back what other requests need, and unlock what has ended. In each round of decode's scheduler."""
        if not self._cache.linker.pending_offloads:  # the same on all ranks
            return
        for free, size in self._free(scheduler):
            if free < SPARE_SHARE * size:
                scarce = free < SCARCE_SHARE * size
                self._offers.give_back(int(SPARE_SHARE * size - free), self._page, at_once=scarce)
        waiting = scheduler.disagg_decode_prealloc_queue
        if waiting.retracted_queue or any(each.waiting_for_input for each in waiting.queue):
            self._offers.give_back(1, self._page, at_once=True)  # one in each round, until it has what it waits for
        self._cache.check_hicache_events()

    def _free(self, scheduler: Any) -> list[tuple[int, int]]:
        """For each pool, what is free or can be evicted, and its size, in tokens or in slots."""
        cache, allocator = self._cache, self._allocator
        if PoolName.SWA in self.pools:
            found = [
                (allocator.full_available_size() + cache.full_evictable_size(), allocator.size_full),
                (allocator.swa_available_size() + cache.swa_evictable_size(), allocator.size_swa),
            ]
        else:
            found = [(allocator.available_size() + cache.full_evictable_size(), allocator.size)]
        if PoolName.MAMBA in self.pools:
            slots = self._requests.mamba_allocator
            found.append((slots.available_size() + cache.mamba_evictable_size(), slots.size))
        return found

    # Both.

    def reset(self) -> None:
        """SGLang clears its cache. Blocks until nothing reads or writes its memory."""
        if self._loads is not None:
            self._loads.clear()
        self._offers.clear(CLEARING_SECONDS)

    def close(self) -> None:
        """SGLang ends."""
        self.shut()

    def _window_pages(self) -> int:
        assert self._manager is not None
        window = int(self._manager.scheduler.sliding_window_size or 0) if PoolName.SWA in self.pools else 0
        return int(-(-window // self._page))

    def _pages_of(self, slots: Any) -> Any:
        """The numbers of pages from token slots, in a copy on the host, which may still be under way."""
        return _to_host(slots[:: self._page] // self._page)

    def _named(self, transfer: Any) -> Any:
        """The numbers of pages from what SGLang has allocated."""
        return transfer.device_indices[:: self._page].cpu().numpy() // self._page

    def _items(self, pages: Any, window: Any, slot: int | None) -> dict[str, Any]:
        assert self._manager is not None
        lists, held = self._manager.lists, {PoolName.SWA: window, PoolName.MAMBA: slot}
        items = dict.fromkeys((*lists.pages, *lists.beside), pages)
        for names in lists.states:
            items.update({name: held[HELD[name]] for name in names if name not in lists.beside})
        return items


class Counter:
    """What SGLang's pools take for the counter of loaded layers: a forward pass waits here before it begins.

    All layers come at once. So the whole pass waits. Also those passes wait whose layers ask nothing of a counter, such
    as graphs.

    Args:
        linker: Knows what is loaded.
    """

    def __init__(self, linker: Linker) -> None:
        self._linker = linker
        self.consumer_index = -1

    def set_consumer(self, index: int) -> None:
        """A forward pass begins. Blocks until what it loads has come."""
        self.consumer_index = index
        self._linker.wait(index)

    def wait_until(self, threshold: int) -> None:
        """A layer of a forward pass begins, whose pages have come."""


def _check_state(manager: Manager) -> None:
    """Refuse state that SGLang's prefix cache does not hold, and servers whose requests it knows only in part."""
    lists = manager.lists
    unheld = [name for names in lists.states for name in names if name not in lists.beside and name not in HELD]
    if unheld:
        raise _refused(f"SGLang's prefix cache does not hold {', '.join(unheld)}")
    if any(name.startswith("draft.") for name in lists.pages):
        raise _refused("the server has a draft model")
    if manager.stages > 1:
        raise _refused("the server has pipeline stages")


def _refused(cause: str, hint: str = "start the server without --enable-unified-cache-external-linker") -> ConfigError:
    return ConfigError("the linker of statelink-sglang cannot be used", cause=cause, hint=hint, code="config.engine")


def _is_time(given: Any) -> bool:
    return type(given) in (int, float) and 0 < given < math.inf


def _by_name(transfers: Sequence[Any]) -> dict[Any, Any]:
    return {each.name: each for each in transfers}


def _to_host(tensor: Any) -> Any:
    """A copy on the host, which may still be under way."""
    import torch

    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")
    copy.copy_(tensor, non_blocking=True)
    return copy


def _room(*which: Any) -> int:
    """An id that all ranks of a server draw for the same load, and no other load has."""
    digest = hashlib.sha256(repr(which).encode()).digest()
    number = int.from_bytes(digest[:8], "little")
    return number % MOST_ROOM + 1
