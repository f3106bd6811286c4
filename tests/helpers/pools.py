"""Pools of state as an engine has them, laid out in a file that several processes map.

The test sees every byte of both sides through its own mapping: what it compares never went through Statelink.
Arrays stand apart, and what lies between and around them is a guard that nobody may touch.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from statelink import state

if TYPE_CHECKING:
    from pathlib import Path

Array = npt.NDArray[Any]
Arrays = dict[str, dict[str, Array]]
Shapes = dict[str, tuple[tuple[int, ...], str]]

GUARD = 320
ALIGN = 64


@dataclass(frozen=True, kw_only=True)
class Component:
    """One component of a rank.

    Attributes:
        name: Its name.
        format: Its format tag.
    """

    name: str
    format: str = ""

    def shapes(self) -> Shapes:
        """Label of each buffer to the shape of its array, items first, and its dtype."""
        raise NotImplementedError

    def describe(self, arrays: dict[str, Array]) -> state.Described:
        """The component over these arrays, as Statelink is told of it."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Kv(Component):
    """Pages of keys and values; of a sliding window or of attention chunks where there are any."""

    name: str = "kv"
    layers: tuple[int, ...] = (0, 1, 2, 3)
    pages: int = 48
    page: int = 16
    heads: int = 4
    dim: int = 16
    v_dim: int = 0
    dtype: str = "uint16"
    order: str = "nhd"
    tp: tuple[int, int] = (0, 1)
    window: int = 0
    attention_chunk: int = 0
    optional: bool = False
    replicated: bool = False

    def shapes(self) -> Shapes:
        local = max(self.heads // self.tp[1], 1)
        found: Shapes = {}
        for layer in self.layers:
            for part, dim in (("k", self.dim), ("v", self.v_dim or self.dim)):
                inner = (self.page, local, dim) if self.order == "nhd" else (local, self.page, dim)
                found[f"layers.{layer}.{part}"] = ((self.pages, *inner), self.dtype)
        return found

    def describe(self, arrays: dict[str, Array]) -> state.Described:
        layers = {n: (arrays[f"layers.{n}.k"], arrays[f"layers.{n}.v"]) for n in self.layers}
        common = {name: getattr(self, name) for name in ("heads", "tp", "order", "name", "replicated", "format")}
        if self.window:
            return state.kv_pages(layers, window=self.window, **common)
        if self.attention_chunk:
            return state.kv_pages(layers, attention_chunk=self.attention_chunk, **common)
        return state.kv_pages(layers, optional=self.optional, **common)


@dataclass(frozen=True, kw_only=True)
class Index(Component):
    """Pages of index keys; layers in ``shared`` list no items."""

    name: str = "dsa"
    layers: tuple[int, ...] = (0, 1)
    shared: tuple[int, ...] = ()
    pages: int = 48
    page: int = 16
    width: int = 33
    type: str = "dsa"

    def shapes(self) -> Shapes:
        return {
            f"layers.{n}.index_k": ((0 if n in self.shared else self.pages, self.page, self.width), "uint8")
            for n in self.layers
        }

    def describe(self, arrays: dict[str, Array]) -> state.Described:
        layers = {n: arrays[f"layers.{n}.index_k"] for n in self.layers}
        return state.index_pages(layers, name=self.name, format=self.format, type=self.type)


@dataclass(frozen=True, kw_only=True)
class Mamba(Component):
    """Slots of grouped convolution states and recurrent states.

    Attributes:
        pad: Channels' worth of bytes between the slots of this side, which make its stride larger.
    """

    name: str = "mamba"
    layers: tuple[int, ...] = (4, 5)
    slots: int = 10
    groups: tuple[int, ...] = (32, 32, 64)
    kernel: int = 3
    heads: int = 4
    inner: tuple[int, int] = (8, 16)
    tp: tuple[int, int] = (0, 1)
    pad: int = 0

    def shapes(self) -> Shapes:
        rows = sum(self.groups) // self.tp[1]
        found: Shapes = {}
        for layer in self.layers:
            found[f"layers.{layer}.conv"] = ((self.slots, rows + self.pad, self.kernel), "float32")
            heads = self.heads // self.tp[1] + bool(self.pad)
            found[f"layers.{layer}.ssm"] = ((self.slots, heads, *self.inner), "float32")
        return found

    def describe(self, arrays: dict[str, Array]) -> state.Described:
        rows, heads = sum(self.groups) // self.tp[1], self.heads // self.tp[1]
        return state.mamba_slots(
            conv={n: arrays[f"layers.{n}.conv"][:, :rows] for n in self.layers},
            ssm={n: arrays[f"layers.{n}.ssm"][:, :heads] for n in self.layers},
            conv_groups=self.groups,
            heads=self.heads,
            tp=self.tp,
            name=self.name,
            format=self.format,
        )


@dataclass(frozen=True, kw_only=True)
class Aux(Component):
    """Rows of metadata, the same on every rank that has them."""

    name: str = "aux"
    rows: int = 12
    widths: tuple[tuple[str, int, str], ...] = (("ids", 16, "int32"), ("logprobs", 20, "float32"))
    optional: bool = False

    def shapes(self) -> Shapes:
        return {label: ((self.rows, width), dtype) for label, width, dtype in self.widths}

    def describe(self, arrays: dict[str, Array]) -> state.Described:
        return state.aux_rows(arrays, name=self.name, replicated=True, optional=self.optional, format=self.format)


def hybrid(**changes: Component | None) -> tuple[Component, ...]:
    """The pools of a hybrid model: full and sliding attention, index keys, recurrent states, metadata.

    Args:
        **changes: Component name to what it is instead, or ``None`` for nothing.
    """
    usual: dict[str, Component | None] = {
        "kv": Kv(),
        "swa": Kv(name="swa", layers=(6, 7), pages=30, heads=2, window=72, v_dim=24),
        "dsa": Index(layers=(0, 1, 2), shared=(1,)),
        "mamba": Mamba(),
        "aux": Aux(),
    }
    return tuple(each for each in {**usual, **changes}.values() if each is not None)


class Memory:
    """One rank's pools over a file that everybody who made the same object with its path sees.

    Args:
        path: The file.
        pools: What lies in it, in order.
        bytes_: Private bytes to look at instead of the file.
    """

    def __init__(self, path: Path, pools: Sequence[Component], bytes_: npt.NDArray[np.uint8] | None = None) -> None:
        self.path = path
        self.pools = tuple(pools)
        self.arrays: Arrays = {}
        self._places: list[tuple[int, int, str]] = []
        end = GUARD
        for pool in pools:
            for label, (shape, dtype) in pool.shapes().items():
                start = -(-end // ALIGN) * ALIGN
                end = start + int(np.prod(shape)) * np.dtype(dtype).itemsize
                self._places.append((start, end, f"{pool.name}/{label}"))
                end += GUARD
        self.nbytes = -(-end // 4096) * 4096
        view = bytes_.data if bytes_ is not None else memoryview(_map(path, self.nbytes))
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(view, np.uint8)
        places = iter(self._places)
        for pool in pools:
            arrays = self.arrays[pool.name] = {}
            for label, (shape, dtype) in pool.shapes().items():
                start, end, _ = next(places)
                # Not a slice of one large array: then that would be the region of them all.
                array = np.frombuffer(view[start:end], dtype) if end > start else np.empty(0, dtype)
                arrays[label] = array.reshape(shape)

    def count(self, name: str) -> int:
        """How many items a component has, in the arrays that have any."""
        return max(map(len, self.arrays[name].values()))

    def fill(self, seed: int) -> None:
        """Random bytes everywhere, guards included."""
        rng = np.random.default_rng(seed)
        self.bytes[:] = rng.integers(0, 256, self.nbytes, np.uint8)

    def copy(self) -> Memory:
        """The same bytes, in memory of their own."""
        return Memory(self.path, self.pools, self.bytes.copy())

    def differences(self, expected: Memory) -> list[str]:
        """Where these bytes are not the expected ones, in words."""
        wrong = np.flatnonzero(self.bytes != expected.bytes)
        found: list[str] = []
        for start, stop, label in self._places:
            inside = wrong[(wrong >= start) & (wrong < stop)]
            if len(inside):
                pool, _, name = label.partition("/")
                array = self.arrays[pool][name]
                items = sorted({int(at) for at in (inside - start) // (array.nbytes // len(array))})
                found.append(f"{label}: {len(inside)} bytes of items {items}")
            wrong = wrong[(wrong < start) | (wrong >= stop)]
        if len(wrong):
            found.append(f"guards: {len(wrong)} bytes, the first at {int(wrong[0])}")
        return found

    def inventory(self, instance: str, **who: Any) -> state.Inventory:
        """What Statelink is told of it."""
        described = [pool.describe(self.arrays[pool.name]) for pool in self.pools]
        return state.describe(instance, described, **who)


def _map(path: Path, nbytes: int) -> mmap.mmap:
    if not path.exists():
        with path.open("wb") as file:
            file.truncate(nbytes)
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), nbytes)
