"""A stand-in for NIXL's agent that takes any memory and writes down what it is told, for what no test machine has."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.helpers.backend_peer import make

from statelink_nixl import NixlBackend

if TYPE_CHECKING:
    import pytest

    from statelink.backend import Backend, Region

Step = Callable[[Any], str]


def ready(handle: Any) -> str:
    return "DONE"


class Agent:
    """NIXL's agent, as far as the plugin uses it.

    Attributes:
        moved: Every transfer: its operation, and for each side the kind of memory and the rows.
        post: What starting a transfer says of it.
        check: What looking at it says.
        carry: Sends so many bytes as a transfer has.
    """

    plugin_list = ("UCX",)
    moved: list[tuple[Any, ...]] = []  # noqa: RUF012 - of all agents
    post: Step = staticmethod(ready)
    check: Step = staticmethod(ready)
    carry: Callable[[int], None] = staticmethod(lambda nbytes: None)

    def __init__(self, name: str, settings: Any) -> None:
        self.name = name

    def create_backend(self, name: str, parameters: dict[str, str]) -> None: ...

    def register_memory(self, rows: Any, segment: str) -> None: ...

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        return metadata

    def remove_remote_agent(self, name: str) -> None: ...

    def get_xfer_descs(self, rows: Any, segment: str) -> tuple[str, Any]:
        assert rows.flags.c_contiguous
        assert rows.dtype == "uint64"
        return segment, rows

    def initialize_xfer(self, op: str, near: tuple[str, Any], far: tuple[str, Any], peer: str) -> Any:
        self.moved.append((op, near[0], near[1].tolist(), far[0], far[1].tolist()))
        nbytes = int(near[1][:, 1].sum())
        return SimpleNamespace(nbytes=nbytes, release=lambda: None)

    def transfer(self, handle: Any) -> str:
        type(self).carry(handle.nbytes)
        return type(self).post(handle)

    def check_xfer_state(self, handle: Any) -> str:
        return type(self).check(handle)


def installed(monkeypatch: pytest.MonkeyPatch) -> type[Agent]:
    """A class of agents of its own, which the plugin makes from now on."""
    import nixl._api as api

    kind = type("Agent", (Agent,), {"moved": []})
    monkeypatch.setattr(api, "nixl_agent", kind)
    return kind


def pair(near: tuple[Region, ...], far: tuple[Region, ...], options: dict[str, Any]) -> Backend:
    """A backend with memory, connected to another with memory, called ``far``."""
    backends = make(NixlBackend, "near", options), make(NixlBackend, "far", options)
    for backend, regions in zip(backends, (near, far), strict=True):
        backend.register(regions)
    backends[0].connect("far", backends[1].descriptor(), far)
    return backends[0]
