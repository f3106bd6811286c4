"""One side of one request that holds every built-in state type at once; a process of its own.

Each component's pools are filled and checked here with plain numpy: an item is known by its distance from the end of
its component's list, which is the same on both sides, whatever the prefix.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import statelink
from statelink import state

TOKENS, PREFIX, PAGE = 75, 16, 8
POOL, SLOTS, LAYERS = 24, 5, (0, 3)
POISON = 0xB7

Array = npt.NDArray[np.uint8]


class Held(NamedTuple):
    """One component of one side.

    Attributes:
        described: What Statelink is told.
        pools: Its arrays, items first.
        ids: Where a request's items are, given the prefix.
    """

    described: state.Described
    pools: list[Array]
    ids: npt.NDArray[np.int64]


def pool(*shape: int) -> Array:
    """Memory that nobody has written to."""
    return np.full(shape, POISON, np.uint8)


def pairs(*shape: int) -> dict[int, tuple[Array, Array]]:
    """Keys and values of every layer."""
    return {layer: (pool(*shape), pool(*shape)) for layer in LAYERS}


def named(*shape: int) -> dict[int, dict[str, Array]]:
    """Two arrays of every layer, by name."""
    return {layer: {"a": pool(*shape), "b": pool(*shape)} for layer in LAYERS}


def flat(layers: Mapping[int, Any]) -> list[Array]:
    """All arrays of a mapping of layers."""
    found: list[Array] = []
    for arrays in layers.values():
        values = arrays.values() if isinstance(arrays, dict) else arrays if isinstance(arrays, tuple) else (arrays,)
        found.extend(values)
    return found


def rings(layers: Mapping[int, dict[str, Array]]) -> list[Array]:
    """Arrays of rings, one row an item."""
    return [array.reshape(-1, array.shape[-1]) for array in flat(layers)]


def components(ring: int) -> dict[str, Callable[[], tuple[state.Described, list[Array], dict[str, Any]]]]:
    """How to make each component, under the name that the documentation gives it."""

    def paged(make: Callable[..., state.Described], arrays: Any, **options: Any) -> Any:
        return make(arrays, **options), flat(arrays), {"pages": True}

    def ringed(type: str, **options: Any) -> Any:
        arrays = named(SLOTS, ring, 12)
        return state.ring_rows(arrays, type=type, **options), rings(arrays), {"ring": ring}

    def items(type: str, count: int = SLOTS, **options: Any) -> Any:
        arrays = {"a": pool(count, 40), "b": pool(count, 3, 5)}
        return state.whole_items(arrays, type=type, **options), list(arrays.values()), {"pages": "page" in options}

    def mamba() -> Any:
        conv, ssm = {n: pool(SLOTS, 32, 3) for n in LAYERS}, {n: pool(SLOTS, 4, 6, 5) for n in LAYERS}
        described = state.mamba_slots(conv=conv, ssm=ssm, conv_groups=(8, 8, 16), heads=4)
        return described, flat(conv) + flat(ssm), {}

    def aux() -> Any:
        rows = {"ids": pool(SLOTS, 64), "room": pool(SLOTS, 64)}
        return state.aux_rows(rows), list(rows.values()), {}

    def index(type: str) -> Any:
        arrays = {0: pool(POOL, PAGE, 9), 1: np.empty((0, PAGE, 9), np.uint8), 3: pool(POOL, PAGE, 9)}
        kept = {n: array for n, array in arrays.items() if len(array) or type == "dsa"}
        return state.index_pages(kept, name=type, type=type), [a for a in arrays.values() if len(a)], {"pages": True}

    def compressed(type: str, **options: Any) -> Any:
        arrays = {n: {"c4": pool(POOL, PAGE // 4, 10), "c8": pool(POOL, 1, 7)} for n in LAYERS}
        return state.compressed_pages(arrays, page=PAGE, name=type, type=type, **options), flat(arrays), {"pages": True}

    def own_pages() -> Any:
        arrays = {n: {"c16": pool(POOL, 2, 10)} for n in LAYERS}
        described = state.compressed_pages(arrays, page=32, name="dsv4_c128", type="dsv4_c128", group=16)
        return described, flat(arrays), {"pages": True}

    def pending() -> Any:
        arrays = {"a": pool(2 * SLOTS, 40)}
        described = state.whole_items(arrays, type="c128_state", page=16, group=16)
        return described, list(arrays.values()), {"ring": 16 * (ring // 16)}

    nhd, hnd = (POOL, PAGE, 4, 6), (POOL, 4, PAGE, 6)
    return {
        "kv, NHD": lambda: paged(state.kv_pages, pairs(*nhd), heads=4, name="nhd"),
        "kv, HND": lambda: paged(state.kv_pages, pairs(*hnd), heads=4, order="hnd", name="hnd"),
        "kv, MLA": lambda: paged(state.mla_pages, {n: pool(POOL, PAGE, 20) for n in LAYERS}, name="mla"),
        "swa": lambda: paged(state.window_pages, pairs(*nhd), heads=4, window=20),
        "swa_ring": lambda: ringed("swa_ring", window=14),
        "dsa": lambda: index("dsa"),
        "dsa_tail": lambda: ringed("dsa_tail", group=4),
        "dsv4": lambda: compressed("dsv4"),
        "dsv4_c128": own_pages,
        "dsv4_c4_state": lambda: ringed("dsv4_c4_state", group=4, keep=4),
        "c128_state": pending,
        "minimax_index_k": lambda: index("minimax_index_k"),
        "minimax_dense_kv": lambda: paged(
            state.kv_pages, pairs(*nhd), heads=4, name="minimax_dense_kv", type="minimax_dense_kv"
        ),
        "qsa_pending": lambda: items("qsa_pending"),
        "qsa_compressed": lambda: compressed("qsa_compressed"),
        "block_scale": lambda: items("block_scale", POOL, page=PAGE),
        "block_scale_swa": lambda: items("block_scale_swa", POOL, page=PAGE, window=20),
        "mamba": mamba,
        "request_row": lambda: items("request_row"),
        "hidden": lambda: items("hidden"),
        "encoder": lambda: items("encoder"),
        "aux": aux,
    }


def make(role: str) -> dict[str, Held]:
    """All components of one side."""
    rng = np.random.default_rng(len(role))
    prefill = role == "prefill"
    prefix = 0 if prefill else PREFIX
    made = {}
    for label, build in components(ring=16 if prefill else 32).items():
        described, pools, needs = build()
        options: dict[str, Any] = {"slot": int(rng.integers(SLOTS))}
        if needs.pop("pages", False):
            options["pages"] = rng.permutation(POOL)
        ids = statelink.indices_of(described.component, TOKENS, prefix, **options, **needs)
        made[label] = Held(described, pools, ids)
    return made


def content(label: str, number: int, distance: int, like: Array) -> Array:
    """What belongs into an item."""
    seed = [len(label), sum(label.encode()), number, distance]
    return np.random.default_rng(seed).integers(0, 256, like.shape, dtype=np.uint8)


def fill(held: Mapping[str, Held]) -> None:
    """Put the request into prefill's pools."""
    for label, each in held.items():
        for number, array in enumerate(each.pools):
            for distance, index in enumerate(each.ids[::-1]):
                array[index] = content(label, number, distance, array[index])


