"""What prefill takes from decode's prefix cache, over SGLang's real pools: which bytes, for how long, and what not."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.linkers import Rank, hashes, linkers
from support.newest import OLDER
from support.sides import Lists

from statelink.errors import ConfigError
from statelink_sglang.backend import GRACE_SECONDS, MOST_KEYS, VARIABLE, Known, Offered, Offers, OfferTable

pytestmark = [
    pytest.mark.smoke,
    pytest.mark.usefixtures("sglang_context"),
    pytest.mark.skipif(OLDER, reason="this SGLang loads no linker by its name"),
]

PAGES = 7
KEYS = hashes("first", PAGES)


@pytest.fixture(autouse=True)
def digests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, '{"backend": "tcp", "verify": "digest"}')


def _until(found: Any, expected: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while (seen := found()) != expected:
        assert time.monotonic() < end, seen
        time.sleep(0.01)


def _filled(decode: Rank, prefill: Rank) -> tuple[Lists, Lists]:
    decode.side.fill(1)
    return Lists.draw(decode.side, PAGES * decode.page, 2), Lists.draw(prefill.side, PAGES * prefill.page, 3)


@pytest.mark.parametrize("prefix", [0, 3])
@pytest.mark.parametrize("kind", ["mha", "mla", "dsa", "swa", "hybrid", "gdn"])
def test_prefill_gets_every_byte_of_what_decode_offers_and_no_other(kind: str, prefix: int) -> None:
    with linkers(kind) as (decode, prefill):
        ours, theirs = _filled(decode, prefill)
        assert decode.offer(ours, KEYS)
        whole = [PAGES - prefix]
        # Recurrent state is that of the end, and a window has to be held whole.
        _until(lambda: prefill.lookup(KEYS, prefix)[-1:], whole)
        assert prefill.load(theirs, KEYS, prefix)
        assert prefill.forward()
        for part in (part for part in decode.side.parts if part != "aux"):
            sent, arrived = (
                each.indices(part, rank.side, PAGES * rank.page, prefix * rank.page)
                for each, rank in ((ours, decode), (theirs, prefill))
            )
            for a, b in zip(decode.side.buffers(part), prefill.side.buffers(part), strict=True):
                assert np.array_equal(a[sent], b[arrived]), part
                assert not b[np.setdiff1d(np.arange(len(b)), arrived)].any(), part
        assert not prefill.offer(theirs, KEYS)


def test_another_history_gets_its_longest_equal_beginning() -> None:
    with linkers("mla") as (decode, prefill):
        ours, theirs = _filled(decode, prefill)
        decode.offer(ours, KEYS)
        other = [*KEYS[:4], *hashes("second", 3)]
        _until(lambda: prefill.lookup(other), [1, 2, 3, 4])
        assert prefill.lookup(hashes("second", 3)) == []
        assert prefill.load(theirs, other[:4])
        assert not prefill.forward(waits=False)  # it has computed without its history
        assert prefill.load(theirs, other[:4])
        assert prefill.forward()
        for a, b in zip(decode.side.buffers("kv"), prefill.side.buffers("kv"), strict=True):
            assert np.array_equal(a[ours.pages[:4]], b[theirs.pages[:4]])


@pytest.mark.parametrize(
    ("kind", "before", "without", "offered"),
    [
        ("mla", 2, 0, [3, 4, 5, 6, 7]),
        ("hybrid", 2, 0, [7]),
        ("swa", 0, 0, [1, 2, 3, 4, 5, 6, 7]),
        ("swa", 0, 4, [6, 7]),
        ("swa", 0, 6, []),
        ("swa", 5, 0, [7]),
    ],
)
def test_only_state_that_is_held_whole_is_offered(kind: str, before: int, without: int, offered: list[int]) -> None:
    """The window of ``swa`` is two pages: before a node's end, it may begin in memory that is not pinned."""
    with linkers(kind) as (decode, prefill):
        ours, _ = _filled(decode, prefill)
        decode.offer(ours, KEYS, before, without)
        known = hashes("another", 1)
        decode.offer(ours._replace(pages=ours.pages[:1], window=ours.window[:1]), known)
        _until(lambda: prefill.lookup(known), [1])
        assert prefill.lookup(KEYS) == offered


def test_an_offer_ends_with_its_lease_and_prefill_is_told_before() -> None:
    with linkers("mla", lease=3 * GRACE_SECONDS) as (decode, prefill):
        ours, theirs = _filled(decode, prefill)
        begun = time.monotonic()
        decode.offer(ours, KEYS)
        _until(lambda: prefill.lookup(KEYS)[-1:], [PAGES])
        _until(lambda: prefill.lookup(KEYS), [])
        assert decode.linker.num_completed_offloads() == 0
        assert not prefill.load(theirs, KEYS)  # it is computed
        _until(decode.linker.num_completed_offloads, 1)
        assert time.monotonic() - begun > 3 * GRACE_SECONDS
        assert decode.linker.pop_completed_offload() is False  # so SGLang offers the node again
        assert decode.linker.num_completed_offloads() == 0


