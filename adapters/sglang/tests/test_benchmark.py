"""`benchmarks.sglang` plays small requests beside large ones through both connectors, and looks at every byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.sglang.__main__ import SMALL, mixed
from benchmarks.sglang.pair import Pair

if TYPE_CHECKING:
    from pathlib import Path


def test_a_mix_has_both_connectors(llama: Path, tmp_path: Path) -> None:
    ours, theirs = Pair("statelink", "tcp", llama, tmp_path), Pair("nixl", "", llama, tmp_path)
    try:
        for pair in (ours, theirs):
            pair.ready()
        row = mixed(ours, theirs, "8x64", rounds=1, warm=0)
    finally:
        for pair in (ours, theirs):
            pair.close()
    assert (row["statelink"], row["sglang"]) == ("statelink-tcp", "nixl")
    assert row["alone_times"] == [SMALL, SMALL]
    assert row["large_times"] == [64, 64]
    for part in ("alone", "beside", "large"):
        for times, median, tail in zip(*(row[f"{part}_{what}"] for what in ("times", "ms", "p99_ms")), strict=True):
            assert times >= 1
            assert 0 < median <= tail
