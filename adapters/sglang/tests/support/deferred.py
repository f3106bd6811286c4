"""A rank of decode with four failed requests, whose memory SGLang keeps. It has a process of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

QUIET = ({1, 2}, {2, 3})
"""For each rank, the rooms to whose memory nothing writes at first. Later nothing writes to that of 1, 2 and 3."""


def run_rank(rank: int, meeting: str, said: Any) -> None:
    """Say which rooms SGLang gave back in each of two rounds, and which are left: with the adapter's hook, and without.

    Args:
        rank: Which of two.
        meeting: A file through which the ranks find each other.
        said: A queue for the answer.
    """
    import torch.distributed as dist
    from sglang.srt.disaggregation import decode

    from statelink_sglang.backend import around_resolve

    if hasattr(decode, "all_reduce_flags"):  # then SGLang's own ranks agree; in older releases, they do not
        decode.all_reduce_flags = lambda flags, group, op: flags
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    resolve = decode.DecodeTransferQueue.resolve_deferred_releases

    class Queue(decode.DecodeTransferQueue):  # type: ignore[misc]
        def __init__(self) -> None:
            quiet = self.quiet = {*QUIET[rank]}
            manager = SimpleNamespace(find_dp_rank=None, is_abort_release_safe=lambda room, acks: room in quiet)
            self.gloo_group = dist.group.WORLD
            self.scheduler = SimpleNamespace(disagg_decode_prealloc_queue=SimpleNamespace(kv_manager=manager))
            self.deferred_kv_release_timeout = math.inf
            self._deferred_releases: list[Any] = []
            self.freed: list[int] = []
            for room in (1, 2, 3, 4):
                receiver = SimpleNamespace(kv_mgr=manager, bootstrap_infos=(), abort_notified=True)
                request = SimpleNamespace(bootstrap_room=room)
                failed = SimpleNamespace(req=request, kv_receiver=receiver, metadata_buffer_index=0, host_staged=False)
                self._defer_release(failed)

        def _do_release(self, decode_req: Any, idx: int) -> None:
            self.freed.append(decode_req.req.bootstrap_room)

        def _observe_deferred_kv_release(self, **seen: Any) -> None: ...

        def rounds(self, step: Callable[[Any], Any]) -> list[list[int]]:
            """The rooms that are given back in each of two rounds, and those that are left."""
            found = []
            for _ in range(2):
                step(self)
                found.append(sorted(self.freed))
                self.freed.clear()
                self.quiet |= {1, 2, 3}
            return [*found, [entry[0].req.bootstrap_room for entry in self._deferred_releases]]

    said.put((rank, Queue().rounds(lambda queue: around_resolve(resolve, queue)), Queue().rounds(resolve)))
    dist.destroy_process_group()
