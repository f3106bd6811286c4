"""Several ranks on a side, over real links: TP of either ratio, PP, ranks without a part; and layouts that differ.

A process hosts the links of one side. What replicated ranks hold is the same bytes on each, as it is in an engine.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from tests.helpers import peers
from tests.helpers.expect import carry
from tests.helpers.fleet import Fleet, only
from tests.helpers.pools import Aux, Component, Index, Kv, Mamba, hybrid

from statelink import Status

if TYPE_CHECKING:
    from tests.link.conftest import TwoEngines

TCP = pytest.mark.parametrize("backend", ["tcp"], indirect=True, scope="session")
TCP_AND_NIXL = pytest.mark.parametrize("backend", ["tcp", "nixl"], indirect=True, scope="session")


def sharded(rank: int, width: int, **changes: Component | None) -> tuple[Component, ...]:
    """A rank's pools where attention and recurrent states are sharded, and the others are not."""
    swa = Kv(name="swa", layers=(6, 7), pages=30, heads=2, window=72, v_dim=24, tp=(rank, width))
    return hybrid(**{"kv": Kv(tp=(rank, width)), "swa": swa, "mamba": Mamba(tp=(rank, width)), **changes})


def shards(width: int) -> list[tuple[Component, ...]]:
    """The same of each rank."""
    return [sharded(rank, width) for rank in range(width)]


@TCP_AND_NIXL
@pytest.mark.parametrize(("sources", "targets"), [(2, 1), (1, 2)])
def test_tensor_parallel(two_engines: TwoEngines, sources: int, targets: int) -> None:
    fleet = Fleet(two_engines, shards(sources), shards(targets))
    fleet.run(200)
    fleet.run(200, 64, (96, 160))
    fleet.run(48, 48)


@TCP
@pytest.mark.parametrize(("sources", "targets"), [(4, 2), (2, 4)])
def test_tensor_parallel_of_more_ranks(two_engines: TwoEngines, sources: int, targets: int) -> None:
    """With more ranks than the window has heads: some of them hold copies."""
    fleet = Fleet(two_engines, shards(sources), shards(targets))
    fleet.run(200, 16)


def staged(stage: int) -> tuple[Component, ...]:
    """One of two pipeline stages: layers by name, and metadata on the last one only."""
    if stage == 0:
        return hybrid(
            kv=Kv(layers=(0, 1)), swa=Kv(name="swa", layers=(6,), pages=30, heads=2, window=72, v_dim=24),
            dsa=Index(layers=(0,)), mamba=Mamba(layers=(4,)), aux=None,
        )  # fmt: skip
    return hybrid(
        kv=Kv(layers=(2, 3)), swa=Kv(name="swa", layers=(7,), pages=30, heads=2, window=72, v_dim=24),
        dsa=Index(layers=(1, 2), shared=(1,)), mamba=Mamba(layers=(5,)),
    )  # fmt: skip


@TCP_AND_NIXL
def test_pipeline_stages(two_engines: TwoEngines) -> None:
    fleet = Fleet(two_engines, [staged(0), staged(1)], [hybrid()])
    fleet.run(200)
    fleet.run(200, 96, (112,))


@TCP
def test_pipeline_stages_on_decode(two_engines: TwoEngines) -> None:
    fleet = Fleet(two_engines, [hybrid()], [staged(0), staged(1)])
    fleet.run(200)


@TCP
def test_a_source_rank_without_a_part(two_engines: TwoEngines) -> None:
    """Both ranks hold the same, and there is too little to share: one writes nothing, and succeeds all the same."""
    one = (Index(name="dsa", layers=(0,)),)
    fleet = Fleet(two_engines, [one, one], [one])
    case = fleet.case(64)
    rooms = [*fleet.receive(case), *fleet.send(case)]
    moved = [room.succeeded().report.moved for room in rooms[1:]]
    assert sorted(len(each) for each in moved) == [0, 1]
    carry(fleet.prefill.memories, fleet.expected[0], case)
    assert fleet.decode.memories[0].differences(fleet.expected[0]) == []


@TCP
def test_replicated_sources_share_the_load(two_engines: TwoEngines) -> None:
    pools = (Kv(layers=tuple(range(8)), heads=2, replicated=True), Aux())
    fleet = Fleet(two_engines, [pools, pools], [pools])
    case = fleet.case(64)
    rooms = [*fleet.receive(case), *fleet.send(case)]
    shares = [room.succeeded().report.moved["kv"].nbytes for room in rooms[1:]]
    assert shares[0] == shares[1]


@TCP
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("who", [0, 1])
def test_one_decode_rank_gives_up(two_engines: TwoEngines, who: int, early: bool) -> None:
    """All the others are told, whether prefill had opened the room or not."""
    fleet = Fleet(two_engines, [hybrid()], shards(2))
    fleet.run(64)
    case = fleet.case(64)
    receiving = fleet.receive(case)
    for room in receiving:
        room.reach(Status.WAITING)
    if early:
        time.sleep(0.2)  # both requests are there, as far as one can tell
        receiving[who].abort("one of us has left")
        receiving[who].failed()
        (sending,) = fleet.send(case)
    else:
        sending = fleet.prefill.links[0].send(case.room, 64)
        sending.reach(Status.WAITING)
        receiving[who].abort("one of us has left")
    for room in (*receiving, sending):
        assert "one of us has left" in room.failed(10)
        assert room.wait(10, quiesced=True).quiesced
    fleet.expected = [memory.copy() for memory in fleet.decode.memories]
    fleet.run(64)


