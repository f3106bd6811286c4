"""What does not fit is refused when it is opened or when the sides meet, with everything that one needs to know.

One backend is enough here: none of this reaches one. After each refusal at connect, the same prefill link serves
another decode link, byte for byte (the `pair` fixture).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from tests.helpers.fakes import FakeDecode, FakePrefill
from tests.helpers.pair import Pair
from tests.helpers.pools import Aux, Component, Index, Kv, Mamba, hybrid
from tests.helpers.worker import Host

import statelink
from statelink import state, wire
from statelink.errors import (
    BackendUnavailableError,
    ConfigError,
    RoomError,
    StateError,
    StatelinkError,
    TransferError,
    UnknownBackendError,
    UnsupportedError,
)
from statelink.tcp import Options
from statelink.testing import free_addresses

if TYPE_CHECKING:
    from pathlib import Path

    from tests.link.conftest import TwoEngines

pytestmark = pytest.mark.parametrize("backend", ["tcp"], indirect=True, scope="session")

SAME = "hint: both engines must be configured for the same model, cache dtype and layout"


def mismatch(pair: Pair, cause: str) -> str:
    who = f"backend tcp, peer {pair.prefill.address}, prefill prefill, decode decode"
    return f"prefill and decode do not describe the same state ({who}): {cause}\n{SAME}"


DIFFERENCES: list[tuple[str, Sequence[Component], str]] = [
    (
        "decode expects a component that prefill lacks",
        hybrid(extra=Index(name="extra")),
        "component extra (type dsa): present on decode, absent on prefill",
    ),
    (
        "prefill has a component that decode lacks",
        hybrid(dsa=None),
        "component dsa (type dsa): absent on decode, present on prefill",
    ),
    (
        "dtype",
        hybrid(kv=Kv(dtype="float16", layers=(0,))),
        "kv/layers.0.k: dtype: float16 on decode, uint16 on prefill; "
        "kv/layers.0.v: dtype: float16 on decode, uint16 on prefill; "
        "kv/layers.1-3.{k,v}: absent on decode, present on prefill",
    ),
    ("format", hybrid(kv=Kv(format="swizzled")), "kv: format: 'swizzled' on decode, '' on prefill"),
    (
        "number of heads",
        hybrid(swa=Kv(name="swa", layers=(6, 7), pages=30, heads=8, window=72, v_dim=24)),
        "swa/layers.6-7.{k,v}: extent of axis 'head': 8 on decode, 2 on prefill",
    ),
    (
        "width of keys",
        hybrid(swa=Kv(name="swa", layers=(6, 7), pages=30, heads=2, window=72, dim=8, v_dim=24)),
        "; ".join(f"swa/layers.{n}.k: extent of axis 'dim': 8 on decode, 16 on prefill" for n in (6, 7)),
    ),
    (
        "window",
        hybrid(swa=Kv(name="swa", layers=(6, 7), pages=30, heads=2, window=64, v_dim=24)),
        "swa: window: 64 on decode, 72 on prefill",
    ),
    (
        "metadata buffer",
        hybrid(aux=Aux(widths=(("ids", 16, "int32"), ("hidden", 20, "float32")))),
        "aux/hidden: present on decode, absent on prefill; aux/logprobs: absent on decode, present on prefill",
    ),
    (
        "type of a component",
        hybrid(dsa=Kv(name="dsa", layers=(0, 1, 2))),
        "dsa: type: kv on decode, dsa on prefill; "
        "dsa/layers.0-2.index_k: absent on decode, present on prefill; "
        "dsa/layers.0-2.{k,v}: present on decode, absent on prefill",
    ),
]


@pytest.mark.parametrize(("pools", "cause"), [each[1:] for each in DIFFERENCES], ids=[each[0] for each in DIFFERENCES])
def test_pools_that_differ(pair: Pair, two_engines: TwoEngines, pools: Sequence[Component], cause: str) -> None:
    decode = two_engines.open("decode", pools)
    receiving = decode.receive(50, pair.prefill.address, 64, deadline=20)
    text = receiving.failed()
    said, wanted = (set(each.partition("): ")[2].split("; ")) for each in (text, mismatch(pair, cause)))
    assert said == wanted
    assert len(text) == len(mismatch(pair, cause))
    with pytest.raises(RoomError):
        receiving.check()
    assert receiving.see().quiesced
    # The next request over the refused pair is told the same, at once.
    assert decode.receive(51, pair.prefill.address, 64, deadline=20).failed(3) == text


def test_many_differences_are_counted(pair: Pair, two_engines: TwoEngines) -> None:
    extra = {f"extra{n}": Index(name=f"extra{n}", layers=(0,)) for n in range(20)}
    decode = two_engines.open("decode", hybrid(**extra))
    text = decode.receive(50, pair.prefill.address, 64, deadline=20).failed()
    assert text.count(";") == 12
    assert "; and 8 more\n" in text


def test_another_model(pair: Pair, two_engines: TwoEngines) -> None:
    decode = two_engines.open("decode", model="qwen@2")
    text = decode.receive(52, pair.prefill.address, 64, deadline=20).failed()
    assert text == mismatch(pair, "model: 'qwen@2' on decode, '' on prefill")


def test_another_backend(pair: Pair, two_engines: TwoEngines) -> None:
    decode = two_engines.open("decode", backend="faulty-tcp")
    text = decode.receive(53, pair.prefill.address, 64, deadline=20).failed()
    assert text == (
        f"the two sides use different backends (peer {decode.name}): 'faulty-tcp' on decode, 'tcp' on prefill\n"
        "hint: configure one backend on both sides: 'auto' chooses on each machine by itself"
    )


LATER = (wire.PROTOCOL[1] + 1, wire.PROTOCOL[1] + 2)


@pytest.mark.parametrize("speaks", [LATER, (0, 0)])
@pytest.mark.parametrize("refuses", ["prefill", "decode"])
def test_no_protocol_version_in_common(pair: Pair, tmp_path: Path, refuses: str, speaks: tuple[int, int]) -> None:
    """The text says which side speaks what, whoever refuses; the side of lower versions is the older one."""
    fake: FakeDecode | FakePrefill
    if refuses == "prefill":
        fake = FakeDecode(tmp_path, pair.prefill.address, hybrid())
        card = msgspec.structs.replace(fake.card, protocol=speaks)
        fake.say(wire.Hello(sender=fake.name, handshake=wire.write_handshake(card)))
        text = str(fake.hear(wire.Refuse).reason)
    else:
        fake = FakePrefill(tmp_path, hybrid())
        receiving = pair.decode.receive(54, fake.address, 64, deadline=20)
        fake.welcome(protocol=speaks)
        text = receiving.failed()
    here = f"protocol {wire.PROTOCOL[1]} (core {statelink.__version__})"
    there = f"protocols {LATER[0]} to {LATER[1]} (core 0)" if speaks == LATER else "protocol 0 (core 0)"
    peer = "decode" if refuses == "prefill" else "prefill"
    older = refuses if speaks == LATER else peer
    decode, prefill = (there, here) if refuses == "prefill" else (here, there)
    fake.close()
    assert text == (
        f"the two sides speak no protocol version in common (peer {fake.name}): "
        f"{decode} on decode, {prefill} on prefill\n"
        f"hint: upgrade statelink on {older}"
    )


def test_ranks_are_missing(pair: Pair, two_engines: TwoEngines) -> None:
    lonely = two_engines.open("prefill", rank=1, ranks=3)
    text = pair.decode.receive(55, lonely.address, 64, deadline=20).failed()
    assert text == (
        f"the prefill instance 'prefill' is not complete (backend tcp, peer {lonely.address}): "
        "it has ranks 0 to 2, and the given addresses reach ranks [1]\n"
        "hint: give the address of every rank once"
    )
    decode = two_engines.open("decode", rank=0, ranks=2)
    text = decode.receive(56, pair.prefill.address, 64, deadline=20).failed()
    assert text == (
        f"the decode instance 'decode' is not complete (backend tcp, peer {pair.prefill.address}): "
        "it has ranks 0 to 1, and the given addresses reach ranks [0]\n"
        "hint: give the address of every rank once; a decode rank learns of the others through 'siblings'"
    )


def test_two_ranks_that_both_say_they_are_the_first(pair: Pair, two_engines: TwoEngines) -> None:
    ranks = [two_engines.open("prefill", (Kv(replicated=True),)) for _ in range(2)]
    text = pair.decode.receive(61, [each.address for each in ranks], 64, deadline=20).failed()
    assert "it has ranks 0 to 0, and the given addresses reach ranks [0, 0]" in text
    assert "hint: several links say that they are rank 0: pass each rank's own rank=" in text


def test_prefill_is_killed_and_restarted_with_what_fits(two_engines: TwoEngines) -> None:
    """A new room tries a refused instance again. Nobody has told decode that another process is at the address."""
    address = free_addresses(1)[0]
    doomed, decode = two_engines.engine(), two_engines.open("decode")
    two_engines.open("prefill", engine=doomed, listen=address, model="another")
    assert "'another' on prefill" in decode.receive(62, address, 64, deadline=20).failed()
    doomed.kill()
    made = Pair(two_engines.open("prefill", engine=two_engines.engine(), listen=address), decode)
    until = time.monotonic() + 20
    for room in itertools.count(5000):
        if decode.receive(room, address, 64, deadline=0.3).why().code != "mismatch":
            break  # until then, rooms fail with the reason of the refusal
        assert time.monotonic() < until
        time.sleep(0.2)
    case = made.case()
    receiving, sending = made.receive(case), made.send(case)
    made.push(sending, case)
    made.ended(case, receiving, sending)


def test_ranks_of_two_instances(pair: Pair, two_engines: TwoEngines) -> None:
    others = [two_engines.open("prefill", instance=name, ranks=2, rank=n) for n, name in enumerate("ab")]
    text = pair.decode.receive(57, [each.address for each in others], 64, deadline=20).failed()
    assert "ranks of several prefill instances were given as one" in text
    assert text.endswith(": a, b")


def test_a_rank_without_its_part_of_the_heads(pair: Pair, two_engines: TwoEngines) -> None:
    half, nothing = hybrid(kv=Kv(tp=(0, 2))), ()
    ranks = [two_engines.open("prefill", pools, rank=rank, ranks=2) for rank, pools in enumerate((half, nothing))]
    addresses = [each.address for each in ranks]
    text = pair.decode.receive(58, addresses, 64, deadline=20).failed()
    assert text == (
        f"no source holds a part of buffer 'layers.0.k' (backend tcp, peer {','.join(addresses)}, component kv, "
        "decode decode, rank 0): head [2, 4), dim [0, 16) is held by no prefill rank\n"
        "hint: every rank of the prefill instance must be present, and describe what it holds in global coordinates"
    )


def test_a_decode_link_is_no_prefill_instance(pair: Pair, two_engines: TwoEngines) -> None:
    other = two_engines.open("decode")
    text = pair.decode.receive(59, other.address, 64, deadline=20).failed()
    assert text == (
        f"a peer is not a prefill rank (peer {other.name}): its role is 'decode'\n"
        "hint: pass receive() an instance whose role is 'prefill' or 'both'"
    )


def test_an_instance_that_is_not_configured(pair: Pair) -> None:
    text = pair.decode.receive(60, "east", 64).failed()
    assert text == (
        "no instance named 'east': configured peers: none\n"
        "hint: add it to 'peers', or pass its addresses (tcp://host:port, one a rank)"
    )


def test_the_other_sides_calls(pair: Pair) -> None:
    calls: list[tuple[Callable[[], object], str, str]] = [
        (lambda: pair.decode.send(61, 64), "only prefill may call send(): this link's role is 'decode'", "prefill"),
        (
            lambda: pair.prefill.receive(61, "x", 64),
            "only decode may call receive(): this link's role is 'prefill'",
            "decode",
        ),
    ]
    for call, text, needed in calls:
        with pytest.raises(ConfigError) as error:
            call()
        assert str(error.value) == f"{text}\nhint: open the link with the role '{needed}' or 'both'"
        assert error.value.code == "config.role"


POOLS = np.zeros((2, 4, 16, 2, 8), np.uint16)


def inventory(**who: Any) -> state.Inventory:
    """A small one, in this process."""
    kind = who.pop("kind", "dram")
    shape = (4, 16, 2, 8)
    k, v = (state.Memory.pointer(each.ctypes.data, shape, "uint16", 2, kind=kind) for each in POOLS)
    return state.describe("here", [state.kv_pages({0: (k, v)}, heads=2)], **who)


def keys_of(config: Any) -> str:
    return ", ".join(sorted(field.name for field in msgspec.structs.fields(config)))


OPEN: list[tuple[dict[str, Any], type[StatelinkError], str]] = [
    (
        {"role": "prefill", "backend": "tcp", "lisen": "tcp://127.0.0.1:0"},
        ConfigError,
        f"unknown key 'lisen' in the configuration of a link: known keys: {keys_of(statelink.LinkConfig)}\n"
        "hint: did you mean 'listen'?",
    ),
    (
        {"role": "prefill", "backend": "tcp", "options": {"stall_timout": 3}},
        ConfigError,
        f"unknown key 'stall_timout' in the options of backend 'tcp': known keys: {keys_of(Options)}\n"
        "hint: did you mean 'stall_timeout'?",
    ),
    (
        {"role": "prefill", "backend": "tcp", "options": {"streams": "70"}},
        ConfigError,
        "bad value in the options of backend 'tcp': streams: a whole number is expected, got '70'",
    ),
    (
        {"role": "prefill", "backend": "tcp", "options": {"tcp": {"port": 70}}},
        ConfigError,
        f"unknown key 'tcp' in the options of backend 'tcp': known keys: {keys_of(Options)}\n"
        "hint: options in a table for each backend are for backend 'auto': write them into 'options' itself",
    ),
    (
        {"role": "neither", "backend": "tcp"},
        ConfigError,
        "bad value in the configuration of a link: role: Invalid enum value 'neither'\n"
        "hint: 'role' is one of 'prefill', 'decode', 'both'",
    ),
    (
        {"role": "prefill"},
        ConfigError,
        "bad value in the configuration of a link: backend is missing",
    ),
    (
        {"role": "prefill", "backend": "tpc"},
        UnknownBackendError,
        "did you mean 'tcp'?",
    ),
    (
        {"role": "decode", "backend": "tcp", "listen": "tcp://0.0.0.0:0"},
        ConfigError,
        "this link would listen on tcp://0.0.0.0:0 without keys: "
        "anyone who reaches that address could read and change requests\n"
        "hint: configure keys, or set insecure = true on a network that you trust wholly",
    ),
    (
        {"role": "decode", "backend": "tcp", "listen": "ipc:///tmp/x"},
        ConfigError,
        "'ipc:///tmp/x' is no address at which to listen\n"
        "hint: tcp://host:port, or a range of ports: tcp://host:7100-7199",
    ),
    (
        {"role": "decode", "backend": "tcp", "keys": {"secret": "short"}},
        ConfigError,
        "keys.secret is not a CURVE key: 40 characters of Z85 are expected",
    ),
    (
        {"role": "decode", "backend": "tcp", "heartbeat": 1.0, "liveness": 1.5},
        ConfigError,
        "liveness must be at least twice the heartbeat: liveness is 1.5 s, heartbeat 1.0 s",
    ),
    (
        {"role": "decode", "backend": "tcp", "deadline": 0.0},
        ConfigError,
        "deadline must be above zero: got 0.0",
    ),
]


@pytest.mark.parametrize(("config", "kind", "text"), OPEN)
def test_configurations(backend: str, config: dict[str, Any], kind: type[StatelinkError], text: str) -> None:
    with pytest.raises(kind) as error:
        statelink.open(config, inventory())
    assert text == str(error.value) or (kind is UnknownBackendError and error.value.hint == text)


def test_a_kind_of_memory_that_is_not_declared(backend: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        statelink.open({"role": "decode", "backend": "tcp"}, inventory(kind="cuda:0"))
    assert str(error.value) == (
        "backend 'tcp' cannot register memory of kind 'cuda:0' (instance here, rank 0): it declares dram"
    )


def test_nothing_to_move(backend: str) -> None:
    with pytest.raises(ConfigError, match="the inventory has no components"):
        statelink.open({"role": "decode", "backend": "tcp"}, state.describe("here", []))


def test_components_that_were_not_described(backend: str) -> None:
    components: Any = list(inventory().components)
    with pytest.raises(
        StateError, match=r"an inventory is expected: got list\nhint: statelink\.state\.describe makes one"
    ):
        statelink.open({"role": "decode", "backend": "tcp"}, components)


def test_an_unknown_type_in_an_inventory(backend: str) -> None:
    with pytest.raises(StateError, match=r"no state type named 'mamab'.*\nhint: did you mean 'mamba'"):
        state.Component(name="x", type="mamab", buffers=inventory().components[0].buffers)


def test_a_backend_that_fails_while_it_opens(two_engines: TwoEngines) -> None:
    refused: list[tuple[str, str, type[StatelinkError], str]] = [
        ("probe", "no such card", BackendUnavailableError, "cannot run here: no such card\nhint: plug it in"),
        ("register", "refuse", TransferError, "the transport refused: ENOBUFS"),
        ("register", "defect", TransferError, "memory could not be registered (backend faulty-tcp): ZeroDivisionError"),
    ]
    for call, what, kind, text in refused:
        two_engines.decode.run("faulty_backends", "plan", call, what)
        with pytest.raises(kind) as error:
            two_engines.open("decode", backend="faulty-tcp")
        assert text in str(error.value)
        assert not two_engines.decode(Host.threads)
    two_engines.open("decode", backend="faulty-tcp")


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("what", ["refuse", "defect"])
def test_a_backend_that_fails_to_connect(two_engines: TwoEngines, side: str, what: str) -> None:
    made = two_engines.pair(backend="faulty-tcp")
    engine = two_engines.prefill if side == "prefill" else two_engines.decode
    tries = 2 if side == "prefill" else 1  # prefill has tried before it was asked to
    engine.run("faulty_backends", "plan", "connect", what, 0, tries)
    text = made.decode.receive(62, made.prefill.address, 64, deadline=20).failed()
    cause = {"refuse": "ENOBUFS", "defect": "a defect of this backend"}[what]
    assert cause in text
    assert "backend faulty-tcp" in text
    assert "peer " in text


def test_mamba_layers_of_another_name(pair: Pair, two_engines: TwoEngines) -> None:
    """Layers are paired by their numbers, and not by where they stand."""
    decode = two_engines.open("decode", hybrid(mamba=Mamba(layers=(5, 6))))
    text = decode.receive(63, pair.prefill.address, 64, deadline=20).failed()
    for label, there in (("4", "absent on decode, present on prefill"), ("6", "present on decode, absent on prefill")):
        assert f"mamba/layers.{label}.conv: {there}" in text
    assert "layers.5" not in text