def judge(held: Mapping[str, Held]) -> dict[str, str]:
    """What became of each component on decode."""
    verdicts = {}
    for label, each in held.items():
        wrong = touched = 0
        for number, array in enumerate(each.pools):
            for distance, index in enumerate(each.ids[::-1]):
                wrong += int((array[index] != content(label, number, distance, array[index])).any())
            touched += int((np.delete(array, each.ids, axis=0) != POISON).any())
        verdicts[label] = "yes" if not wrong and not touched else f"{wrong} items wrong, {touched} pools touched"
        if not len(each.ids):
            verdicts[label] = "nothing to move"
    return verdicts


def main() -> None:
    """Play one side; prefill prints its address, decode takes it as an argument."""
    role, backend, *rest = sys.argv[1:]
    held = make(role)
    items = {each.described.component.name: each.ids for each in held.values()}
    inventory = state.describe(role, [each.described for each in held.values()])
    with statelink.open({"role": role, "backend": backend}, inventory) as link:
        if role == "prefill":
            fill(held)
            print(link.address, flush=True)
            sending = link.send(3, TOKENS)
            sending.push(items)
            sending.wait(40)
            sending.check()
        else:
            receiving = link.receive(3, rest[0], TOKENS, items, prefix=PREFIX)
            receiving.wait(40)
            receiving.check()
            print(json.dumps(judge(held)), flush=True)


if __name__ == "__main__":
    main()
