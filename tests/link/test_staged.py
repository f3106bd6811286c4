"""Staged transfers, forced on: the same bytes arrive, whatever the rings' size, and no space is kept."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.helpers import peers
from tests.helpers.expect import carry
from tests.helpers.fleet import FAST, Fleet
from tests.helpers.pools import Mamba, hybrid
from tests.helpers.worker import Host
from tests.link.conftest import FORCED
from tests.link.test_topology import TCP, shards
from tests.link.test_verify import FAULTY, OTHER_PAGES, run_by_layers

import statelink
from statelink import Status, state
from statelink.errors import ConfigError

if TYPE_CHECKING:
    from tests.helpers.engine import LinkHandle
    from tests.helpers.pair import Pair
    from tests.link.conftest import TwoEngines

RINGS = pytest.mark.soak_over("mooncake", why="rings are the link's; the tests above stage over Mooncake")


@pytest.mark.parametrize(("sources", "targets"), [(2, 1), (1, 2)])
def test_unequal_widths(two_engines: TwoEngines, sources: int, targets: int) -> None:
    fleet = Fleet(two_engines, shards(sources), shards(targets), staging=FORCED)
    fleet.run(200)
    fleet.run(200, 64, (96, 160))
    fleet.run(48, 48)


def test_layouts_and_spans(two_engines: TwoEngines) -> None:
    """Pages of other sizes, prefixes, pushes by layers, and every byte compared by digest as well."""
    made = two_engines.pair(verify="digest", staging=FORCED)
    made.run()
    made.run(200, 64, (96, 160))
    made.run(48, 48)
    run_by_layers(made)
    other = two_engines.pair(hybrid(), OTHER_PAGES, verify="digest", staging=FORCED)
    other.run(192, 0, (96,))
    other.run(250, 96)


def ring(link: LinkHandle) -> dict[str, int]:
    found: dict[str, int] = link.snapshot()["strategies"]["staged"]
    return found


def quarantined(link: LinkHandle) -> int:
    """Bytes of a ring that may still be touched, once nothing else of it is lent."""
    peers.until(lambda: 0 < ring(link)["quarantined"] == ring(link)["in_use"])
    return ring(link)["quarantined"]


def reach(link: LinkHandle, **numbers: int) -> None:
    """Wait until a ring stands like this."""
    until = time.monotonic() + 15
    while {name: (seen := ring(link))[name] for name in numbers} != numbers and time.monotonic() < until:
        time.sleep(0.01)
    assert {name: seen[name] for name in numbers} == numbers, seen


@RINGS
def test_many_rooms_and_peers_share_small_rings(two_engines: TwoEngines) -> None:
    """Rings hold two parcels, a request has dozens: everybody waits for everybody, and all of them go through."""
    tight = {**FORCED, "ring_bytes": 48 << 10, "parcel_bytes": 24 << 10}
    first = two_engines.pair(staging=tight)
    peer = first.beside(two_engines.open("prefill", staging=tight, engine=two_engines.engine()))
    pairs = [first, peer]
    rooms = []
    for number in range(6):
        made = pairs[number % 2]
        case = made.case(48)
        receiving, sending = made.begin(case, deadline=60)
        made.push(sending, case, 16)
        rooms.append((made, case, receiving, sending))
    for made, case, receiving, sending in rooms:
        receiving.succeeded(50)
        sending.succeeded()
        carry([made.prefill.memory], made.expected, case)
        made.done(case)
    first.verify()
    peer.verify()
    for link in (first.decode, first.prefill, peer.prefill):
        reach(link, in_use=0, waiting=0, quarantined=0)


@RINGS
def test_who_waits_for_space_holds_no_thread(two_engines: TwoEngines) -> None:
    """Decode is stopped and lends nothing; another decode is served over the same prefill link meanwhile."""
    patient: dict[str, Any] = {"staging": FORCED, "liveness": 60.0}
    made = two_engines.pair(decode_config={"engine": two_engines.engine()}, **patient)
    made.run()
    case = made.case()
    receiving, sending = made.begin(case)
    sending.reach(Status.WAITING)
    made.decode.engine.stop()
    try:
        made.push(sending, case)
        sending.reach(Status.TRANSFERRING)
        other = made.prefill
        decode = two_engines.open("decode", **patient)
        beside = type(made)(other, decode)
        beside.run()
        sending.abort("it takes too long")
        assert "it takes too long" in sending.failed()
        assert sending.wait(quiesced=True).quiesced, "nothing reads its memory while it waits for space"
        reach(made.prefill, in_use=0, quarantined=0)
    finally:
        made.decode.engine.go_on()
    assert "it takes too long" in receiving.failed()
    assert receiving.wait(quiesced=True).quiesced
    made.spoilt(case)
    reach(made.decode, in_use=0, quarantined=0)
    made.run()


def hang(two_engines: TwoEngines, made: Pair, engine: Any) -> tuple[Any, Any, Any]:
    """A request whose first parcel hangs in the library."""
    case = made.case()
    engine.run(FAULTY, "heal")
    engine.run(FAULTY, "plan", "submit", "hang")
    receiving, sending = made.begin(case)
    made.push(sending, case)
    until = time.monotonic() + 15
    while not engine.run(FAULTY, "struck", "hang") and time.monotonic() < until:
        time.sleep(0.01)
    return case, receiving, sending


@RINGS
@pytest.mark.parametrize("by", ["prefill", "decode"])
def test_space_that_may_still_be_touched_is_quarantined(two_engines: TwoEngines, by: str) -> None:
    """On prefill until the transfer has ended; on decode as well, unless its backend can take a grant back."""
    roomy = {**FORCED, "ring_bytes": 256 << 10}
    made = two_engines.pair(backend=f"faulty-{two_engines.backend}", staging=roomy)
    made.run()
    case, receiving, sending = hang(two_engines, made, two_engines.prefill)
    (sending if by == "prefill" else receiving).abort("as planned")
    assert "as planned" in receiving.failed()
    assert "as planned" in sending.failed()
    held = quarantined(made.prefill)
    assert held < roomy["ring_bytes"]
    assert not sending.see().quiesced
    if two_engines.backend == "tcp":
        assert receiving.wait(quiesced=True).quiesced
        reach(made.decode, in_use=0, quarantined=0)
    else:
        quarantined(made.decode)
        assert not receiving.see().quiesced
    small = made.case(32)
    second = made.begin(small)
    made.push(second[1], small)
    for room in reversed(second):
        room.succeeded()  # through what is left of the rings
    made.pardon(case)
    made.arrived(small)
    assert ring(made.prefill)["quarantined"] == held
    two_engines.prefill.run(FAULTY, "heal")
    assert sending.wait(quiesced=True).quiesced
    assert receiving.wait(quiesced=True).quiesced
    for link in (made.prefill, made.decode):
        reach(link, in_use=0, quarantined=0)
    made.spoilt(case)
    made.run()


@TCP
@RINGS
@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_who_waits_for_space_until_the_deadline_says_so(two_engines: TwoEngines, first: str) -> None:
    """Prefill's ring is quarantined whole, by a parcel that hangs: either side names the bytes that are missing."""
    full = {**FORCED, "ring_bytes": 8192, "parcel_bytes": 8192}
    made = two_engines.pair(backend="faulty-tcp", staging=full)
    made.run(16)
    case, receiving, sending = hang(two_engines, made, two_engines.prefill)
    sending.abort("as planned")
    receiving.failed()
    until = time.monotonic() + 10
    while not (held := ring(made.prefill)["quarantined"]) and time.monotonic() < until:
        time.sleep(0.01)
    other = made.case(16)
    rooms = [made.send(other, deadline=1.0 if first == "prefill" else 60.0)]
    rooms.append(made.receive(other, deadline=1.0 if first == "decode" else 60.0))
    made.push(rooms[0], other)
    standing = rf"of this side's staging ring \({held} of its 8192 bytes are in use, {held} of those are quarantined\)"
    wanted = {"prefill": standing, "decode": "that prefill has space for in this side's staging ring"}
    for room in rooms:
        assert re.search(rf"passed its deadline on {first} .* waits for .*\b\d+ bytes {wanted[first]}", room.failed())
    two_engines.prefill.run(FAULTY, "heal")
    for room in (sending, receiving, *rooms):
        assert room.wait(quiesced=True).quiesced
    made.spoilt(case)
    made.spoilt(other)


