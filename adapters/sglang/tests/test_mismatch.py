"""Two servers that do not fit: each request fails with the reason, and both sides go on. And what does fit."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import numpy as np
import pytest
import zmq
from support.bootstrap import answering
from support.pools import make
from support.sides import (
    ADDRESS,
    FAILED,
    SUCCESS,
    WAITING,
    Lists,
    Side,
    ask,
    hand_over,
    meet,
    move,
    reason,
    rooms,
    safe,
    send,
    sides,
    until,
)

from statelink.wire import parse_endpoint
from statelink_sglang.backend import Instance, Prefill

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("sglang_context")]

N = 100


@pytest.mark.parametrize(
    ("differs", "said"),
    [
        ({"models": ("llama@1", "llama@2")}, "model: 'llama@2' on decode, 'llama@1' on prefill"),
        ({"dtypes": ("float32", "bfloat16")}, "dtype: bfloat16 on decode, float32 on prefill"),
    ],
)
def test_servers_that_hold_other_state_refuse_each_other_by_name(differs: dict[str, Any], said: str) -> None:
    with sides("mha", **differs) as ((source,), (target,)):
        for room in (next(rooms), next(rooms)):  # the second time, the link knows it
            sender, receiver = source.sender(room), ask(target, room, Lists.draw(target, N, 1), N)
            until(receiver.poll, FAILED)
            assert said in str(reason(receiver))
            receiver.ensure_abort_notified(force_arm=True)
            until(safe(target, room), SUCCESS)
            until(sender.poll, FAILED)
            assert said in str(reason(sender))


def test_servers_of_which_other_layers_are_sparse_refuse_each_other() -> None:
    """Their buffers have the same sizes, and SGLang lists as many of each kind."""
    pools = iter([make("minimax"), make("minimax", dense=[1, 3], sparse=[0, 2, 4, 5])])
    with sides(lambda tp: next(pools)) as ((source,), (target,)):
        room = next(rooms)
        source.sender(room)
        receiver = ask(target, room, Lists.draw(target, N, 1), N)
        until(receiver.poll, FAILED)
        assert "kv/layers.1.k: absent on decode, present on prefill" in str(reason(receiver))


@pytest.mark.parametrize("kind", ["mha", "swa", "hybrid", "minimax"])
@pytest.mark.parametrize(("pages", "prefix"), [((16, 1), 0), ((1, 16), 0), ((16, 1), 64), ((1, 16), 64)])
def test_page_sizes_may_differ(kind: str, pages: tuple[int, int], prefix: int) -> None:
    with sides(kind, pages=pages) as ((source,), (target,)):
        source.fill(1)
        room = next(rooms)
        ours, theirs = Lists.draw(source, N, 2), Lists.draw(target, N, 3)
        sender, receiver = meet(source, target, room, theirs, N, prefix=prefix)
        send(sender, source, ours, N, [32, 80])
        until(receiver.poll, SUCCESS)
        until(sender.poll, SUCCESS)
        for layer in _full_layers(kind):
            for name in ("get_key_buffer", "get_value_buffer"):
                sent, arrived = (
                    _tokens(side, lists, name, layer) for side, lists in ((source, ours), (target, theirs))
                )
                assert np.array_equal(sent[prefix:], arrived[prefix:])


def _full_layers(kind: str) -> list[int]:
    return {"mha": [0, 1], "swa": [2], "hybrid": [3], "minimax": [*range(6)]}[kind]


def _tokens(side: Side, lists: Lists, name: str, layer: int) -> Any:
    """The bytes of each token of the request, in one buffer of full attention."""
    page = side.page_size
    slots = (lists.pages[:, None] * page + np.arange(page)).reshape(-1)[:N]
    return getattr(side.made.pools.pages, name)(layer).numpy()[slots].view(np.int32)


def test_a_prefix_that_is_no_multiple_of_prefills_page_fails_the_request() -> None:
    with sides("mha", pages=(16, 1)) as ((source,), (target,)):
        room = next(rooms)
        sender, receiver = meet(source, target, room, Lists.draw(target, N, 4), N, prefix=5)
        sender.init(6, 1)
        sender.send(np.arange(1, 7, dtype=np.int32), [], num_kv_tokens=N - 5)  # is ignored
        until(sender.poll, FAILED)
        until(receiver.poll, FAILED)
        for side in (sender, receiver):
            assert "decode holds 5 tokens of the request already" in str(reason(side))
            assert "give both servers the same --page-size" in str(reason(side))


def test_prompts_of_another_length_fail_the_request(pair: tuple[Side, Side]) -> None:
    source, target = pair
    room = next(rooms)
    sender, receiver = meet(source, target, room, Lists.draw(target, N + 40, 5), N + 40)
    sender.init(7, 1)
    until(sender.poll, FAILED)
    assert "decode asks for tokens [0, 140), and prefill has 7 pages of 16 tokens" in str(reason(sender))
    until(receiver.poll, FAILED)
    hand_over(source, target)


def test_prompts_that_differ_within_the_last_page_fail_the_request(pair: tuple[Side, Side]) -> None:
    source, target = pair
    room = next(rooms)
    sender, receiver = meet(source, target, room, Lists.draw(target, N - 1, 6), N - 1)
    send(sender, source, Lists.draw(source, N, 7), N, [])
    until(sender.poll, FAILED)
    assert "SGLang sent tokens [0, 100) of 99" in str(reason(sender))
    until(receiver.poll, FAILED)
    hand_over(source, target)


def _keys() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 2), (2, 1), (1, 2)])
def test_each_server_has_a_key_of_its_own(prefill: int, decode: int) -> None:
    """All ranks of a server read the same configuration, and so the same key."""
    ours, theirs = _keys(), _keys()
    keys = tuple({"keys": {"secret": secret, "allow": [ours[0], theirs[0]]}} for _, secret in (ours, theirs))
    with sides("mha", prefill, decode, own=(keys[0], keys[1])) as (sources, targets):
        assert {parse_endpoint(side.link.address).key for side in targets} == {theirs[0]}
        move(sources, targets, Lists.draw(sources[0], N, 8), Lists.draw(targets[0], N, 9), N, [48])


def test_a_key_that_is_not_allowed_fails_the_request_with_the_reason() -> None:
    ours, theirs = _keys(), _keys()
    own = (
        {"keys": {"secret": ours[1], "allow": [ours[0]]}},
        {"keys": {"secret": theirs[1], "allow": [ours[0], theirs[0]]}},
    )
    with sides("mha", own=own) as (_, (target,)):
        target.timeouts = target.timeouts._replace(waiting=3.0)
        receiver = ask(target, next(rooms), Lists.draw(target, N, 10), N)
        until(receiver.poll, FAILED)
        assert "the limit is" in str(reason(receiver))


# DP ranks.


def test_a_request_goes_to_the_dp_rank_of_prefill_that_sglang_names() -> None:
    with sides("mha") as ((first,), (target,)), sides("mha") as ((second,), _):
        names = [Instance(str(number), (side.link.address,)) for number, side in enumerate((first, second))]
        target.prefill_info_table[ADDRESS] = Prefill(tuple(names))
        first.dp, second.dp = (0, 2), (1, 2)
        for number, source in enumerate((first, second)):
            source.fill(number)
            room = 2 * next(rooms) + number
            ours, theirs = Lists.draw(source, N, 11), Lists.draw(target, N, 12)
            sender, receiver = meet(source, target, room, theirs, N, dp=room % 2)
            send(sender, source, ours, N, [])
            until(receiver.poll, SUCCESS)
            for a, b in zip(source.buffers("kv"), target.buffers("kv"), strict=True):
                assert np.array_equal(a[ours.pages], b[theirs.pages])


def test_a_dp_rank_that_decode_will_not_look_at_fails_the_request(pair: tuple[Side, Side]) -> None:
    source, target = pair
    with mock.patch.object(source, "dp", (0, 2)):
        sender = source.sender(2 * next(rooms) + 1)
    assert sender.poll() == FAILED
    assert "name 'disagg_prefill_dp_rank' in the request" in str(reason(sender))
    receiver = target.receiver(next(rooms), N)
    receiver.init(1)
    assert receiver.poll() == FAILED
    assert "DP rank 1 of the prefill server at 127.0.0.1:1, which has 1" in str(reason(receiver))


# Retraction for new weights.


def _retracted(target: Side, at: str, **payload: Any) -> Any:
    """A request that decode has retracted, with the address of prefill's HTTP port."""
    target.prefill_info_table[ADDRESS].http_port = int(at.partition(":")[2])
    receiver = ask(target, next(rooms), Lists.draw(target, N, 13), N)
    target.submit_prefill_recompute(receiver, payload)
    return receiver


