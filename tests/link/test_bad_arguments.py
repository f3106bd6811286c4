"""What an engine passes by mistake to a link or a room is refused in Statelink's own words, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.helpers.bad_values import BAD, escaped
from tests.helpers.links import Rank, hand_over

from statelink import Link, Pages, Status, content_of
from statelink.errors import RoomError, StatelinkError

NOBODY = "tcp://127.0.0.1:9"


def refused(link: Link, call: Callable[[Any], object], *, opens: bool = True) -> list[str]:
    """What escapes a call with each bad value. A room that a call has opened is closed again."""

    def attempt(value: Any) -> None:
        before = len(link.rooms())
        try:
            made = call(value)
        except Exception:
            assert len(link.rooms()) == before, "a refused call has opened a room"
            raise
        if opens:
            for room in link.rooms():
                room.abort()
                room.wait(20, quiesced=True)
        assert made is None or opens

    return escaped(attempt)


def test_no_argument_makes_a_call_fail_in_other_words_than_statelinks() -> None:
    source, target = Rank("p", fill=1), Rank("d")
    with (
        source.open({"role": "prefill", "backend": "tcp"}) as prefill,
        target.open({"role": "decode", "backend": "tcp"}) as decode,
    ):
        receiving, sending = decode.receive(1 << 50, NOBODY, 160), prefill.send(1 << 50, 160)
        calls: dict[str, tuple[Link, Callable[[Any], object]]] = {
            "send room": (prefill, prefill.send),
            "send tokens": (prefill, lambda value: prefill.send(5, value)),
            "send deadline": (prefill, lambda value: prefill.send(5, 160, deadline=value)),
            "send content": (prefill, lambda value: prefill.send(5, 160, content=value)),
            "receive room": (decode, lambda value: decode.receive(value, NOBODY)),
            "receive peer": (decode, lambda value: decode.receive(5, value)),
            "receive tokens": (decode, lambda value: decode.receive(5, NOBODY, value)),
            "receive items": (decode, lambda value: decode.receive(5, NOBODY, 160, value)),
            "receive indices": (decode, lambda value: decode.receive(5, NOBODY, 160, {"kv": value})),
            "receive prefix": (decode, lambda value: decode.receive(5, NOBODY, 160, {"kv": range(10)}, prefix=value)),
            "receive ready": (decode, lambda value: decode.receive(5, NOBODY, 160, {"kv": range(10)}, ready=value)),
            "receive deadline": (decode, lambda value: decode.receive(5, NOBODY, 160, deadline=value)),
            "receive content": (decode, lambda value: decode.receive(5, NOBODY, 160, content=value)),
            "decline room": (decode, lambda value: decode.decline(value, NOBODY)),
            "decline peer": (decode, lambda value: decode.decline(5, value)),
            "decline why": (decode, lambda value: decode.decline(5, NOBODY, value)),
            "keep room": (decode, lambda value: decode.keep(value, NOBODY, 1)),
            "keep peer": (decode, lambda value: decode.keep(5, value, 1)),
            "keep seconds": (decode, lambda value: decode.keep(5, NOBODY, value)),
            "siblings": (decode, decode.siblings),
            "content_of tokens": (decode, lambda value: decode.receive(5, NOBODY, content=content_of(value))),
            "content_of extra": (decode, lambda value: decode.receive(5, NOBODY, content=content_of([1], salt=value))),
        }
        on_rooms: dict[str, tuple[Link, Callable[[Any], object]]] = {
            "push items": (prefill, lambda value: sending.push(value, span=(0, 16))),
            "push indices": (prefill, lambda value: sending.push({"kv": value}, span=(0, 48))),
            "push Pages": (prefill, lambda value: sending.push({"kv": Pages(value, 0)}, span=(0, 48))),
            "push Pages start": (
                prefill,
                lambda value: sending.push({"kv": Pages([0, 1, 2, 3, 4], value)}, span=(0, 48)),
            ),
            "push span": (prefill, lambda value: sending.push({"kv": [0]}, span=value)),
            "push span's end": (prefill, lambda value: sending.push({"kv": [0, 1, 2, 3]}, span=(0, value))),
            "push layers": (prefill, lambda value: sending.push({"kv": [0, 1, 2, 3]}, span=(0, 48), layers=value)),
            "push layers' end": (
                prefill,
                lambda value: sending.push({"kv": [0, 1, 2, 3]}, span=(0, 48), layers=(0, value)),
            ),
            "push ready": (prefill, lambda value: sending.push({"kv": [0, 1, 2, 3]}, span=(0, 48), ready=value)),
            "push last": (prefill, lambda value: sending.push({"kv": [0, 1, 2, 3]}, span=(0, 48), last=value)),
            "accept items": (decode, receiving.accept),
            "accept indices": (decode, lambda value: receiving.accept({"kv": value})),
            "accept prefix": (decode, lambda value: receiving.accept({"kv": [0]}, prefix=value)),
            "accept ready": (decode, lambda value: receiving.accept({"kv": [0]}, ready=value)),
            "extend": (decode, lambda value: receiving.extend(value)),
        }
        found = {name: said for name, (link, call) in calls.items() if (said := refused(link, call))}
        found |= {name: said for name, (link, call) in on_rooms.items() if (said := refused(link, call, opens=False))}
        for wait in (receiving.wait, decode.changes, lambda value: receiving.wait(0, quiesced=value)):
            said = escaped(wait, tuple(value for value in BAD if value is not None and not _is_long(value)))
            found |= {f"wait {wait}": said} if said else {}
        assert not found
        receiving.abort()
        sending.abort()
        assert receiving.wait(20) is sending.wait(20) is Status.FAILED
        hand_over(prefill, decode, source, target)


def _is_long(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 1


FOREVER = (1e300, float("inf"))


@pytest.mark.parametrize("seconds", [*FOREVER, np.int64(4), np.float32(4), np.float64(4), 4])
def test_seconds_of_any_kind(seconds: Any) -> None:
    source, target = Rank("p", fill=1), Rank("d")
    with (
        source.open({"role": "prefill", "backend": "tcp"}) as prefill,
        target.open({"role": "decode", "backend": "tcp"}) as decode,
    ):
        sending = prefill.send(5, 160, deadline=seconds)
        sending.push({"kv": range(10)})
        receiving = decode.receive(5, prefill.address, 160, {"kv": range(10)}, deadline=seconds)
        receiving.extend(seconds)
        if float(seconds) not in FOREVER:
            decode.keep(6, prefill.address, seconds)
        assert receiving.wait(seconds, quiesced=True) is sending.wait(seconds) is Status.SUCCEEDED
        assert receiving in decode.changes(seconds)
        decode.suspend(seconds)
        decode.resume()
        assert prefill.close(seconds)


@pytest.mark.parametrize("wrong", [2**4000, True, float("nan"), "4", 0, -1, np.True_, np.float32("nan")])
def test_a_deadline_that_is_none(wrong: Any) -> None:
    with Rank("p").open({"role": "prefill", "backend": "tcp"}) as link:
        with pytest.raises(RoomError, match=r"the deadline of room 5 is .*seconds above zero are expected") as caught:
            link.send(5, 160, deadline=wrong)
        assert caught.value.code == "room.number"
        assert not link.rooms()


@pytest.mark.parametrize(
    ("indices", "said"),
    [
        ([True, 0, 2, 3], "bools are among them"),
        ((0, 2, 3, np.False_), "bools are among them"),
        ([False, *range(40)], "bools are among them"),
        (np.ma.masked_array([0, 1, 2, 3], [False, False, True, False]), "the mask would be dropped"),
    ],
)
def test_indices_that_numpy_would_take(indices: Any, said: str) -> None:
    count = 16 * len(indices)
    with (
        Rank("p").open({"role": "prefill", "backend": "tcp"}) as prefill,
        Rank("d").open({"role": "decode", "backend": "tcp"}) as decode,
    ):
        sending, receiving = prefill.send(5, count), decode.receive(5, NOBODY, count)
        calls: list[Callable[[], object]] = [
            lambda: sending.push({"kv": indices}),
            lambda: sending.push({"kv": Pages(indices, 0)}, span=(0, count)),
            lambda: receiving.accept({"kv": indices}),
        ]
        for call in calls:
            with pytest.raises(StatelinkError, match=said):
                call()


def test_a_name_that_no_instance_has() -> None:
    with Rank("d").open({"role": "decode", "backend": "tcp"}) as link:
        for name in ("x" * 256, "two\nlines"):
            with pytest.raises(StatelinkError, match="a peer is ") as caught:
                link.receive(5, name, 160)
            assert caught.value.code == "config.peer"


def test_a_sibling_that_is_the_peer() -> None:
    with (
        Rank("p").open({"role": "prefill", "backend": "tcp"}) as prefill,
        Rank("d").open({"role": "decode", "backend": "tcp"}) as decode,
    ):
        decode.siblings([prefill.address])
        room = decode.receive(5, prefill.address, 160, deadline=30)
        assert room.wait(20) is Status.FAILED
        assert room.reason is not None
        assert room.reason.code == "config.peer"
        assert "is an address of the prefill instance" in str(room.reason)
        with pytest.raises(StatelinkError, match="siblings are no list of addresses: got None"):
            decode.siblings(None)  # type: ignore[arg-type]
