"""Sleep mode: vLLM takes the memory of the cache away, and gives it back at the same addresses."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.caches import Cache, attention, make_cache, model_of

from statelink import LinkConfig, state
from statelink_vllm.connector import Leftovers, Receive, Send, StatelinkConnector, ToWorker, WorkerSide, describe_cache

pytestmark = pytest.mark.smoke

PATIENCE_SECONDS = 30.0
TOKENS, TABLE = 40, [3, 7, 5]
rooms = itertools.count(1)


class Side:
    """A worker and its cache."""

    def __init__(self, role: str) -> None:
        self.cache: Cache = make_cache([(attention(4), (0, 1))])
        components, groups = describe_cache(self.cache.config, self.cache.tensors, model_of())
        config = LinkConfig.read({"role": role, "backend": "tcp", "heartbeat": 0.1, "liveness": 2.0})
        leftovers = Leftovers(self.cache.config, self.cache.tensors, groups)
        self.worker = WorkerSide(config, state.describe(role, components), groups, leftovers)

    def tokens(self) -> torch.Tensor:
        pages = torch.stack([tensor[TABLE] for tensor in self.cache.tensors.values()])  # layer, block, head, token
        return pages.transpose(2, 3).flatten(1, 2)[:, :TOKENS]

    def scribble(self) -> None:
        """Another model uses the memory, or nothing of it is left."""
        for tensor in self.cache.tensors.values():
            tensor.normal_()

    def until_forgotten(self) -> None:
        """Wait until its link has heard that no peer is there for it."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not {"ready", "attached"}.isdisjoint(self.worker.link.snapshot()["peers"].values()):
            if time.monotonic() > end:
                raise TimeoutError("a link has not heard that its peer sleeps")
            time.sleep(0.01)

    def until(self, name: str, *, sent: bool = False) -> bool:
        """Wait for the end of a request. Returns whether it succeeded."""
        end = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < end:
            results = self.worker.results()
            if name in (results.sent if sent else results.received):
                return name not in results.failed
            time.sleep(0.01)
        raise TimeoutError(f"request {name} did not end")


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    with contextlib.ExitStack() as opened:
        made = Side("prefill"), Side("decode")
        for side in made:
            opened.callback(side.worker.close)
        yield made


def ask(sides: tuple[Side, Side], *, deaf: bool = False) -> int:
    """Both servers get a request, or decode alone."""
    prefill, decode = sides
    room = next(rooms)
    if not deaf:
        prefill.worker.begin(ToWorker(send={"r": Send(room, TOKENS, (TABLE,))}))
    decode.worker.begin(ToWorker(receive={"r": Receive(room, (prefill.worker.link.address,), TOKENS, 0, (TABLE,))}))
    return room


def works(sides: tuple[Side, Side]) -> None:
    prefill, decode = sides
    prefill.scribble()
    ask(sides)
    assert decode.until("r")
    assert prefill.until("r", sent=True)
    assert torch.equal(prefill.tokens(), decode.tokens())


@pytest.mark.parametrize("who", [[0], [1], [0, 1]])
def test_requests_move_before_and_after(sides: tuple[Side, Side], who: list[int]) -> None:
    works(sides)
    for number in who:
        sides[number].worker.suspend()
        sides[number].worker.suspend()  # vLLM may do it twice
        sides[number].scribble()
    for side in sides:
        side.until_forgotten()  # a request that is asked for before fails with the peer that goes
    for number in who:
        sides[number].worker.resume()
        sides[number].worker.resume()
    works(sides)


def test_a_request_whose_decode_has_not_come_is_given_up(sides: tuple[Side, Side]) -> None:
    """vLLM holds its blocks until the worker has named it."""
    prefill, _ = sides
    prefill.worker.begin(ToWorker(send={"late": Send(next(rooms), TOKENS, (TABLE,))}))
    prefill.worker.suspend()
    prefill.until("late", sent=True)
    prefill.worker.resume()
    works(sides)


def test_decode_hears_in_time_that_prefill_sleeps(sides: tuple[Side, Side]) -> None:
    works(sides)
    prefill, decode = sides
    prefill.worker.suspend()
    ask(sides, deaf=True)
    assert not decode.until("r")
    prefill.worker.resume()
    works(sides)


def test_while_a_server_sleeps_its_own_requests_fail_alone(sides: tuple[Side, Side], caplog: Any) -> None:
    prefill, _ = sides
    prefill.worker.suspend()
    prefill.worker.begin(ToWorker(send={"r": Send(next(rooms), TOKENS, (TABLE,))}))
    assert prefill.until("r", sent=True)
    assert "closed.suspended" in caplog.text
    prefill.worker.resume()
    works(sides)


def test_vllm_may_start_the_server_with_sleep_mode() -> None:
    """vLLM asks the class when the server starts."""
    assert StatelinkConnector.supports_sleep_mode(None)
