"""The pieces of code in the guide's three pages do what these say: over links, with memory that is looked at."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq
from tests.helpers.peers import until

import statelink
from statelink import Link, LinkConfig, Status, state
from statelink.config import read_config

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("engine.md", "positions.md", "failure.md")
PAGE = "\n".join((DOCS / name).read_text() for name in PAGES)
TOKENS, PAGE_TOKENS = 200, 16


def code(name: str) -> str:
    match = re.search(rf"<!-- tested by tests/docs/test_guide.py: {name} -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)
    assert match, name
    return match[1]


def run(name: str, **names: Any) -> dict[str, Any]:
    exec(compile(code(name), f"guide: {name}", "exec"), names)
    return names


class Pools:
    """The pools that the example of an inventory describes, of one rank of one."""

    def __init__(self, seed: int, rank: int = 0, width: int = 1) -> None:
        draw = np.random.default_rng(seed)
        self.rank, self.width = rank, width
        self.k3, self.v3, self.k7, self.v7 = draw.random((4, 40, PAGE_TOKENS, 8 // width, 8), np.float32)
        self.conv = {1: draw.random((4, 8192 // width, 3), np.float32)}
        self.ssm = {1: draw.random((4, 32 // width, 8, 8), np.float32)}
        self.tokens, self.logprobs = draw.integers(0, 9, (4, 1)), draw.random((4, 1), np.float32)

    def inventory(self) -> state.Inventory:
        found = run("describe", state=state, **vars(self))["inventory"]
        assert isinstance(found, state.Inventory)
        return found

    def of(self, pages: Any, slot: int, row: int) -> list[Any]:
        kept = [each[pages] for each in (self.k3, self.v3, self.k7, self.v7)]
        return [*kept, self.conv[1][slot], self.ssm[1][slot], self.tokens[row], self.logprobs[row]]


def test_the_inventory_of_two_ranks() -> None:
    for rank in range(2):
        inventory = Pools(seed=rank, rank=rank, width=2).inventory()
        assert [component.name for component in inventory.components] == ["kv", "mamba", "aux"]
        assert (inventory.rank, inventory.ranks) == (rank, 2)


def test_the_default_names_of_components() -> None:
    found = re.findall(r"^\| `(\w+)\((.*?)\)` \| (`(\w+)`|its type's.*?) \|", PAGE, re.MULTILINE)
    assert len(found) == 13
    pages = np.zeros((4, 2, 1, 2), np.uint8)
    for constructor, arguments, _, name in found:
        if constructor == "kv_pages":
            kinds = {"window": 4, "attention_chunk": 4}
            given: dict[str, Any] = {key: value for key, value in kinds.items() if f"{key}=" in arguments}
            assert state.kv_pages({0: (pages, pages)}, heads=1, **given).component.name == name
        else:
            assert inspect.signature(getattr(state, constructor)).parameters["name"].default == name, constructor


def test_a_pointer() -> None:
    k = run("pointer", address=1 << 30, state=state)["k"]
    assert (k.shape, k.region.kind) == ((64, 16, 8, 128), "cuda:0")
    assert k.region.nbytes == 63 * 65536 + 32768
    dense = state.Memory.pointer(k.address, k.shape, k.dtype, k.itemsize)
    assert dense.strides == (32768, *k.strides[1:])


def test_the_configuration() -> None:
    keys = [key_pair() for _ in range(2)]
    opened = SimpleNamespace(open=lambda config, inventory: LinkConfig.read(config))
    link = run("open", statelink=opened, inventory=None, secret=keys[0][0], prefill_key=keys[1][1])["link"]
    assert link.peers["prefill-0"][1] == "tcp://10.0.0.2:7100"
    assert link.keys.allow == (keys[1][1],)
    config: dict[str, Any] = {"role": "decode", "backend": "tcp"}
    run("staging", config=config)
    staging = LinkConfig.read(config).staging
    assert staging is not None
    assert staging.components == {"mamba": "never"}


def key_pair() -> tuple[str, str]:
    """A secret key, and its public one."""
    public, secret = zmq.curve_keypair()
    return secret.decode(), public.decode()


def test_the_file(tmp_path: Path) -> None:
    secret, public = key_pair()
    (tmp_path / "key").write_text(secret)
    (tmp_path / "key").chmod(0o600)
    (tmp_path / "allow").write_text(public)
    text = code("file").replace("/run/secrets/statelink.key", str(tmp_path / "key"))
    text = text.replace("/etc/statelink/allow", str(tmp_path / "allow"))
    path = tmp_path / "link.toml"
    path.write_text(text)
    config = read_config(path, {}).config
    assert (config.role, config.backend, config.require) == ("decode", "auto", ("rdma",))
    assert config.options == {"nixl": {"connect_timeout": 5.0}}
    assert config.keys is not None
    assert config.keys.allow == (public,)


@pytest.fixture
def links() -> Iterator[tuple[Link, Pools, Link, Pools]]:
    here, there = Pools(seed=1), Pools(seed=2)
    with statelink.open({"role": "prefill", "backend": "tcp"}, here.inventory()) as prefill:
        peers = {"prefill-0": (prefill.address,)}
        with statelink.open({"role": "decode", "backend": "tcp", "peers": peers}, there.inventory()) as decode:
            yield prefill, here, decode, there


def test_a_request(links: tuple[Link, Pools, Link, Pools]) -> None:
    prefill, here, decode, there = links
    freed: list[Any] = []
    common = {"room": 7, "N": TOKENS, "P": 0, "event": SimpleNamespace(query=lambda: True), "Status": Status}
    common |= {
        "free": lambda *all_: freed.append(all_),
        "report": freed.append,
        "run": lambda *all_: freed.append(all_),
    }
    sent, got = np.arange(13), np.arange(20, 33)
    sending = run("send", link=prefill, pages=sent, slot=2, row=1, **common)["sending"]
    receiving = run("receive", link=decode, pages=got, slot=3, row=0, **common)["receiving"]
    assert receiving.wait(60)
    receiving.check()
    sending.wait(60, quiesced=True)
    sending.check()
    for ours, theirs in zip(here.of(sent, 2, 1), there.of(got, 3, 0), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_window_in_two_pushes() -> None:
    arrays = np.random.default_rng(3).random((2, 4, 70, PAGE_TOKENS, 2, 8), np.float32)
    arrays[1] = 0
    described = [
        state.describe(
            name,
            [
                state.kv_pages({0: (pools[0], pools[1])}, heads=2),
                state.kv_pages({1: (pools[2], pools[3])}, heads=2, window=64),
            ],
        )
        for name, pools in zip(("prefill-0", "decode-0"), arrays, strict=True)
    ]
    pages, window = np.arange(63), np.arange(65, 70)
    with (
        statelink.open({"role": "prefill", "backend": "tcp"}, described[0]) as prefill,
        statelink.open({"role": "decode", "backend": "tcp"}, described[1]) as decode,
    ):
        receiving = decode.receive(7, prefill.address, 1000, {"kv": pages, "swa": np.arange(5)})
        sending = run("window", statelink=statelink, link=prefill, room=7, pages=pages, window=window)["sending"]
        assert receiving.wait(60)
        receiving.check()
        sending.wait(60, quiesced=True)
        sending.check()
    np.testing.assert_array_equal(arrays[1, :2, :63], arrays[0, :2, :63])
    np.testing.assert_array_equal(arrays[1, 2:, :5], arrays[0, 2:, 65:])
    assert not arrays[1, :2, 63:].any()
    assert not arrays[1, 2:, 5:].any()


def test_an_abort_and_another_try(links: tuple[Link, Pools, Link, Pools]) -> None:
    prefill, here, decode, there = links
    items = {"kv": np.arange(13), "mamba": [0], "aux": [0]}
    first = prefill.send(9, tokens=TOKENS)
    receiving = decode.receive(9, "prefill-0", TOKENS, items)
    until(lambda: first.status is Status.WAITING)
    freed: list[Any] = []

    class Ending:
        """The room, with the time that passes where the page has dots."""

        poll = receiving.poll

        def abort(self, why: str) -> None:
            receiving.abort(why)
            receiving.wait(60, quiesced=True)
            first.wait(60, quiesced=True)

        @property
        def quiesced(self) -> bool:
            return receiving.quiesced

    names = {"link": decode, "next_room": 10, "N": TOKENS, "pages": items["kv"], "free": freed.append, "Status": Status}
    again = run("abort", receiving=Ending(), **names)["receiving"]
    assert first.reason is not None
    assert first.reason.cause == "its client left"
    assert freed == [items["kv"]]
    again.accept(items)
    prefill.send(10, tokens=TOKENS).push(items)
    assert again.wait(60)
    again.check()
    np.testing.assert_array_equal(here.k7[:13], there.k7[:13])


def test_content(links: tuple[Link, Pools, Link, Pools]) -> None:
    prefill, here, decode, there = links
    named = {"token_ids": range(TOKENS), "image_hashes": ["a1", "b2"], "statelink": statelink}
    rooms = run("content", link=Both(prefill, decode), room=9, N=TOKENS, **named)
    rooms["sending"].push({"kv": np.arange(13), "mamba": [0], "aux": [0]})
    rooms["receiving"].accept({"kv": np.arange(13), "mamba": [0], "aux": [0]})
    assert rooms["receiving"].wait(60)
    rooms["receiving"].check()
    np.testing.assert_array_equal(here.k7[:13], there.k7[:13])


def test_the_golden_contents_of_the_guide() -> None:
    rows = [line for line in PAGE.splitlines() if re.fullmatch(r"\|.*\| `[0-9a-f]{32}` \|", line)]
    extras: list[dict[str, Any]] = [
        {},
        {},
        {"adapter": "sql"},
        {"adapter": "sql", "items": ["a1", "b2"], "salt": "tenant 7"},
        {"salt": "grüße"},
    ]
    for row, named in zip(rows, extras, strict=True):
        tokens, words, content = (cell.strip() for cell in row.strip("|").split("|"))
        ids = [] if tokens == "none" else [int(each) for each in tokens.split(", ")]
        assert all(text in words for value in named.values() for text in ([value] if isinstance(value, str) else value))
        assert content.strip("`") == statelink.content_of(ids, **named).hex()


class Both:
    """The two calls of the example are those of two links."""

    def __init__(self, prefill: Link, decode: Link) -> None:
        self.send, self.receive = prefill.send, decode.receive


def test_siblings(links: tuple[Link, Pools, Link, Pools]) -> None:
    prefill, *_ = links
    sending = prefill.send(11, tokens=TOKENS)
    assert run("siblings", link=prefill, addresses=[], sending=sending)["vote"] is Status.BOOTSTRAPPING
    sending.abort()
