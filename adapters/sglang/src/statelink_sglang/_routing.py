"""Where SGLang's controller of several DP ranks sends a request that names no room, for which it would end the server.

The controller has a process of its own. Everything here runs on its one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["AROUND", "around_follow_room"]


def around_follow_room(original: Callable[..., Any], controller: Any, req: Any) -> Any:
    """Around ``DataParallelController.follow_bootstrap_room_scheduler``: any rank's queue can reject such a request."""
    if not isinstance(req.bootstrap_room, int) and req.routed_dp_rank is None:
        req.routed_dp_rank = next(iter(controller._active_workers), 0)
    return original(controller, req)


AROUND: dict[str, Callable[..., Any]] = {
    "sglang.srt.managers.data_parallel_controller.DataParallelController.follow_bootstrap_room_scheduler": (
        around_follow_room
    ),
}
"""Each target, and its hook."""
