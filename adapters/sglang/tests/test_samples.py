"""A room of its own for each sample of a request: which rooms the process that takes requests sends."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from statelink_sglang.backend import ROOMS, STRIDE, around_handle_batch, around_send, room_of_sample

pytestmark = pytest.mark.smoke


def _manager(backend: str = "statelink", mode: str = "prefill") -> Any:
    args = SimpleNamespace(disaggregation_transfer_backend=backend, disaggregation_mode=mode)
    return SimpleNamespace(server_args=args)


async def _sent(rooms: list[int | None], samples: int, manager: Any) -> list[int | None]:
    """The rooms of what is sent for one batch, in the order in which SGLang sends it."""
    sent: list[int | None] = []

    async def send(manager: Any, tokenized: Any) -> None:
        await asyncio.sleep(0)
        sent.append(tokenized.bootstrap_room)

    async def handle(manager: Any, obj: Any, *more: Any) -> AsyncIterator[str]:
        requests = [SimpleNamespace(bootstrap_room=room) for room in rooms]
        alone = requests if samples > 1 else []
        for each in [*alone, *(each for each in requests for _ in range(samples))]:
            await around_send(send, manager, copy.copy(each))
        yield "an answer"

    batch = SimpleNamespace(parallel_sample_num=samples)
    assert [each async for each in around_handle_batch(handle, manager, batch, None, {})] == ["an answer"]
    return sent


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_the_prompt_has_the_requests_room_and_each_sample_another(mode: str) -> None:
    sent = asyncio.run(_sent([1000, 1001], 3, _manager(mode=mode)))
    assert sent[:2] == [1000, 1001]
    assert sent[2:] == [room_of_sample(room, number) for room in (1000, 1001) for number in (1, 2, 3)]
    assert len(set(sent)) == 8


def test_requests_at_the_same_time_are_counted_apart() -> None:
    async def both() -> list[list[int | None]]:
        return await asyncio.gather(*(_sent([room], 2, _manager()) for room in (7, 8, 7)))

    one, other, again = asyncio.run(both())
    assert one == again == [7, *(room_of_sample(7, number) for number in (1, 2))]
    assert other == [8, *(room_of_sample(8, number) for number in (1, 2))]


@pytest.mark.parametrize(
    ("rooms", "samples", "manager"),
    [
        ([5, 6], 1, _manager()),
        ([5], 3, _manager(backend="nixl")),
        ([5], 3, _manager(mode="null")),
        ([None], 3, _manager()),
        ([0], 3, _manager()),
    ],
)
def test_every_other_request_is_left_as_it_is(rooms: list[int | None], samples: int, manager: Any) -> None:
    assert set(asyncio.run(_sent(rooms, samples, manager))) == set(rooms)


@pytest.mark.parametrize("ranks", [*range(1, 17), 32, 48, 64])
@pytest.mark.parametrize("room", [1, 12345, ROOMS // 2, ROOMS - 1])
def test_all_samples_have_the_requests_dp_rank(ranks: int, room: int) -> None:
    rooms = [room_of_sample(room, number) for number in range(200)]
    assert {each % ranks for each in rooms} == {room % ranks}
    assert all(0 < each < ROOMS for each in rooms)
    assert len(set(rooms)) == 200


def test_a_room_without_a_room_for_the_sample_is_refused() -> None:
    first = next(number for number in itertools.count(1) if 1 + number * STRIDE >= ROOMS)
    with pytest.raises(OverflowError, match="no room for sample"):
        room_of_sample(1, first)
