"""Linkers of both servers over SGLang's real pools, driven as SGLang's prefix cache drives them."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from statelink_sglang.backend import BootstrapServer, offered_node
from statelink_sglang.linker import Linker

from .bootstrap import at
from .sides import Lists, Side, sides

if TYPE_CHECKING:
    import numpy.typing as npt

PARTS = {"swa": ComponentType.SWA, "mamba": ComponentType.MAMBA}


def hashes(said: str, pages: int) -> list[str]:
    """Those that SGLang would have of a conversation's pages: each is of all that was said before, too."""
    return [hashlib.sha256(f"{said} {page}".encode()).hexdigest() for page in range(pages)]


class Rank:
    """A rank's linker, and a tree that knows one way.

    Args:
        side: The rank, whose pools are real.
        role: ``prefill`` or ``decode``.
        bootstrap: Where prefill's bootstrap server listens.
        options: ``linker_extra_config``.
    """

    def __init__(self, side: Side, role: str, bootstrap: str, options: dict[str, float]) -> None:
        self.side, self.page = side, side.made.kv_args.page_size_of_pool
        self._way = torch.empty(0, dtype=torch.int64)
        slots = max(len(each) for each in side.buffers("kv")) * self.page
        self.window_of = torch.zeros(slots, dtype=torch.int64)
        parts = {ComponentType.FULL, *(PARTS[each] for each in side.parts if each in PARTS)}
        args = SimpleNamespace(disaggregation_mode=role, disaggregation_transfer_backend="statelink")
        allocator = SimpleNamespace(full_to_swa_index_mapping=self.window_of)
        params = SimpleNamespace(page_size=self.page, token_to_kv_pool_allocator=allocator, req_to_token_pool=None)
        self.linker = Linker(args, params, components=parts, extra_config=options)
        tree = SimpleNamespace(path_device_indices=lambda node: self._way)
        window = side.made.pools.window
        side.scheduler = SimpleNamespace(tree_cache=tree, sliding_window_size=window, enable_overlap=False)
        if role == "decode":
            side.prefill_info_table = {bootstrap: None}
        self.linker.open(side, bootstrap)

    def slots(self, pages: npt.NDArray[Any]) -> torch.Tensor:
        """The token slots of pages."""
        first = torch.from_numpy(pages.astype("int64")) * self.page
        found: torch.Tensor = (first[:, None] + torch.arange(self.page)).reshape(-1)
        return found

    def offer(self, lists: Lists, keys: Sequence[str], before: int = 0, without_window: int = 0) -> bool:
        """Decode's tree offers a node.

        Args:
            lists: The memory of the way to it.
            keys: The hashes of the way's pages.
            before: Pages of the way that are before the node.
            without_window: Pages of the way, from the first on, that the pool of windows has no longer.
        """
        self._way = self.slots(lists.pages)
        self.window_of[self._way] = self.slots(lists.window)
        self.window_of[self.slots(lists.pages[:without_window])] = 0
        transfers = [PoolTransfer(PoolName.KV, device_indices=self._way[before * self.page :], keys=[*keys[before:]])]
        if "mamba" in self.side.parts:
            transfers.append(PoolTransfer(PoolName.MAMBA, device_indices=torch.tensor([lists.slot]), keys=[keys[-1]]))
        token = offered_node.set("node")
        try:
            return self.linker.offload(transfers)
        finally:
            offered_node.reset(token)

    def lookup(self, keys: Sequence[str], prefix: int = 0) -> list[int]:
        """How many of the pages after the first ones prefill can get."""
        return self.linker.lookup("request", [PoolTransfer(PoolName.KV, keys=[*keys[prefix:]])])

    def load(self, lists: Lists, keys: Sequence[str], prefix: int = 0, rid: str = "request") -> bool:
        """Prefill's tree queues a load of the pages after the first ones."""
        pages = lists.pages[prefix : len(keys)]
        transfers = [PoolTransfer(PoolName.KV, device_indices=self.slots(pages), keys=[*keys[prefix:]])]
        if "swa" in self.side.parts:
            begin = max(prefix, len(keys) - -(-self.side.made.pools.window // self.page))
            window = self.slots(lists.window[begin : len(keys)])
            transfers.append(PoolTransfer(PoolName.SWA, device_indices=window, keys=[*keys[begin:]]))
        if "mamba" in self.side.parts:
            transfers.append(PoolTransfer(PoolName.MAMBA, device_indices=torch.tensor([lists.slot]), keys=[keys[-1]]))
        return self.linker.load(rid, transfers)

    def forward(self, *, waits: bool = True) -> bool:
        """A forward pass, which waits for what was queued. Returns whether it had that."""
        number = self.linker.start_layer_wise_loading()
        if waits:
            self.linker.layer_done_counter.set_consumer(number)
        return self.linker.finish_layer_wise_loading(number)


@contextlib.contextmanager
def linkers(kind: str, **options: float) -> Iterator[tuple[Rank, Rank]]:
    """Decode's rank and prefill's, which decode tells what it offers."""
    server = BootstrapServer("127.0.0.1", 0)
    with contextlib.ExitStack() as opened:
        opened.callback(server.close)
        (prefill,), (decode,) = opened.enter_context(sides(kind))
        ranks = Rank(decode, "decode", at(server), options), Rank(prefill, "prefill", at(server), options)
        for rank in ranks:
            opened.callback(rank.linker.close)
        yield ranks
