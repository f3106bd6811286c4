"""Poisons the pools of SGLang's servers: whatever is read that was neither computed nor moved is no number.

All of a server's pools are filled once they are there, and what decode names for a request is filled again before the
link gets it. So nothing that an earlier request has left there can stand in for what was not moved. A test can also
have a part of each request lost when it has arrived, and see who would miss it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

__all__ = ["LOST", "POISONED", "install"]

POISON = 0xFF
"""A byte of which every type of floating-point number is none, and every integer is -1 or its largest."""
POISONED = "the pools of this server are poisoned"
"""What the server's log says then."""
LOST = "STATELINK_TEST_LOST"
"""Variable with the path of a file. It names what decode loses: SGLang's name of a list, and a range of its buffers."""


def install() -> None:
    """Put it around the adapter's classes, in this process."""
    from statelink_sglang.backend import Manager, Receiver

    made, named, polled = Manager.__init__, Receiver.send_metadata, Receiver.poll

    def __init__(manager: Any, *given: Any, **more: Any) -> None:
        made(manager, *given, **more)
        for buffers in _lists(manager.kv_args).values():
            for buffer in buffers:
                buffer[1:] = POISON  # SGLang computes what it pads batches with in the first item
        print(POISONED, flush=True)

    def send_metadata(
        receiver: Any, kv_indices: Any, aux_index: Any = None, state_indices: Any = None, *given: Any, **more: Any
    ) -> None:
        receiver.named = _items(receiver.kv_mgr.kv_args, kv_indices, state_indices)
        _fill(receiver, receiver.named, POISON)
        named(receiver, kv_indices, aux_index, state_indices, *given, **more)

    def poll(receiver: Any) -> int:
        state: int = polled(receiver)
        if state == SUCCESS and getattr(receiver, "named", None) is not None:
            items, receiver.named = receiver.named, None
            _lose(receiver, items)
        return state

    manager, receivers = cast("Any", Manager), cast("Any", Receiver)
    manager.__init__, receivers.send_metadata, receivers.poll = __init__, send_metadata, poll


SUCCESS = 4


def _lists(args: Any) -> dict[str, list[npt.NDArray[np.uint8]]]:
    """The buffers of SGLang's lists, each ``[items, bytes]`` over its memory."""
    states = zip(args.state_data_ptrs, args.state_data_lens, args.state_item_lens, strict=True)
    lists = {"kv": (args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens)}
    lists |= zip(_names(args), states, strict=True)
    return {name: [_memory(*each) for each in zip(*parts, strict=True) if each[1]] for name, parts in lists.items()}


def _names(args: Any) -> list[str]:
    """A name for each of SGLang's lists of states. A type that comes twice is the draft's the second time."""
    names: list[str] = []
    for kind in args.state_types:
        names.append(f"draft.{kind.value}" if kind.value in names else kind.value)
    return names


def _memory(address: int, nbytes: int, item: int) -> npt.NDArray[np.uint8]:
    count = nbytes // item  # behind the last whole item may be a compressor's sentinel
    raw = memoryview((ctypes.c_uint8 * (count * item)).from_address(address)).cast("B")
    return np.frombuffer(raw, np.uint8).reshape(count, item)


def _items(args: Any, pages: Any, states: Any) -> dict[str, npt.NDArray[Any]]:
    """What decode names for a request, by list. Older releases also list pages of index keys that it holds already."""
    from statelink_sglang.backend import drop_prefix

    items = {name: np.asarray(each).reshape(-1) for name, each in zip(_names(args), states or (), strict=True)}
    assert "dsa_tail" not in items, "SGLang does not list items of these, and no server of the tests has them"
    drop_prefix(items, len(pages))
    return {"kv": np.asarray(pages), **items}


def _fill(receiver: Any, items: dict[str, npt.NDArray[Any]], value: int, only: Sequence[str] = ()) -> None:
    for name, buffers in _lists(receiver.kv_mgr.kv_args).items():
        if not only or name == only[0]:
            for buffer in buffers[slice(*map(int, only[1:]))] if only[1:] else buffers:
                buffer[items[name]] = value


def _lose(receiver: Any, items: dict[str, npt.NDArray[Any]]) -> None:
    """Fill a part with zeros, as if nothing had arrived."""
    path = os.environ.get(LOST)
    lost = Path(path).read_text().split() if path else []
    if lost:
        _fill(receiver, items, 0, lost)
