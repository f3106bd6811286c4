"""`verify = "digest"`: what arrived is compared with what was sent, and a byte that changed on the way is named."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.helpers.expect import carry
from tests.helpers.fleet import Fleet
from tests.helpers.pools import Index, Kv, Memory, hybrid
from tests.link.test_topology import TCP, shards

import statelink
from statelink import state
from statelink.errors import ConfigError, UnsupportedError
from statelink.hints import install_hint
from statelink.link import check_verify

if TYPE_CHECKING:
    from tests.helpers.expect import Case
    from tests.helpers.pair import Pair
    from tests.link.conftest import TwoEngines

pytestmark = pytest.mark.soak_over("mooncake", why="digests are the link's, and Mooncake has no part in them")
FAULTY = "faulty_backends"
OTHER_PAGES = hybrid(kv=Kv(pages=40, page=24, order="hnd"), dsa=Index(layers=(0, 1, 2), shared=(1,), page=32))


def changed(memory: Memory, expected: Memory, before: Memory | None = None) -> list[tuple[str, tuple[int, ...]]]:
    """The bytes that differ: component, and place in its array. What is as it was ``before`` has not arrived."""
    found: list[tuple[str, tuple[int, ...]]] = []
    for name, arrays in memory.arrays.items():
        for label, array in arrays.items():
            wanted = expected.arrays[name][label]
            width = array.itemsize
            unequal = array.view(np.uint8) != wanted.view(np.uint8)
            if before is not None:
                unequal &= array.view(np.uint8) != before.arrays[name][label].view(np.uint8)
            found += [(name, (*at[:-1], at[-1] // width)) for at in np.argwhere(unequal).tolist()]
    return found


def flipped(memory: Memory, expected: Memory) -> tuple[str, tuple[int, ...]]:
    """The one byte that differs."""
    (found,) = changed(memory, expected)
    return found


def run_by_layers(made: Pair) -> None:
    """A request of which each layer is pushed by itself, in two spans."""
    case = made.case(160)
    receiving, sending = made.begin(case)
    layered = ("kv", "swa", "dsa")
    for span in ((0, 96), (96, 160)):
        part = case.span(*span, made.prefill.memory.pools)
        for layer in range(8):
            sending.push({n: part[n] for n in layered}, span=span, layers=(layer, layer + 1))
    part = case.span(96, 160, made.prefill.memory.pools)
    sending.push({"mamba": part["mamba"]}, span=(160, 160), layers=(4, 6))
    sending.push({"aux": part["aux"]}, span=(160, 160), last=True)
    made.ended(case, receiving, sending)


def test_requests_that_go_well(two_engines: TwoEngines) -> None:
    made = two_engines.pair(verify="digest")
    made.run()
    made.run(200, 64, (96, 160))
    made.run(48, 48)
    run_by_layers(made)
    other = two_engines.pair(hybrid(), OTHER_PAGES, verify="digest")
    other.run(192, 0, (96,))
    other.run(250, 96)


def spoil(two_engines: TwoEngines, made: Pair, block: int) -> tuple[Case, str]:
    """One request of which a byte changes in flight; what both sides say."""
    case = made.case()
    two_engines.prefill.run(FAULTY, "plan", "flip", str(block), 1)
    receiving, sending = made.begin(case)
    made.push(sending, case, 96)
    texts = {receiving.failed(), sending.failed()}
    for side in (receiving, sending):
        assert side.wait(quiesced=True).quiesced
    assert len(texts) == 1, "both sides say the same"
    return case, texts.pop()


def test_flipped_byte(two_engines: TwoEngines) -> None:
    """The byte changes in the second chunk, each time in another component."""
    made = two_engines.pair(backend=f"faulty-{two_engines.backend}", verify="digest")
    made.run()
    seen = set()
    for block in (0, 40, -1):
        case, text = spoil(two_engines, made, block)
        expected = made.expected.copy()
        made.done(case)
        carry([made.prefill.memory], expected, case)
        component, _ = flipped(made.decode.memory, expected)
        seen.add(component)
        assert "what arrived is not what was sent" in text
        assert f"component {component}," in text
        assert f"peer {made.prefill.name}, rank 0" in text
        made.pardon(case)
    assert len(seen) > 1
    made.run()
    made.idle()


def test_nobody_notices_without(two_engines: TwoEngines) -> None:
    """So the byte does change, and nothing else would find it."""
    made = two_engines.pair(backend=f"faulty-{two_engines.backend}")
    made.run()
    case = made.case()
    two_engines.prefill.run(FAULTY, "plan", "flip", "0")
    receiving, sending = made.begin(case)
    made.push(sending, case)
    receiving.succeeded()
    sending.succeeded()
    carry([made.prefill.memory], made.expected, case)
    flipped(made.decode.memory, made.expected)
    made.spoilt(case)


@TCP
@pytest.mark.parametrize(("sources", "targets"), [(2, 1), (1, 2)])
def test_unequal_widths(two_engines: TwoEngines, sources: int, targets: int) -> None:
    backend = f"faulty-{two_engines.backend}"
    fleet = Fleet(two_engines, shards(sources), shards(targets), verify="digest", backend=backend)
    fleet.run(200)
    fleet.run(200, 64, (96, 160))
    two_engines.prefill.run(FAULTY, "plan", "flip", "0")  # the first block is one of keys
    case = fleet.case(200)
    before = [memory.copy() for memory in fleet.decode.memories]
    rooms = [*fleet.receive(case), *fleet.send(case)]
    for room in rooms:
        room.wait(quiesced=True)
    texts = {str(room.see().reason) for room in rooms if room.see().reason is not None}
    assert len(texts) == 1
    (text,) = texts
    found = []
    for memory, old in zip(fleet.decode.memories, before, strict=True):
        expected = old.copy()
        carry(fleet.prefill.memories, expected, case)
        found += changed(memory, expected, old)  # the other rank may have been stopped before it wrote
    ((component, at),) = found
    rank = at[2] // 2 if sources == 2 else 0  # four heads, two a source
    assert component == "kv"
    assert "component kv," in text
    assert f"rank {rank}" in text
    assert f"peer {fleet.prefill.links[rank].name}" in text


@TCP
def test_only_one_side_verifies(two_engines: TwoEngines) -> None:
    made = two_engines.pair(verify="digest", decode_config={"verify": "off"})
    case = made.case()
    text = made.receive(case, deadline=20).failed()
    assert "the two sides have different settings of 'verify'" in text
    assert "'off' on decode, 'digest' on prefill" in text
    made.done(case)


def test_hash_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    inventory = state.describe("d", [state.aux_rows({"row": np.zeros((4, 8), np.uint8)})])
    config: dict[str, Any] = {"role": "decode", "backend": "tcp"}
    with pytest.raises(ConfigError, match=re.escape(install_hint("statelink[verify]"))):
        statelink.open({**config, "verify": "digest"}, inventory)
    statelink.open(config, inventory).close()


def test_memory_of_a_device() -> None:
    rows = state.Memory.pointer(1 << 40, (4, 8), "uint8", 1, kind="cuda:0")
    inventory = state.describe("d", [state.aux_rows({"row": rows})])
    with pytest.raises(UnsupportedError, match=r"cannot read memory of kind 'cuda:0' .*instance d, rank 0"):
        check_verify(inventory, ())
