"""The base of backends that copy: what it refuses, and what it leaves to the subclass."""

from __future__ import annotations

import ctypes
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest

from statelink.backend import (
    DIRECT,
    BackendContext,
    Batch,
    Blocks,
    Capabilities,
    CopyingBackend,
    Ends,
    Fence,
    Probe,
    Region,
    SubmitMode,
    Transfer,
)
from statelink.errors import TransferError

GONE: set[str] = set()
"""Places that have a problem."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    wrong: str = ""


class Address(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    street: str
    number: int


class Near(CopyingBackend[Address]):
    """Copies inside this process, or fails with the words of an option after the first block."""

    api_version = 1
    name = "near"
    Options = Options
    Place = Address
    capabilities = Capabilities(
        memory_kinds=frozenset({"dram", "cuda"}),
        submit_mode=SubmitMode.BLOCKING,
        source=Fence.MOVER,
        target=Fence.MOVER,
    )
    strategies = MappingProxyType({"*": DIRECT})

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._wrong: str = context.options.wrong
        self.copies = 0

    @classmethod
    def probe(cls, options: Any) -> Probe:
        return Probe(ok=True, reason="memory")

    def here(self) -> Address:
        return Address("here", 7)

    def problem(self, there: Address) -> str:
        return f"{there.street} is gone" if there.street in GONE else ""

    def copy(self, there: Address, ends: Ends) -> str:
        self.copies += 1
        for target, source, nbytes in zip(
            *(column.tolist() for column in (ends.there, ends.here, ends.nbytes)), strict=True
        ):
            ctypes.memmove(target, source, nbytes)
            if self._wrong:
                return self._wrong
        return ""


@pytest.fixture(autouse=True)
def nobody_is_gone() -> None:
    GONE.clear()


class Scene:
    """One backend with a peer called ``peer``, and the memory of both."""

    def __init__(self, wrong: str = "") -> None:
        self.backend = Near(BackendContext(options=Options(wrong=wrong), link="me"))
        self.peer = Near(BackendContext(options=Options(), link="peer"))
        self.source, self.target = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
        self.backend.register([Region(self.source.ctypes.data, 100)])
        self.theirs = [Region(self.target.ctypes.data, 100)]

    def connect(self) -> Scene:
        self.backend.connect("peer", self.peer.descriptor(), self.theirs)
        return self

    def move(self, *rows: tuple[int, int, int], peer: str = "peer") -> Transfer:
        """Submit blocks: offset here, offset there, length."""
        here, there, nbytes = (np.array(column, np.uint64) for column in zip(*rows, strict=True))
        region = np.zeros(len(rows), np.uint32)
        source, target = here + np.uint64(self.source.ctypes.data), there + np.uint64(self.target.ctypes.data)
        blocks = Blocks(source=source, target=target, nbytes=nbytes, source_region=region, target_region=region)
        return self.backend.submit(peer, Batch(blocks, 1, 1))


def test_a_batch_is_there_when_submit_returns() -> None:
    scene = Scene().connect()
    moved = scene.move((0, 50, 10), (20, 5, 3))
    assert moved.outcome == (True, "", True)
    expected = np.zeros(100, np.uint8)
    expected[50:60], expected[5:8] = np.arange(10), [20, 21, 22]
    assert np.array_equal(scene.target, expected)
    scene.backend.poll([moved])


def test_a_failure_is_settled_and_has_the_words_of_the_subclass() -> None:
    scene = Scene(wrong="the paper is out").connect()
    assert scene.move((0, 0, 1), (1, 1, 1)).outcome == (False, "the paper is out", True)


def test_a_peer_with_a_problem_is_refused_and_gets_no_bytes() -> None:
    scene = Scene().connect()
    GONE.add("here")
    assert scene.move((0, 0, 10)).outcome == (False, "here is gone", True)
    assert scene.backend.copies == 0
    with pytest.raises(TransferError, match="here is gone"):
        scene.connect()
    GONE.clear()
    assert scene.connect().move((0, 0, 10)).outcome == (True, "", True)


def test_memory_of_another_kind_is_refused_and_changes_nothing() -> None:
    scene = Scene().connect()
    with pytest.raises(TransferError, match=r"(?s)kind 'npu:0' cannot be registered.*cuda, dram can"):
        scene.backend.register([Region(1 << 40, 10, "cuda:1"), Region(1 << 41, 10, "npu:0")])
    assert scene.move((0, 0, 100)).outcome == (True, "", True)
    scene.backend.register([Region(1 << 40, 10, "cuda:1")])


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "does not decode"),
        (b"\xff\xfe", "does not decode"),
        (b'{"backend":"near","link":"peer"}', "missing required field `place`"),
        (b'{"backend":"near","link":"peer","place":{"street":"here"}}', "missing required field `number`"),
        (b'{"backend":"near","link":"peer","place":{"street":"here","number":"7"}}', "Expected `int`"),
        (b'{"backend":"near","link":"peer","place":{"street":"here","number":7}}{}', "does not decode"),
        pytest.param(b'{"backend":"near","link":"peer","place":' + b"[" * 100_000, "does not decode", id="deep"),
        (b'{"backend":"far","link":"peer","place":{"street":"here","number":7}}', "that of 'peer' over 'far'"),
        (b'{"backend":"near","link":"me","place":{"street":"here","number":7}}', "that of 'me' over 'near'"),
    ],
)
def test_a_descriptor_that_is_not_the_peers_is_refused(raw: bytes, said: str) -> None:
    scene = Scene()
    with pytest.raises(TransferError, match=said):
        scene.backend.connect("peer", raw, scene.theirs)
    with pytest.raises(TransferError, match="not connected"):
        scene.move((0, 0, 1))
