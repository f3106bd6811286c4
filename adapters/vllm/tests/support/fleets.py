"""Servers with several ranks of data parallelism, behind one HTTP port or several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from engine_processes import free_port

from .engines import PREFILL, transfer
from .servers import PREFILL_NAME, Server

if TYPE_CHECKING:
    import contextlib
    from pathlib import Path

    from .servers import Answer

__all__ = ["Fleet", "Rank", "Share", "Side", "external", "hybrid", "internal", "one"]

EXPERTS = "--enable-expert-parallel"


class Share(NamedTuple):
    """The ranks of one server.

    Attributes:
        ranks: How many.
        options: Options of its command line.
    """

    ranks: int
    options: tuple[str, ...]


def one(*more: str) -> list[Share]:
    """One rank, and no data parallelism."""
    return [Share(1, more)]


def internal(*more: str) -> list[Share]:
    """Two ranks behind one port. The server balances."""
    return [Share(2, ("--data-parallel-size", "2", *more))]


def external() -> list[Share]:
    """Two ranks with a port each."""
    port = str(free_port())
    return [
        Share(
            1,
            (
                *("--data-parallel-size", "2", "--data-parallel-rank", str(rank), "--data-parallel-external-lb"),
                *("--data-parallel-rpc-port", port, EXPERTS),
            ),
        )
        for rank in range(2)
    ]


def hybrid() -> list[Share]:
    """Two ranks behind one port, and a third behind another. Each server balances over its own."""
    port = str(free_port())
    return [
        Share(
            count,
            (
                *("--data-parallel-size", "3", "--data-parallel-hybrid-lb", "--data-parallel-rpc-port", port, EXPERTS),
                *("--data-parallel-start-rank", str(first), "--data-parallel-size-local", str(count)),
                *("--api-server-count", "1"),
            ),
        )
        for first, count in ((0, 2), (2, 1))
    ]


class Rank(NamedTuple):
    """A rank, and how a router reaches it.

    Attributes:
        server: The server that takes its requests.
        name: What vLLM calls it.
        number: What names it among the ranks of its server; ``None`` if the server has no other.
    """

    server: Server
    name: str
    number: int | None

    def complete(self, prompt: Sequence[int], count: int, params: dict[str, Any] | None = None) -> Answer:
        """The completion of a prompt, by this rank."""
        return self.server.complete(prompt, count, params, rank=self.number)

    def client(
        self, prompt: Sequence[int], count: int, params: dict[str, Any]
    ) -> contextlib.AbstractContextManager[None]:
        """See `Server.client`."""
        return self.server.client(prompt, count, params, rank=self.number)


class Side:
    """All servers that are prefill, or decode.

    Attributes:
        servers: Each with an HTTP port.
        ranks: Those of all servers, in order.
    """

    def __init__(self, name: str, shares: Sequence[Share], start: Callable[[str, Sequence[str]], Server]) -> None:
        self.servers = [start(f"{name}{number}", share.options) for number, share in enumerate(shares)]
        at = [
            (server, number if share.ranks > 1 else None)
            for server, share in zip(self.servers, shares, strict=True)
            for number in range(share.ranks)
        ]
        instance = PREFILL_NAME if name == "prefill" else "decode-0"
        self.ranks = [
            Rank(server, f"{instance}_dp{place}" if len(at) > 1 else instance, number)
            for place, (server, number) in enumerate(at)
        ]

    def wait_ready(self) -> None:
        """Return once all of them answer. Ranks of one model wait for each other when they start."""
        for server in self.servers:
            server.wait_ready()

    def kill(self) -> None:
        """End all of them."""
        for server in self.servers:
            server.kill()

    def logged(self) -> str:
        """What they printed so far."""
        return "".join(server.logged() for server in self.servers)

    def metric(self, name: str) -> list[float]:
        """The values of one of vLLM's metrics, with any labels."""
        return [value for server in self.servers for value in server.metric(name)]


class Fleet:
    """Prefill and decode.

    Args:
        folder: Where the logs are.
        model: The model.
        config: The connector's own options.
        prefill: The servers of prefill.
        decode: The servers of decode.
    """

    def __init__(
        self, folder: Path, model: Path, config: dict[str, Any], prefill: Sequence[Share], decode: Sequence[Share]
    ) -> None:
        # A request whose state does not come ends with an error: nothing is computed in its place unseen.
        sender, receiver = (
            transfer(config, "fail", kv_role=role, engine_id=name)
            for role, name in (("kv_producer", PREFILL_NAME), ("kv_consumer", "decode-0"))
        )
        self.prefill = Side("prefill", prefill, lambda name, given: Server(name, folder, model, sender, *given))
        self.decode = Side("decode", decode, lambda name, given: Server(name, folder, model, receiver, *given))

    def route(self, prompt: Sequence[int], count: int, source: Rank, target: Rank) -> Answer:
        """What a serial router does. It has chosen a rank of prefill, and one of decode."""
        first = source.complete(prompt, 1, dict(PREFILL))
        assert first.status == 200, first
        params = first.body["kv_transfer_params"]
        assert params["remote_engine_id"] == source.name
        return target.complete(prompt, count, params)

    def route_to_both(self, prompt: Sequence[int], count: int, source: Rank, target: Rank, name: str) -> Answer:
        """What a concurrent router does: both get the request at once, and decode finds prefill by its name."""
        sent = {"do_remote_prefill": True, "remote_engine_id": source.name, "transfer_id": name}
        with ThreadPoolExecutor(1) as thread:
            first = thread.submit(source.complete, prompt, 1, {**PREFILL, "transfer_id": name})
            answer = target.complete(prompt, count, sent)
            assert first.result().status == 200
        return answer

    def settled(self) -> None:
        """Check that every block of every rank is free again."""
        for server in (*self.prefill.servers, *self.decode.servers):
            server.wait_usage(False)
