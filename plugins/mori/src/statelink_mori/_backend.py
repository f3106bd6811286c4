"""The backend: a probe, and a refusal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from statelink.backend import DIRECT, Backend, BackendContext, Batch, Capabilities, Probe, Region, SubmitMode, Transfer
from statelink.errors import BackendUnavailableError, UnsupportedError

from ._machine import active_ports, gpus, missing
from ._options import Options

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MoriBackend"]

ONLY_PROBES = "statelink-mori 0.1 only probes; it does not move bytes"


class MoriBackend(Backend):
    """Says what this machine lacks for MoRI, and moves nothing."""

    api_version = 1
    name = "mori"
    Options = Options
    # It declares nothing, because it does nothing.
    capabilities: ClassVar[Capabilities] = Capabilities(
        memory_kinds=frozenset(), ops=frozenset(), submit_mode=SubmitMode.ASYNC, fences={}
    )
    strategies: ClassVar = {"*": DIRECT}

    def __init__(self, context: BackendContext) -> None:
        probe = self.probe(context.options)
        raise BackendUnavailableError(probe.reason, hint=probe.hint, backend=self.name)

    @classmethod
    def probe(cls, options: Any) -> Probe:
        """Look for what the transport needs. Never ok: with everything there, this version still moves nothing."""
        try:
            lacks = list(missing(options.transport))
            details = {"gpus": ", ".join(gpus()) or "none", "active RDMA ports": ", ".join(active_ports()) or "none"}
        except Exception as error:  # a probe explains, and never raises
            return Probe(ok=False, reason=f"{ONLY_PROBES}. Looking for what it needs failed: {error}")
        found = f"This machine lacks what MoRI needs: {'; '.join(lacks)}" if lacks else "MoRI's needs are met here"
        return Probe(ok=False, reason=f"{ONLY_PROBES}. {found}", hint="choose another backend", details=details)

    def register(self, regions: Sequence[Region]) -> None:
        """Refused."""
        self._refuse()

    def descriptor(self) -> bytes:
        """Refused."""
        self._refuse()

    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        """Refused."""
        self._refuse()

    def submit(self, peer: str, batch: Batch) -> Transfer:
        """Refused."""
        self._refuse()

    def poll(self, transfers: Sequence[Transfer]) -> None:
        """Refused."""
        self._refuse()

    def disconnect(self, peer: str) -> None:
        """Refused."""
        self._refuse()

    def close(self) -> None:
        """Refused."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UnsupportedError(ONLY_PROBES, backend=self.name)
