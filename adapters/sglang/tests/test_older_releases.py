"""What the adapter does in SGLang's place in older releases. The hooks are asked, so that every release shows them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from statelink_sglang.backend import around_is_fully_idle, around_pop_bootstrapped, drop_prefix

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize(("held", "for_health_check", "idle"), [(0, False, True), (1, False, False), (1, True, True)])
def test_a_scheduler_that_holds_memory_is_not_idle(held: int, for_health_check: bool, idle: bool) -> None:
    """Otherwise SGLang would flush memory to which somebody writes. A health check asks for running requests alone."""
    queue = SimpleNamespace(has_pending_deferred_releases=lambda: held > 0)
    asked: list[tuple[bool, bool]] = []

    def original(scheduler: Any, for_health_check: bool, ignore_waiting: bool) -> bool:
        asked.append((for_health_check, ignore_waiting))
        return True

    scheduler = SimpleNamespace(disagg_decode_transfer_queue=queue)
    assert around_is_fully_idle(original, scheduler, for_health_check=for_health_check) is idle
    assert asked == [(for_health_check, False)]


def test_a_busy_scheduler_is_not_idle() -> None:
    assert not around_is_fully_idle(lambda *asked: False, SimpleNamespace())


class Bootstrapping:
    """A queue of prefill, of which SGLang takes what has failed here, whatever other stages say."""

    def __init__(self, manager: Any) -> None:
        self.kv_manager = manager
        self.queue = [SimpleNamespace(rid=rid) for rid in "wxyz"]
        self.failed = {"x", "y"}

    def pop(self, **lists: Any) -> list[str]:
        taken = [each.rid for each in self.queue if each.rid in self.failed]
        self.queue = [each for each in self.queue if each.rid not in self.failed]
        return taken


@pytest.mark.parametrize(
    ("ours", "lists", "taken", "left"),
    [
        (True, {"pp_good_rids": ["w"], "pp_bad_rids": ["y"]}, ["y"], "wxz"),
        (True, {}, ["x", "y"], "wz"),  # one stage
        (False, {"pp_good_rids": ["w"], "pp_bad_rids": ["y"]}, ["x", "y"], "wz"),  # another backend
    ],
)
def test_a_stage_fails_only_what_all_stages_fail(ours: bool, lists: Any, taken: list[str], left: str) -> None:
    queue = Bootstrapping(SimpleNamespace(**({"find_dp_rank": None} if ours else {})))
    assert around_pop_bootstrapped(Bootstrapping.pop, queue, **lists) == taken
    assert "".join(each.rid for each in queue.queue) == left


@pytest.mark.parametrize(("listed", "left"), [({"dsa"}, [7, 9]), (set(), [4, 5, 7, 9])])
def test_index_keys_of_a_prefix_that_decode_holds_are_left_out(listed: set[str], left: list[int]) -> None:
    """Older releases list their pages, too. Two pages are behind the prefix."""
    items: dict[str, Any] = {"kv": np.array([3, 8]), "dsa": np.array([4, 5, 7, 9]), "draft.dsa": np.array([4, 5, 7, 9])}
    drop_prefix(items, 2, frozenset(listed))
    assert {name: each.tolist() for name, each in items.items()} == {"kv": [3, 8], "dsa": left, "draft.dsa": left}