@RINGS
def test_prefill_dies_in_the_middle(two_engines: TwoEngines) -> None:
    """Its space in decode's ring is lent again when it is certain that it writes no more."""
    two_engines.untidy = True
    engine = two_engines.engine()
    engine(Host.warm, f"faulty-{two_engines.backend}")
    config: dict[str, Any] = {"backend": f"faulty-{two_engines.backend}", "staging": FORCED, **FAST}
    made = two_engines.pair(**config)
    doomed = made.beside(two_engines.open("prefill", engine=engine, **config))
    case, receiving, _ = hang(two_engines, doomed, engine)
    reach(made.decode, quarantined=0)
    assert ring(made.decode)["in_use"]
    engine.kill()
    assert "lost" in receiving.failed() or "ended" in receiving.failed()
    assert receiving.wait(quiesced=True).quiesced
    reach(made.decode, in_use=0, waiting=0, quarantined=0)
    made.pardon(case)
    made.done(case)
    made.run()


@TCP
@RINGS
def test_what_can_never_fit_fails_that_room_alone(two_engines: TwoEngines) -> None:
    """A recurrent state of a layer is a piece that is not divided; pages are, however small the rings."""
    tiny = {"mode": "always", "ring_bytes": 3000, "parcel_bytes": 1 << 20}
    pools = hybrid(mamba=Mamba(inner=(16, 16)))
    made = two_engines.pair(pools, pools, staging=tiny)
    case = made.case(64)
    receiving, sending = made.begin(case)
    made.push(sending, case)
    for room in (receiving, sending):
        text = room.failed()
        assert "4096 bytes cannot be divided, and a parcel has 3000 at most" in text
        assert "parcel_bytes and ring_bytes on prefill allow 3000, decode's ring 3000: make" in text
        assert room.wait(quiesced=True).quiesced
    made.spoilt(case)
    for link in (made.prefill, made.decode):
        reach(link, in_use=0, waiting=0, quarantined=0)
    beside = two_engines.pair(pools, pools, staging={**tiny, "components": {"mamba": "never"}})
    beside.run()


