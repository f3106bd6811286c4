"""Functions that run in a worker: ranks of one side of a request with every state type. The host comes first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import statelink
from statelink import state

from . import _pools

if TYPE_CHECKING:
    from ._worker import Host

__all__ = ["open_ranks", "receive", "send"]

ROOM = 3


def open_ranks(
    host: Host,
    role: str,
    backend: str,
    options: Mapping[str, Any],
    ranks: Sequence[int],
    listen: Sequence[str],
    labels: list[str],
    more: Mapping[str, Any],
) -> list[str]:
    """Open some ranks of a side, and fill those of prefill. Returns their addresses.

    Args:
        host: This process.
        role: The side.
        backend: Name of the backend.
        options: Its options.
        ranks: Numbers of these ranks.
        listen: Address of each rank of the side, also in other processes.
        labels: The components that they hold.
        more: Further keys of the links' configuration.
    """
    width, opened = len(listen), host.kept.setdefault(role, [])
    for rank in ranks:
        stock = _pools.Stock(host)
        held = _pools.make(role, rank, width, labels, stock)
        inventory = state.describe(role, [each.described for each in held.values()], rank=rank, ranks=width)
        config = {
            "role": role,
            "backend": backend,
            "options": dict(options),
            "listen": listen[rank],
            "siblings": [each for each in listen if each != listen[rank]] if role == "decode" else [],
            **more,
        }
        link = statelink.open(config, inventory)
        host.links[f"{role}-{rank}"] = link
        if role == "prefill":
            _pools.fill(held)
            stock.upload()
        opened.append((link, held, stock))
    return [link.address for link, _, _ in opened]


def send(host: Host, patience: float) -> None:
    """Push the request from every rank, and wait for its end."""
    rooms = []
    for link, held, _ in host.kept["prefill"]:
        sending = link.send(ROOM, _pools.TOKENS)
        sending.push({each.described.component.name: each.ids for each in held.values()})
        rooms.append(sending)
    for room in rooms:
        room.wait(patience)
        room.check()


def receive(host: Host, peers: list[str], patience: float) -> list[dict[str, str]]:
    """Receive the request on every rank. Returns what is wrong with each component, rank by rank."""
    rooms = []
    for link, held, _ in host.kept["decode"]:
        items = {each.described.component.name: each.ids for each in held.values()}
        rooms.append(link.receive(ROOM, peers, _pools.TOKENS, items, prefix=_pools.PREFIX))
    for room in rooms:
        room.wait(patience)
        room.check()
    for _, _, stock in host.kept["decode"]:
        stock.download()
    return [_pools.judge(held) for _, held, _ in host.kept["decode"]]


def close(host: Host, patience: float) -> bool:
    """Close every rank; whether all came to rest."""
    links, host.links = host.links, {}
    ended = [link.close(patience) for link in links.values()]
    host.kept.pop("prefill", None)
    host.kept.pop("decode", None)
    return all(ended)


def both(host: Host, peers: list[str], patience: float) -> list[dict[str, str]]:
    """Both sides in one process."""
    for link, held, _ in host.kept["prefill"]:
        link.send(ROOM, _pools.TOKENS).push({each.described.component.name: each.ids for each in held.values()})
    return receive(host, peers, patience)


def open_strange(host: Host, backend: str, options: Mapping[str, Any]) -> None:
    """Open a link over memory of a kind that no backend has."""
    memory = state.Memory.pointer(host.address, (4, 64), "uint8", 1, kind="granite:0")
    inventory = state.describe("strange", [state.aux_rows({"rows": memory})])
    host.links["strange"] = statelink.open({"role": "decode", "backend": backend, "options": dict(options)}, inventory)
