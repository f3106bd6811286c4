"""Whether decode's ranks have a place for all that prefill's hold: by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from statelink import plan, state
from statelink.errors import MismatchError

from .small import instance_of, keys, kv_share, latents_share, pointer, ring_share, row

if TYPE_CHECKING:
    from statelink.state import Described, Inventory


def lacking(made: Described, name: str) -> Described:
    """The same without one buffer."""
    kept = tuple(buffer for buffer in made.component.buffers if buffer.name != name)
    return made._replace(component=msgspec.structs.replace(made.component, buffers=kept))


BOTH = [kv_share(0, 2)], [kv_share(1, 2)]
FULL = instance_of("p", [kv_share()])


POSITIONS = instance_of("p", [state.mla_pages({0: pointer(30, 4, 2, 3)})])
UNCOVERED: list[tuple[str, list[Inventory], list[Inventory], str]] = [
    (
        "one of two ranks",
        FULL,
        instance_of("d", [kv_share(1, 2)]),
        "buffer 'layers.0.k' .*: head \\[0, 2\\), at any position",
    ),
    (
        "a rank lacks values",
        instance_of("p", *BOTH),
        instance_of("d", [kv_share(0, 2)], [lacking(kv_share(1, 2), "layers.0.v")]),
        "decode rank 1 lacks buffer 'layers.0.v' .*it has 'layers.0.k' of the same layer",
    ),
    (
        "one rank lacks a layer",
        instance_of("p", [kv_share(0, 2, (0, 1))], [kv_share(1, 2, (0, 1))]),
        instance_of("d", [kv_share(0, 2, (0, 1))], [kv_share(1, 2)]),
        "buffer 'layers.1.k' .*: head \\[2, 4\\), at any position",
    ),
    (
        "replicas of one half",
        FULL,
        instance_of("d", [kv_share(0, 2, replicated=True)], [kv_share(0, 2, replicated=True)]),
        "head \\[2, 4\\), at any position; prefill rank 0 holds it",
    ),
    ("a share of a ring", instance_of("p", [ring_share()]), instance_of("d", [ring_share(0, 2)]), "head \\[2, 4\\)"),
    (
        "a share of a state",
        instance_of("p", [state.mamba_slots(conv={}, ssm={0: pointer(1, 3, 4, 2)}, heads=4)]),
        instance_of("d", [state.mamba_slots(conv={}, ssm={0: pointer(1, 3, 1, 2)}, heads=4, tp=(2, 4))]),
        "head \\[0, 2\\)|head \\[0, 4\\)|head",
    ),
    (
        "positions of one rank of two",
        POSITIONS,
        instance_of("d", [latents_share(0, 2)]),
        "share 1 of 2 of its positions",
    ),
    (
        "one share of positions twice",
        POSITIONS,
        instance_of("d", [latents_share(1, 2)], [latents_share(1, 2)]),
        "all of each item, share 0 of 2 of its positions",
    ),
    (
        "half of a draft's heads",
        instance_of("p", [kv_share(), keys([9], 4, 2, 4, 3, heads=4, name="draft", optional=True)]),
        instance_of("d", [kv_share(), keys([9], 4, 2, 2, 3, heads=4, name="draft", optional=True, tp=(0, 2))]),
        "buffer 'layers.9.k'",
    ),
]


@pytest.mark.parametrize(
    ("sources", "targets", "text"), [case[1:] for case in UNCOVERED], ids=[case[0] for case in UNCOVERED]
)
def test_what_prefill_holds_has_a_place_on_decode(
    sources: list[Inventory], targets: list[Inventory], text: str
) -> None:
    with pytest.raises(MismatchError, match=text) as caught:
        plan.match(sources, targets)
    assert caught.value.code == "mismatch.uncovered"
    assert "decode d" in str(caught.value)
    plan.match(sources, [*sources])  # a decode that is like prefill has a place for everything


def test_what_covers_each_other_matches() -> None:
    halves, quarters = instance_of("p", *BOTH), instance_of("d", *([kv_share(rank, 4)] for rank in range(4)))
    plan.match(halves, quarters)
    plan.match(quarters, halves)
    wide = instance_of("d", *([ring_share(rank, 8)] for rank in range(8)))  # more ranks than heads
    plan.match(instance_of("p", [ring_share()]), wide)
    plan.match(wide, instance_of("p", [ring_share()]))
    plan.match(POSITIONS, instance_of("d", *([latents_share(index, 3)] for index in range(3))))
    stages = instance_of("d", [kv_share(layers=(0, 1))], [kv_share(layers=(2,)), row()])
    plan.match(instance_of("p", [kv_share(layers=(0, 1, 2)), row()]), stages)
    spare = [state.whole_items({"x": pointer(1, 3, n, 2)}, type="qsa_pending", spare=n - 4) for n in (8, 4)]
    plan.match(instance_of("p", [spare[0]]), instance_of("d", [spare[1]]))


def copies(make: Callable[..., Described], layers: Sequence[int], **fields: object) -> Described:
    return make({layer: pointer(30 + layer, 4, 2, 3) for layer in layers}, **fields)


LACKING: list[tuple[str, dict[str, tuple[int, int]]]] = [
    ("pipeline stage 0", {"tp": (-1, 2), "pp": (0, 1)}),
    ("list the same buffers", {}),
]


@pytest.mark.parametrize(("said", "axes"), LACKING)
@pytest.mark.parametrize("make", [state.mla_pages, partial(state.index_pages, name="kv", type="kv")])
def test_a_decode_rank_without_a_copy_of_a_layer(make: Any, said: str, axes: dict[str, tuple[int, int]]) -> None:
    places = [{name: (rank if at < 0 else at, size) for name, (at, size) in axes.items()} for rank in range(2)]

    def ranks(*layers: Sequence[int]) -> list[Inventory]:
        beside = [kv_share(rank, 2, (0, 1), name="more") for rank in range(2)]
        parts = [[*([copies(make, each)] if each else []), more] for each, more in zip(layers, beside, strict=True)]
        return instance_of("d", *parts, axes=places if axes else ())

    whole = ranks((0, 1), (0, 1))
    plan.match(whole, whole)
    for lists, lacks_it in (((1,), (0, 1)), 0), (((0, 1), (1,)), 1), (((0,), (1,)), 0), (((), (0, 1)), 0):
        with pytest.raises(MismatchError, match=rf"decode rank {lacks_it} lacks buffer 'layers\.") as caught:
            plan.match(whole, ranks(*lists))
        assert caught.value.code == "mismatch.stage"
        assert said in str(caught.value)
        plan.match(ranks(*lists), whole)  # prefill's other rank sends it


def test_a_layer_without_items_is_no_copy() -> None:
    empty = state.index_pages({0: pointer(30, 0, 2, 3), 1: pointer(31, 4, 2, 3)})
    full = state.index_pages({layer: pointer(30 + layer, 4, 2, 3) for layer in range(2)})
    plan.match(instance_of("p", [full]), instance_of("d", [full], [full]))
    with pytest.raises(MismatchError, match=r"decode rank 1 lacks buffer 'layers\.0\.index_k'"):
        plan.match(instance_of("p", [full]), instance_of("d", [full], [empty]))


def test_a_rank_without_a_layer_of_heads_that_another_rank_has_too() -> None:
    def four(lists: Sequence[int]) -> list[Inventory]:
        return instance_of(
            "d", *([keys(lists if rank == 1 else (0, 1), 4, 2, 1, 3, heads=2, tp=(rank, 4))] for rank in range(4))
        )

    source = instance_of("p", [keys((0, 1), 4, 2, 2, 3, heads=2)])
    plan.match(source, four((0, 1)))
    with pytest.raises(MismatchError, match=r"share 1 of 4 of buffer 'layers\.1\.k'") as caught:
        plan.match(source, four((0,)))
    assert caught.value.code == "mismatch.stage"


def test_layers_that_need_no_copy() -> None:
    both, first, last = (copies(state.mla_pages, layers) for layers in ((0, 1), (0,), (1,)))
    source = instance_of("p", [both])
    stages = [{"pp": (0, 2)}, {"pp": (1, 2)}]
    plan.match(source, instance_of("d", [first], [last], axes=stages))
    plan.match(source, instance_of("d", [first], [last]))
    plan.match(source, instance_of("d", [first], [first], [last], [last]))
    # Only decode has the draft, and only one of its ranks.
    draft = copies(partial(state.mla_pages, name="draft", optional=True), (9,))
    plan.match(source, instance_of("d", [both, draft], [both]))
    # What says neither that ranks copy it nor that they share it is on one rank.
    alone = kv_share(name="draft", optional=True)
    plan.match(instance_of("p", [both, alone]), instance_of("d", [both, alone], [both]))
