"""Prefill without metadata rows, as an engine of another kind: the request names its first token, or fails by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from support.pools import make
from support.sides import ADDRESS, FAILED, SUCCESS, Lists, Side, ask, at, reason, rooms, until

import statelink
from statelink import state
from statelink_sglang.backend import FIRST_TOKEN, describe_pools, first_token

if TYPE_CHECKING:
    from statelink import Link

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("sglang_context")]

N, TOKEN = 40, 77


def request(params: Any, **more: Any) -> Any:
    return SimpleNamespace(sampling_params=SimpleNamespace(custom_params=params), **more)


@contextlib.contextmanager
def without_rows(optional: bool = True) -> Iterator[tuple[Link, Side]]:
    """A prefill link that has pages only, and SGLang's decode."""
    source, made = (make("mha", (0, 1)) for _ in range(2))
    for each in (source, made):
        each.kv_args.page_size_of_pool = each.pools.pages.page_size
    pages = [each for each in describe_pools(source.pools, source.kv_args)[0] if each.component.type == "kv"]
    inventory = state.describe("another", pages, model="tiny")
    target = Side("decode", made._replace(pools=made.pools._replace(rows_optional=optional)))
    with contextlib.closing(target), statelink.open({"role": "prefill", "backend": "tcp"}, inventory) as link:
        target.prefill_info_table[ADDRESS] = at(link.address)
        yield link, target


def hand(link: Link, target: Side, params: Any, *states: int) -> tuple[Any, Lists]:
    room = next(rooms)
    sending = link.send(room, N)
    sending.push({"kv": list(range(1, 4))})
    lists = Lists.draw(target, N, room)
    receiver = ask(target, room, lists, N, request=request(params))
    end = receiver.poll
    while (found := end()) not in (SUCCESS, FAILED):
        pass
    assert found in states, reason(receiver)
    return receiver, lists


def test_the_row_has_the_token_that_the_request_names() -> None:
    with without_rows() as (link, target):
        for tensor in (target.metadata.output_top_logprobs_val, target.metadata.cached_tokens):
            tensor.fill_(9)  # what an earlier request has left there
        receiver, lists = hand(link, target, {FIRST_TOKEN: TOKEN}, SUCCESS)
        row = target.metadata.get_buf(lists.row)
        assert row[0].tolist() == [TOKEN] + [0] * 15
        assert row[-1][0].item() == receiver.bootstrap_room
        assert not row[1].any()
        assert not row[4].any()


@pytest.mark.parametrize("params", [None, {}, {"first": 1}])
def test_a_request_that_names_no_token_fails_by_name(params: Any) -> None:
    with without_rows() as (link, target):
        receiver, lists = hand(link, target, params, FAILED)
        assert f"the first token is not known: the request's custom_params have no '{FIRST_TOKEN}'" in str(
            reason(receiver)
        )
        assert not target.metadata.bootstrap_room[lists.row].any()


def test_without_the_option_the_servers_do_not_match() -> None:
    with without_rows(optional=False) as (_, target):
        receiver = ask(target, next(rooms), Lists.draw(target, N, 1), N, request=request({FIRST_TOKEN: TOKEN}))
        until(lambda: -1 if receiver.poll() == FAILED else receiver.poll(), -1)
        assert "component aux (type aux): present on decode, absent on prefill" in str(reason(receiver))


def test_rows_that_prefill_sends_are_left_as_they_are() -> None:
    made = [make("mha", (0, 1)) for _ in range(2)]
    for each in made:
        each.kv_args.page_size_of_pool = each.pools.pages.page_size
    source, target = (
        Side(role, each._replace(pools=each.pools._replace(rows_optional=True)))
        for role, each in zip(("prefill", "decode"), made, strict=True)
    )
    with contextlib.closing(source), contextlib.closing(target):
        target.prefill_info_table[ADDRESS] = at(source.link.address)
        source.metadata.output_ids[3, 0] = 5
        room = next(rooms)
        sending = source.link.send(room, N)
        sending.push({"kv": list(range(1, 4)), "aux": 3})
        lists = Lists.draw(target, N, room)
        receiver = ask(target, room, lists, N, request=request({FIRST_TOKEN: TOKEN}))
        until(receiver.poll, SUCCESS)
        assert target.metadata.output_ids[lists.row, 0].item() == 5


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (request({FIRST_TOKEN: "7"}), "is '7', and no token of 512"),
        (request({FIRST_TOKEN: True}), "is True, and no token"),
        (request({FIRST_TOKEN: -1}), "is -1, and no token"),
        (request({FIRST_TOKEN: 512}), "is 512, and no token"),
        (request({FIRST_TOKEN: 7}, return_logprob=True), "'return_logprob', which is not known"),
        (request([7]), "have no 'statelink_first_token'"),
    ],
)
def test_a_first_token_that_cannot_be_is_refused(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        first_token(given, 512)
