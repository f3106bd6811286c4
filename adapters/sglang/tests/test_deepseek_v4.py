"""DeepSeek V4 over SGLang's real pools: after each request, all of decode's memory is what SGLang's own rule says.

The rule is that of SGLang's connectors: for each buffer in the order of its list, each item that prefill names goes to
the item that decode names. SGLang's own code names them.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from support.deepseek_v4 import PAGE, VARIANTS, Table, decode_lists, make_v4, prefill_lists, switched
from support.newest import OLDER
from support.sides import ADDRESS, FAILED, SUCCESS, WAITING, Side, at, link_config, reason, rooms, until

from statelink.errors import StateError
from statelink_sglang.backend import describe_pools

if TYPE_CHECKING:
    from support.pools import Made

pytestmark = [
    pytest.mark.usefixtures("sglang_context"),
    pytest.mark.skipif(OLDER, reason="its lists are cut out of the source of SGLang's newest release"),
]

LENGTHS = (
    *(1, 3, 4, 5, 127, 128, 129, 255, 256, 257, 260, 263, 383, 384, 385),
    *(511, 512, 513, 640, 1000, 1024, 2000, 2048),
)
CASES = [
    (tokens, prefix, ends)
    for tokens in LENGTHS
    for prefix in (0, 256, 512)
    for ends in ((), (300,), (256, 600))
    if prefix < tokens and all(prefix < end < tokens for end in ends)
]
"""Tokens, those that decode holds already, and where chunks end."""
FEW = [case for case in CASES if case[0] in (5, 129, 257, 384, 1000)]


def _buffers(made: Made) -> list[tuple[Any, int, int, int]]:
    """For each buffer: its list, its address, its bytes, and the bytes of an item. In SGLang's order."""
    args = made.kv_args
    states = zip(args.state_data_ptrs, args.state_data_lens, args.state_item_lens, strict=True)
    lists: list[tuple[Any, Any]] = [("kv", (args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens))]
    lists += list(enumerate(states))
    lists.append(("aux", (args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens)))
    return [(name, *each) for name, parts in lists for each in zip(*parts, strict=True)]