def test_prefill_is_asked_to_compute_a_retracted_request_anew(pair: tuple[Side, Side]) -> None:
    seen = []

    def answer(path: str, body: bytes) -> tuple[int, bytes]:
        seen.append((path, json.loads(body)))
        return 200, b"{}"

    with answering(answer) as at:
        receiver = _retracted(pair[1], at, rid="a", input_ids=[5, 6])
        until(lambda: SUCCESS if seen else WAITING, SUCCESS)
    rank = {"routed_dp_rank": 0, "disagg_prefill_dp_rank": 0}
    assert seen == [("/generate", {"rid": "a", "input_ids": [5, 6], **rank})]
    assert receiver.poll() not in (FAILED, SUCCESS)
    receiver.abort()


def test_a_request_that_prefill_will_not_compute_anew_fails_with_the_reason(pair: tuple[Side, Side]) -> None:
    with answering(lambda *asked: (400, b'{"error": "too long"}')) as at:
        receiver = _retracted(pair[1], at)
        until(receiver.poll, FAILED)
    assert "prefill was to compute a retracted request anew, and did not" in str(reason(receiver))
    assert "400" in str(reason(receiver))
    assert "too long" in str(reason(receiver))


def test_one_rank_of_decode_asks_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = mock.Mock()
    monkeypatch.setattr(Side, "_ensure_prefill_recompute_executor", lambda side: executor)  # the name is SGLang's
    with sides("mha", 1, 2) as (_, targets):
        for target in targets:
            receiver = target.receiver(next(rooms), N)
            receiver.init(0)
            target.submit_prefill_recompute(receiver, {})
        executor.submit.assert_called_once()
