"""Which threads a request runs on: none that may block, where nothing blocks."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

import numpy as np
import pytest
from tests.helpers.links import Rank, hand_over, link_of

import statelink
from statelink import Status, state
from statelink.backend import DIRECT, SubmitMode
from statelink.tcp import TcpBackend

MOVES, FENCES = "statelink-move", "statelink-fence"
NBYTES = 10 * 16 * 2 * 8 * 2
"""Of the request that `hand_over` plays."""
COPIES = {"submit_mode": SubmitMode.BLOCKING, "stalled_peers": None}
SLOW: dict[str, tuple[dict[str, object], set[str]]] = {
    "has to be polled": ({"ends_unpolled": False}, {MOVES}),
    "may block to submit": ({"submit_mode": SubmitMode.BLOCKING}, {MOVES}),
    "may block to submit so much": ({**COPIES, "prompt_bytes": NBYTES - 1}, {MOVES}),
    "may block to grant": ({"prompt_fences": False}, {FENCES}),
    "takes one call at a time": ({"prompt_fences": False, "thread_safe": False, "stalled_peers": 0}, {MOVES}),
}
"""What a backend declares, and the threads that it then needs. Where calls are serialised, one thread makes them."""
CONFIG = {"role": "prefill", "backend": "tcp"}


def started(play: Callable[[], object]) -> set[str]:
    """The kinds of data threads that something started."""
    before = {each.ident for each in threading.enumerate()}
    play()
    names = {each.name for each in threading.enumerate() if each.ident not in before}
    return {kind for kind in (MOVES, FENCES) if any(name.startswith(kind) for name in names)}


def request(*, acquainted: bool = False) -> set[str]:
    """The kinds of data threads that a small request between two links of this process starts.

    The first request of two links may wait for the end of the job that connects them, which has its key. If they are
    ``acquainted``, it is the second one.
    """
    source, target = Rank("p", 1), Rank("d")
    with source.open(CONFIG) as prefill, target.open(CONFIG, role="decode") as decode:
        if acquainted:
            hand_over(prefill, decode, source, target)
        return started(lambda: hand_over(prefill, decode, source, target, 2))


def test_a_small_request_starts_no_thread_that_may_block() -> None:
    assert request(acquainted=True) == set()


def test_a_submit_that_only_copies_a_little_needs_no_thread_either(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = dataclasses.replace(TcpBackend.capabilities, **COPIES, prompt_bytes=NBYTES)  # type: ignore[arg-type]
    monkeypatch.setattr(TcpBackend, "capabilities", declared)
    assert request(acquainted=True) == set()


def test_an_empty_push_runs_where_other_pushes_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no bytes, and its hooks may block all the same."""
    declared = dataclasses.replace(TcpBackend.capabilities, submit_mode=SubmitMode.BLOCKING)
    monkeypatch.setattr(TcpBackend, "capabilities", declared)
    with link_of("prefill") as prefill, link_of("decode") as decode:

        def play() -> None:
            sending = prefill.send(1, 32)
            sending.push({"kv": []}, span=(32, 32), last=True)
            receiving = decode.receive(1, prefill.address, 32, {"kv": []}, prefix=32)
            assert receiving.wait(20) is sending.wait(20) is Status.SUCCEEDED, receiving.reason

        assert started(play) == {MOVES}


@pytest.mark.parametrize("what", SLOW)
def test_what_may_block_runs_on_data_threads(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    declared, threads = SLOW[what]
    monkeypatch.setattr(TcpBackend, "capabilities", dataclasses.replace(TcpBackend.capabilities, **declared))  # type: ignore[arg-type]
    assert request() == threads


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_hooks_that_may_block_run_on_data_threads(monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    monkeypatch.setattr(type(getattr(DIRECT, side)()), "prompt", False)
    needed = MOVES if side == "sender" else FENCES
    found = request()
    assert needed in found
    assert found <= {needed, MOVES}, "only the push may wait for the job that connects, which has its key"


def test_digests_are_computed_on_data_threads() -> None:
    source, target = Rank("p", 1), Rank("d")
    config = {**CONFIG, "verify": "digest"}
    with source.open(config) as prefill, target.open(config, role="decode") as decode:
        assert started(lambda: hand_over(prefill, decode, source, target)) == {MOVES}


def test_a_large_request_keeps_the_control_thread_free() -> None:
    """Many blocks take long to list: data threads do that, and grant them."""
    pages = 5000
    arrays = np.zeros((2, 2, pages, 1, 1, 8), np.uint8)
    links = []
    for name, (keys, values) in zip(("prefill", "decode"), arrays, strict=True):
        inventory = state.describe(name, [state.kv_pages({0: (keys, values)}, heads=1)])
        links.append(statelink.open({"role": name, "backend": "tcp", "inspect": False}, inventory))
    prefill, decode = links
    arrays[0] = np.random.default_rng(3).integers(0, 256, arrays[0].shape)

    def play() -> None:
        sending = prefill.send(1, pages)
        sending.push({"kv": range(pages)})
        receiving = decode.receive(1, prefill.address, pages, {"kv": range(pages - 1, -1, -1)})
        receiving.wait(20)
        receiving.check()

    try:
        assert started(play) == {MOVES, FENCES}
    finally:
        for link in reversed(links):
            assert link.close()
    np.testing.assert_array_equal(arrays[1], arrays[0][:, ::-1])