@TCP
@pytest.mark.parametrize("order", ["ask open leave", "ask leave open", "leave ask open", "leave open ask"])
@pytest.mark.parametrize("who", [0, 1])
def test_one_decode_rank_leaves_before_it_asks(two_engines: TwoEngines, who: int, order: str) -> None:
    """Nobody waits for it, in whatever order prefill hears of the room; and the room's id can be used again."""
    fleet = Fleet(two_engines, [hybrid()], shards(2))
    fleet.run(64)
    case = fleet.case(64)
    (prefill,) = fleet.prefill.links
    leaver, other = (fleet.decode.links[rank] for rank in (who, 1 - who))
    rooms = [leaver.receive(case.room, fleet.peer, 64, deadline=30)]
    for step in order.split():
        if step == "ask":
            rooms.append(other.receive(case.room, fleet.peer, 64, only(case.target, other), deadline=30))
            if order.startswith("ask"):
                peers.until(lambda: prefill.snapshot()["load"]["pending_requests"] == 1)
        elif step == "open":
            rooms.append(prefill.send(case.room, 64, deadline=30))
            if order == "ask open leave":
                peers.until(lambda: "the requests of 1 more decode ranks" in str(prefill.snapshot()["oldest"]))
        else:
            rooms[0].abort("one of us has left")
            rooms[0].failed(10)
    for room in rooms:
        assert "one of us has left" in room.failed(10)
        assert room.wait(10, quiesced=True).quiesced
    again = [*fleet.receive(case), *fleet.send(case)]
    for room in again:
        room.succeeded()
    fleet.expected = [memory.copy() for memory in fleet.decode.memories]
    fleet.run(64)


@TCP
def test_one_prefill_rank_fails(two_engines: TwoEngines) -> None:
    fleet = Fleet(two_engines, shards(2), [hybrid()])
    case = fleet.case(64)
    receiving = fleet.receive(case)
    first, second = (link.send(case.room, 64) for link in fleet.prefill.links)
    first.push(case.span(0, 64, fleet.prefill.links[0].memory.pools))
    second.reach(Status.WAITING)
    second.abort("this rank is broken")
    for room in (*receiving, first, second):
        assert "this rank is broken" in room.failed(10)
        assert room.wait(10, quiesced=True).quiesced
    fleet.expected = [memory.copy() for memory in fleet.decode.memories]
    fleet.run(64)


LAYOUTS: list[tuple[str, Component, Component]] = [
    ("nhd to hnd", Kv(), Kv(order="hnd")),
    ("hnd to nhd", Kv(order="hnd"), Kv()),
    ("pages 16 to 32", Kv(), Kv(page=32)),
    ("pages 32 to 16", Kv(page=32), Kv()),
    ("pages 16 to 24, hnd", Kv(), Kv(page=24, order="hnd")),
    ("another number of pages", Kv(pages=20), Kv(pages=61)),
    ("layers in another order", Kv(layers=(3, 0, 2, 1)), Kv()),
]


@TCP
@pytest.mark.parametrize(("source", "target"), [each[1:] for each in LAYOUTS], ids=[each[0] for each in LAYOUTS])
def test_layouts_differ(two_engines: TwoEngines, source: Component, target: Component) -> None:
    fleet = Fleet(two_engines, [(source, Aux())], [(target, Aux())])
    fleet.run(200)
    fleet.run(240, 96, (96, 192))


@TCP
def test_draft_layers_on_decode_only(two_engines: TwoEngines) -> None:
    """An optional component may be missing on the other side; nobody touches it."""
    draft = Kv(name="draft", layers=(40,), optional=True)
    fleet = Fleet(two_engines, [hybrid()], [hybrid(draft=draft)])
    fleet.run(200)


@TCP
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_metadata_rows_on_one_side_only(two_engines: TwoEngines, side: str) -> None:
    """Prefill's rows go nowhere, and nobody touches decode's; the report says that none moved."""
    rows = Aux(optional=True)
    pools = [(Kv(), rows), (Kv(),)] if side == "prefill" else [(Kv(),), (Kv(), rows)]
    fleet = Fleet(two_engines, pools[:1], pools[1:])
    fleet.run(200)
    case = fleet.case(64)
    (receiving,), (sending,) = fleet.receive(case), fleet.send(case)
    for room in (receiving, sending):
        room.succeeded()
        assert set(room.see().report.moved) == {"kv"}


@TCP
def test_metadata_rows_on_one_side_only_are_refused_unless_they_are_optional(two_engines: TwoEngines) -> None:
    fleet = Fleet(two_engines, [(Kv(),)], [(Kv(), Aux())])
    case = fleet.case(64)
    (receiving,) = fleet.receive(case)
    assert "component aux (type aux): present on decode, absent on prefill" in receiving.failed()


@TCP
def test_a_decode_rank_that_nobody_owes_anything(two_engines: TwoEngines) -> None:
    """It has a draft, which prefill lacks: it succeeds at once, says that nothing moved, and touches nothing."""
    draft = Kv(name="draft", layers=(40,), optional=True)
    fleet = Fleet(two_engines, [hybrid()], [hybrid(), (draft,)])
    case = fleet.case(64)
    idle = fleet.decode.links[1]
    before = idle.memory.copy()
    receiving = idle.receive(case.room, fleet.peer, 64, only(case.target, idle), deadline=60)
    receiving.succeeded(10)
    seen = receiving.see()
    assert seen.quiesced
    assert (seen.report.moved, seen.report.chunks) == ({}, 0)
    assert idle.memory.differences(before) == []