def _memory(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B"), np.uint8)


class Ranks:
    """Ranks of one variant on two servers that know each other, and where each has a request."""

    def __init__(self, name: str, prefill: int = 1, decode: int = 1, backend: str = "tcp") -> None:
        self._stack = contextlib.ExitStack()
        variant = self._stack.enter_context(switched(name))
        self.sources, self.targets = (
            [self._side(role, make_v4(variant, (rank, width)), backend) for rank in range(width)]
            for role, width in (("prefill", prefill), ("decode", decode))
        )
        for target in self.targets:
            target.link.siblings([each.link.address for each in self.targets if each is not target])
            target.prefill_info_table[ADDRESS] = at(*(each.link.address for each in self.sources))
        self.tables = [
            [Table(side.made, seed) for side in sides] for seed, sides in ((11, self.sources), (22, self.targets))
        ]

    def _side(self, role: str, made: Made, backend: str) -> Side:
        side = Side(role, made, link_config(role, backend=backend))
        self._stack.callback(side.close)
        return side

    def close(self) -> None:
        self._stack.close()

    def move(self, tokens: int, prefix: int, ends: Sequence[int], *, shift: int = 0) -> list[Any]:
        """Move a request. Returns the lists of the buffers on decode that are not as SGLang's rule says.

        Args:
            tokens: Of the request.
            prefix: Those that decode holds already.
            ends: Where prefill's chunks end before the last.
            shift: Added to the window's pages that decode names, and unknown to the rule.
        """
        draw = np.random.default_rng(7 * tokens + prefix)
        filled = [draw.integers(0, 256, nbytes, np.uint8) for _, _, nbytes, _ in _buffers(self.sources[0].made)]
        for side in self.sources:  # each rank holds all of the state
            for content, (_, address, nbytes, _) in zip(filled, _buffers(side.made), strict=True):
                _memory(address, nbytes)[:] = content
        for side in self.targets:
            for _, address, nbytes, _ in _buffers(side.made):
                _memory(address, nbytes)[:] = draw.integers(0, 256, nbytes, np.uint8)
        types = self.sources[0].made.kv_args.state_types
        ours = [prefill_lists(table, types, tokens, prefix, ends) for table in self.tables[0]]
        theirs = [decode_lists(table, types, tokens, prefix) for table in self.tables[1]]
        right = [self._right(side, ours[0], lists) for side, lists in zip(self.targets, theirs, strict=True)]
        room = next(rooms)
        senders = [side.sender(room) for side in self.sources]
        receivers = [side.receiver(room, tokens) for side in self.targets]
        for receiver, (pages, states) in zip(receivers, theirs, strict=True):
            receiver.init(0)
            named = [np.asarray(states[0]) % 8 + shift, *states[1:]] if shift else states
            receiver.send_metadata(pages, ROWS[1], named, decode_prefix_len=prefix)
        for sender, (chunks, states) in zip(senders, ours, strict=True):
            until(sender.poll, WAITING)
            assert sender.pop_decode_prefix_len() == prefix
            sender.init(-(-(tokens - prefix) // PAGE), ROWS[0])
            for number, (pages, count) in enumerate(chunks, 1):
                sender.send(pages, states if number == len(chunks) else None, num_kv_tokens=count)
        for transfer in (*receivers, *senders):
            until(transfer.poll, SUCCESS)
        return [
            name
            for side, contents in zip(self.targets, right, strict=True)
            for content, (name, address, nbytes, _) in zip(contents, _buffers(side.made), strict=True)
            if not np.array_equal(content, _memory(address, nbytes))
        ]

    def _right(self, target: Side, ours: Any, theirs: Any) -> list[npt.NDArray[np.uint8]]:
        chunks, states = ours
        pages = np.concatenate([each for each, _ in chunks])
        contents = []
        for (name, source, _, item), (_, address, nbytes, same) in zip(
            _buffers(self.sources[0].made), _buffers(target.made), strict=True
        ):
            assert item == same
            given, taken = {"kv": (pages, theirs[0]), "aux": ([ROWS[0]], [ROWS[1]])}.get(name) or (
                states[name],
                theirs[1][name],
            )
            content = _memory(address, nbytes).copy()
            for one, other in zip(np.asarray(given).ravel().tolist(), np.asarray(taken).ravel().tolist(), strict=True):
                content[other * item : (other + 1) * item] = _memory(source + one * item, item)
            contents.append(content)
        return contents


ROWS = (2, 5)
"""Metadata rows of a request on prefill and on decode."""


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    made = Ranks(*request.param)
    yield made
    made.close()


@pytest.mark.parametrize("ranks", [(name,) for name in VARIANTS], indirect=True, ids=list(VARIANTS))
def test_all_of_decodes_memory_is_as_sglang_says(ranks: Ranks) -> None:
    assert len(CASES) == 70
    wrong = {case: names for case in CASES if (names := ranks.move(*case))}
    assert wrong == {}


@pytest.mark.smoke
@pytest.mark.parametrize("ranks", [("mtp",)], indirect=True, ids=["mtp"])
def test_a_page_that_goes_elsewhere_is_noticed(ranks: Ranks) -> None:
    assert ranks.move(1000, 0, ()) == []
    assert 0 in ranks.move(1000, 0, (), shift=1)


@pytest.mark.parametrize(
    "ranks",
    [("mtp", 2, 1), ("mtp", 1, 2), ("plain", 2, 2)],
    indirect=True,
    ids=["2-1", "1-2", "2-2"],
)
def test_every_rank_has_all_of_it(ranks: Ranks) -> None:
    assert {case: names for case in FEW if (names := ranks.move(*case))} == {}


@pytest.mark.parametrize(
    "ranks", [("plain", 1, 1, "nixl"), ("plain", 1, 1, "mooncake")], indirect=True, ids=["nixl", "mooncake"]
)
def test_the_same_over_native_backends(ranks: Ranks) -> None:
    assert {case: names for case in FEW if (names := ranks.move(*case))} == {}


@pytest.mark.parametrize(
    ("prefill", "decode", "said"),
    [
        ("plain", "mtp", "layers.2.c4_state"),
        ("mtp", "plain", "layers.2.c4_state"),
        ("plain", "v41-layout", "pd_kv_layout=v41"),
        ("plain", "fp4-indexer", "c4_index_k"),
        ("plain", "direct-windows", "windows in pages of 64"),
    ],
)
def test_servers_that_differ_are_refused_when_they_meet(prefill: str, decode: str, said: str) -> None:
    with contextlib.ExitStack() as stack:
        sides = []
        for role, name in (("prefill", prefill), ("decode", decode)):
            with switched(name) as variant:
                side = Side(role, make_v4(variant), link_config(role))
                stack.callback(side.close)
                tokens, states = 1000, decode_lists(Table(side.made, 22), side.made.kv_args.state_types, 1000, 0)
            sides.append(side)
        source, target = sides
        target.prefill_info_table[ADDRESS] = at(source.link.address)
        room = next(rooms)
        source.sender(room)
        receiver = target.receiver(room, tokens)
        receiver.init(0)
        receiver.send_metadata(states[0], 1, states[1], decode_prefix_len=0)
        until(receiver.poll, FAILED)
        assert "do not describe the same state" in str(reason(receiver))
        assert said in str(reason(receiver))


def test_a_pool_that_keeps_everything_in_one_tensor_is_refused() -> None:
    import sglang.srt.layers.attention.dsv4.unified_kv_gate as gate

    with switched("plain") as variant, mock.patch.object(gate, "is_unified_kv_triton", return_value=True):
        made = make_v4(variant)
        with pytest.raises(StateError, match=r"windows and compressed rows in one tensor \(ROCm\)"):
            describe_pools(made.pools, made.kv_args)


def test_windows_that_are_kept_by_request_are_refused() -> None:
    with switched("v41-model") as variant:
        made = make_v4(variant)
        made.pools.pages.request_window = SimpleNamespace()
        with pytest.raises(StateError, match="--enable-encoder-swa-bounded-replay"):
            describe_pools(made.pools, made.kv_args)