@TCP
def test_one_side_stages(two_engines: TwoEngines) -> None:
    made = two_engines.pair(staging=FORCED, decode_config={"staging": None})
    case = made.case()
    text = made.receive(case, deadline=20).failed()
    assert "with different strategies" in text
    assert "'direct' on decode, 'staged' on prefill" in text
    assert "configure the same staging" in text
    made.done(case)


@TCP
@RINGS
@pytest.mark.parametrize(("mode", "dim", "staged"), [("auto", 8, True), ("auto", 16384, False), ("never", 8, False)])
def test_chosen_by_the_size_of_blocks(two_engines: TwoEngines, mode: str, dim: int, staged: bool) -> None:
    """Two tokens' worth of heads are a block: small ones are staged, large ones are not, the bytes are the same."""
    config = {"backend": "tcp", "staging": {"mode": mode}}
    ranks = (("p", 0), ("p", 1), ("d", 0))
    shapes = {(role, rank): (4, 8, 2 - (role == "p"), dim) for role, rank in ranks}
    pages = {
        each: [np.random.default_rng([each[1], tensor]).integers(0, 255, shape, np.uint8) for tensor in range(2)]
        for each, shape in shapes.items()
    }

    def opened(role: str, rank: int, ranks: int) -> statelink.Link:
        part = state.kv_pages({0: (pages[role, rank][0], pages[role, rank][1])}, heads=2, tp=(rank, ranks))
        inventory = state.describe(role, [part], rank=rank, ranks=ranks)
        return statelink.open({"role": "prefill" if role == "p" else "decode", **config}, inventory)

    with opened("p", 0, 2) as one, opened("p", 1, 2) as two, opened("d", 0, 1) as decode:
        for link in (one, two):
            link.send(1, 32).push({"kv": [3, 1, 0, 2]})
        receiving = decode.receive(1, [one.address, two.address], 32, {"kv": [0, 1, 2, 3]})
        receiving.wait(20)
        receiving.check()
        assert (receiving.report.moved["kv"].blocks == 2) == staged
        assert receiving.report.moved["kv"].blocks in (2, 2 * 2 * 32)
    for first, second, found in zip(pages["p", 0], pages["p", 1], pages["d", 0], strict=True):
        np.testing.assert_array_equal(found, np.concatenate([first, second], axis=2)[[3, 1, 0, 2]])


def test_bad_configuration() -> None:
    inventory = state.describe("d", [state.aux_rows({"row": np.zeros((4, 8), np.uint8)})])
    config: dict[str, Any] = {"role": "decode", "backend": "tcp"}
    with pytest.raises(ConfigError, match="component 'kv' cannot be staged: this rank has aux") as error:
        statelink.open({**config, "staging": {"components": {"kv": "always"}}}, inventory)
    assert error.value.code == "config.staging"
    with pytest.raises(ConfigError, match="did you mean 'aux'"):
        statelink.open({**config, "staging": {"components": {"auxx": "always"}}}, inventory)
    for huge in (1 << 50, 1 << 62, 1 << 70):  # of address space that no process has, or no index reaches
        with pytest.raises(
            ConfigError, match=f"a staging ring of {huge} bytes .*(.|\n)*make ring_bytes .* smaller"
        ) as error:
            statelink.open({**config, "staging": {"ring_bytes": huge}}, inventory)
        assert error.value.code == "config.staging"
    with pytest.raises(ConfigError, match="ring_bytes of staging must be above zero"):
        statelink.open({**config, "staging": {"ring_bytes": 0}}, inventory)
    with pytest.raises(ConfigError, match="unknown key 'rings' in the table 'staging'"):
        statelink.open({**config, "staging": {"rings": 4}}, inventory)
