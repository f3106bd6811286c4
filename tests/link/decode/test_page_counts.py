"""A decode engine that knows how many pages a request has, and not how many tokens: prefill says that."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.helpers.links import Rank, link_of
from tests.helpers.peers import until
from tests.helpers.pools import Aux, Component, Kv, Mamba, Memory

import statelink
from statelink import Pages, Status, state
from statelink.errors import RoomError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.link.conftest import TwoEngines

PAGE = 16


@pytest.mark.parametrize("tokens", [49, 50, 64])
@pytest.mark.parametrize("when", ["at once", "later"])
def test_prefill_says_how_many_tokens_these_pages_have(tokens: int, when: str) -> None:
    source, target = Rank("prefill", 1), Rank("decode")
    with (
        source.open({"backend": "tcp"}, role="prefill") as prefill,
        target.open({"backend": "tcp"}, role="decode") as d,
    ):
        sending = prefill.send(7, tokens)
        items = {"kv": range(20, 24)}
        receiving = d.receive(7, prefill.address, items=items if when == "at once" else None)
        if when == "later":
            receiving.accept(items)
        assert receiving.report.tokens == 0  # it is not known
        until(lambda: sending.status is Status.WAITING)
        sending.push({"kv": [0, 1]}, span=(0, 32))
        sending.push({"kv": [2, 3]})
        assert receiving.wait(20) is sending.wait(20) is Status.SUCCEEDED, receiving.reason
        assert receiving.tokens == receiving.report.tokens == tokens
    expected = np.zeros_like(target.arrays)
    expected[:, 20:24] = source.arrays[:, :4]
    np.testing.assert_array_equal(target.arrays, expected)


@pytest.mark.parametrize(("tokens", "prefix", "says"), [(48, 0, "49 to 64"), (65, 0, "49 to 64"), (80, 32, "81 to 96")])
def test_another_number_of_pages_fails_the_room(tokens: int, prefix: int, says: str) -> None:
    with link_of("prefill") as prefill, link_of("decode") as decode:
        sending = prefill.send(7, tokens)
        receiving = decode.receive(7, prefill.address, items={"kv": [4, 5, 6, 7]}, prefix=prefix)
        assert receiving.wait(20) is sending.wait(20) is Status.FAILED
        assert sending.reason is not None
        said = f"{tokens} on prefill, {says} on decode, by the number of its pages"
        assert (sending.reason.code, sending.reason.cause) == ("room.tokens", said)
        # All pages are there already: that is a number of tokens, too.
        sending, receiving = prefill.send(8, 32), decode.receive(8, prefill.address, items={}, prefix=32)
        sending.push({})
        assert receiving.wait(20) is sending.wait(20) is Status.SUCCEEDED
        assert receiving.tokens == 32


def test_one_side_has_to_know() -> None:
    with link_of("prefill") as prefill, link_of("decode") as decode:
        sending, receiving = prefill.send(7), decode.receive(7, prefill.address, items={"kv": [1, 2]})
        assert receiving.wait(20) is sending.wait(20) is Status.FAILED
        assert receiving.reason is not None
        assert receiving.reason.code == "room.tokens"
        assert "decode knows its pages only: 17 to 32" in receiving.reason.cause


POOLS = (Kv(layers=(0, 1), pages=32), Mamba(), Aux())


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(("source", "target"), [(16, 64), (64, 16)])
def test_pages_of_other_sizes(tmp_path: Path, source: int, target: int, staged: bool) -> None:
    """Prefill's pages are smaller, so that decode's count leaves open how many of them come; or larger."""
    ours, theirs = ((Kv(layers=(0, 1), pages=32, page=size), *POOLS[1:]) for size in (source, target))
    here, there = Memory(tmp_path / "prefill", ours), Memory(tmp_path / "decode", theirs)
    here.fill(1)
    config: dict[str, Any] = {"backend": "tcp", "inspect": False, "verify": "digest"}
    if staged:
        config["staging"] = {"mode": "always", "ring_bytes": 1 << 18, "parcel_bytes": 1 << 13}
    tokens = 150
    with (
        statelink.open({"role": "prefill", **config}, here.inventory("prefill")) as prefill,
        statelink.open({"role": "decode", **config}, there.inventory("decode")) as decode,
    ):
        sending = prefill.send(7, tokens)
        sending.push({"kv": range(-(-tokens // source)), "mamba": [1], "aux": [2]})
        pages = list(range(5, 5 + -(-tokens // target)))
        receiving = decode.receive(7, prefill.address, items={"kv": pages, "mamba": [3], "aux": [4]})
        assert receiving.wait(20) is sending.wait(20) is Status.SUCCEEDED, receiving.reason
        assert receiving.report.moved == sending.report.moved or staged
    for label, array in there.arrays["kv"].items():
        sent = here.arrays["kv"][label].reshape(-1, *array.shape[2:])[:tokens]
        np.testing.assert_array_equal(array[pages].reshape(-1, *array.shape[2:])[:tokens], sent)
    for name, at, to in (("mamba", 1, 3), ("aux", 2, 4)):
        for label, array in there.arrays[name].items():
            np.testing.assert_array_equal(array[to], here.arrays[name][label][at])


def test_what_depends_on_more_than_pages_is_refused_by_name(tmp_path: Path) -> None:
    pools: tuple[Component, ...] = (Kv(layers=(0,)), Kv(name="swa", layers=(1,), window=20))
    memory = Memory(tmp_path / "decode", pools)
    config: dict[str, Any] = {"role": "decode", "backend": "tcp", "inspect": False}
    with (
        link_of("prefill") as prefill,
        statelink.open(config, memory.inventory("decode")) as decode,
    ):
        with pytest.raises(RoomError, match="pages of component 'swa' must arrive is not known") as caught:
            decode.receive(7, prefill.address)
        assert caught.value.code == "room.tokens"
        assert decode.snapshot()["rooms"] == {status.name.lower(): 0 for status in Status}
        decode.receive(7, prefill.address, 40).abort()


def test_pages_of_one_token_say_the_number_and_with_it_the_window(tmp_path: Path) -> None:
    pools = (Kv(layers=(0,), page=1, pages=64), Kv(name="swa", layers=(1,), page=4, pages=32, window=10))
    source, target = (Memory(tmp_path / name, pools) for name in ("prefill", "decode"))
    source.fill(1)
    config: dict[str, Any] = {"backend": "tcp", "inspect": False}
    with (
        statelink.open({"role": "prefill", **config}, source.inventory("prefill")) as prefill,
        statelink.open({"role": "decode", **config}, target.inventory("decode")) as decode,
    ):
        receiving = decode.receive(7, prefill.address)
        with pytest.raises(RoomError, match="3 items of component 'swa'"):
            receiving.accept({"kv": range(10, 31), "swa": [1, 2, 3]})
        receiving.accept({"kv": range(10, 31), "swa": Pages([1, 2, 3, 4], 8)})
        until(lambda: receiving.tokens == 21)
        sending = prefill.send(7)  # it takes the number from decode, which knows it by now
        sending.push({"kv": range(21), "swa": [4, 5, 6, 7]}, span=(0, 21), last=True)
        assert receiving.wait(20) is sending.wait(20) is Status.SUCCEEDED, receiving.reason
    for name, sent, arrived in (("kv", range(21), range(10, 31)), ("swa", (4, 5, 6, 7), (1, 2, 3, 4))):
        for label, array in target.arrays[name].items():
            np.testing.assert_array_equal(array[list(arrived)], source.arrays[name][label][list(sent)])


def test_prefill_ranks_that_disagree_fail_the_room() -> None:
    """Both numbers fit decode's pages."""
    whole = np.zeros((2, 8, PAGE, 2, 8), np.uint8)
    halves = [np.ascontiguousarray(whole[:, :, :, rank : rank + 1]) for rank in range(2)]
    kept = []
    with ExitStack() as stack:
        for rank, half in enumerate(halves):
            pages = state.kv_pages({0: (half[0], half[1])}, heads=2, tp=(rank, 2))
            inventory = state.describe("prefill", [pages], rank=rank, ranks=2)
            config = {"role": "prefill", "backend": "tcp", "inspect": False}
            kept.append(stack.enter_context(statelink.open(config, inventory)))
        inventory = state.describe("decode", [state.kv_pages({0: (whole[0], whole[1])}, heads=2)])
        decode = stack.enter_context(statelink.open({"role": "decode", "backend": "tcp"}, inventory))
        for room, second, ends in ((7, 50, Status.SUCCEEDED), (8, 51, Status.FAILED)):
            sent = [link.send(room, tokens) for link, tokens in zip(kept, (50, second), strict=True)]
            receiving = decode.receive(room, [link.address for link in kept], items={"kv": [4, 5, 6, 7]})
            for sending in sent:
                sending.push({"kv": [0, 1, 2, 3]})
            assert receiving.wait(20) is ends
        assert receiving.reason is not None
        assert receiving.reason.code == "room.tokens"
        assert {"50", "51"} <= set(receiving.reason.cause.split())


def test_over_every_backend(two_engines: TwoEngines) -> None:
    pools = (Kv(), Mamba(), Aux())
    made = two_engines.pair(pools, pools)
    for tokens, prefix in ((200, 0), (193, 64), (208, 0)):
        case = made.case(tokens, prefix)
        receiving = made.decode.receive(case.room, made.prefill.address, items=case.target, prefix=case.prefix)
        sending = made.send(case)
        made.push(sending, case, 96)
        made.ended(case, receiving, sending)
        assert receiving.see().report.tokens == tokens