def test_a_load_of_what_has_ended_fails_at_once_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with linkers("mla") as (decode, prefill):
        ours, theirs = _filled(decode, prefill)
        decode.offer(ours, KEYS)
        _until(lambda: prefill.lookup(KEYS)[-1:], [PAGES])
        assert prefill.load(theirs, KEYS)
        decode.linker.reset()
        assert not prefill.forward()
        assert "decode's prefix cache does not offer this" in caplog.text
        _until(lambda: prefill.lookup(KEYS), [])


def test_the_offers_of_a_server_that_is_gone_are_not_used() -> None:
    with linkers("mla") as (decode, prefill):
        ours, theirs = _filled(decode, prefill)
        decode.offer(ours, KEYS)
        _until(lambda: prefill.lookup(KEYS)[-1:], [PAGES])
        assert prefill.load(theirs, KEYS)
        assert prefill.linker.cancel_queued_load("request")
        assert prefill.linker.start_layer_wise_loading() == -1
        decode.linker.shut()
        _until(lambda: prefill.lookup(KEYS), [])


def _offers(lease: float = 60.0, count: int = 3) -> Offers:
    offers = Offers(lease)
    for number in range(count):
        offer = offers.add([f"{number}a", f"{number}b"], np.arange(2), None, None, [])
        offer.tensors = SimpleNamespace(numpy=lambda: np.arange(2)), None, None
        offer.settle(0, slots=False)
        offers.settled(offer)
    return offers


def test_offers_are_given_back_from_the_oldest_on_but_not_while_they_are_read() -> None:
    offers = _offers()
    found = offers.take("0b")
    assert found is not None
    assert found[1] == 2
    offers.give_back(17, 16, at_once=False)  # two pages each
    _, told, gone = offers.news([0, 1, 2])
    assert (told, gone) == ([], [0])
    assert offers.take("0a") is not None  # prefill may have been told of it
    offers.give_back(33, 16, at_once=True)
    assert offers.ended() == 0
    for _ in range(2):
        offers.put_back(found[0])
    assert offers.ended() == 2
    assert offers.take("0b") is offers.take("1b") is None
    assert offers.clear(0.0)
    assert offers.news([2]) == (offers.news([])[0], [], [2])


def test_the_bootstrap_server_tells_what_changed_in_parts_and_forgets_nothing_of_it() -> None:
    table, most = OfferTable(), MOST_KEYS * 2 // 3
    addresses = ["tcp://127.0.0.1:1"]

    def put(number: int, keys: list[str], gone: tuple[int, ...] = (), owner: str = "key") -> str:
        return table.put(Offered("decode", addresses, [(number, 60.0, 0, keys)] if keys else [], [*gone]), owner)

    for number in range(3):
        assert not put(number, [f"{number}"] * most)
    assert "another key" in put(9, ["x"], owner="other")
    seen, since = list[int](), 0
    while (news := table.news(Known(table.name, since, 0.0)))["version"] != since:
        seen += [number for _, number, *_ in news["offers"]]
        since = news["version"]
    assert seen == [0, 1, 2]
    put(0, [], (1,))
    assert table.news(Known(table.name, since, 60.0))["offers"] == [["decode", 1, 0.0, 0, []]]
    assert len(table.news(Known("another table's", since, 60.0))["offers"]) == 2


@pytest.mark.parametrize(
    ("mode", "backend", "options", "said"),
    [
        ("null", "statelink", {}, "the mode 'null'"),
        ("decode", "nixl", {}, "the transfer backend 'nixl'"),
        ("decode", "statelink", {"leese": 1}, "'leese'"),
        ("decode", "statelink", {"lease": 0}, "no seconds for 'lease'"),
    ],
)
def test_a_linker_that_cannot_work_is_refused(mode: str, backend: str, options: dict[str, Any], said: str) -> None:
    from statelink_sglang.linker import Linker

    args = SimpleNamespace(disaggregation_mode=mode, disaggregation_transfer_backend=backend)
    with pytest.raises(ConfigError, match=said):
        Linker(args, None, components=(), extra_config=options)


@pytest.mark.parametrize(("kind", "said"), [("qsa", "does not hold qsa_"), ("mxfp8", "does not hold block_scale")])
def test_state_that_sglangs_prefix_cache_does_not_hold_is_refused(kind: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said), linkers(kind):
        pass
