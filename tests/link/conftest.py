"""Real processes to run links in: a pair that lives for all tests of a backend, and engines for more of them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from tests.helpers.engine import Engine, LinkHandle
from tests.helpers.pair import Pair
from tests.helpers.pools import Component, hybrid
from tests.helpers.worker import Host

if TYPE_CHECKING:
    from pathlib import Path

_numbers = itertools.count()
FORCED: dict[str, Any] = {"mode": "always", "ring_bytes": 96 << 10, "parcel_bytes": 32 << 10}
"""Staging of everything, in rings that are a fraction of a request, and parcels that are a few items."""


class TwoEngines:
    """Opens links in a prefill and a decode process, as often as a test likes.

    Attributes:
        usual: What every link is configured with that says nothing else.
        untidy: Whether a test leaves what does not end soon.
        lasting: A pair that several tests use.
    """

    def __init__(self, backend: str, folder: Path) -> None:
        self.backend, self.folder = backend, folder
        self.prefill, self.decode = (Engine(folder, name) for name in ("prefill", "decode"))
        self.engines = [self.prefill, self.decode]
        self.untidy = False
        self.usual: dict[str, Any] = {}
        self.lasting: Pair | None = None
        self._spares: list[Engine] = []
        self._leaving: list[Engine] = []

    def start(self, count: int) -> list[Engine]:
        """So many more processes, which end with the test. One is always started ahead, since that takes a while."""
        while len(self._spares) <= count:
            self._spares.append(self._start())
        made, self._spares = self._spares[:count], self._spares[count:]
        self.engines += made
        for engine in made:
            engine.result()
        return made

    def engine(self, *inside: str) -> Engine:
        """Another such process; for ``inside`` see `Engine`."""
        if inside:
            self._spares.insert(0, self._start(*inside))
        return self.start(1)[0]

    def _start(self, *inside: str) -> Engine:
        made = Engine(self.folder, f"other-{next(_numbers)}", inside)
        made.start(Host.warm, self.backend)
        return made

    def open(self, role: str, pools: Sequence[Component] | None = None, **config: Any) -> LinkHandle:
        """Open a link of the role's process, or of ``engine``."""
        return self.begin_open(role, pools, **config)()

    def begin_open(
        self, role: str, pools: Sequence[Component] | None = None, **config: Any
    ) -> Callable[[], LinkHandle]:
        """The first half of that, for links in several processes; see `Engine.begin_open`."""
        engine: Engine = config.pop("engine", self.prefill if role == "prefill" else self.decode)
        config = {"backend": self.backend, **self.usual, **config}
        return engine.begin_open(role, config.pop("backend"), hybrid() if pools is None else pools, **config)

    def pair(
        self, prefill: Sequence[Component] | None = None, decode: Sequence[Component] | None = None, **config: Any
    ) -> Pair:
        """Open a link on each side."""
        theirs = config.pop("decode_config", {})
        return Pair(self.open("prefill", prefill, **config), self.open("decode", decode, **{**config, **theirs}))

    def clear(self) -> None:
        """Close what a test opened, and see that nothing is left."""
        untidy, self.untidy = self.untidy, False
        problems: list[str] = []
        living = [engine for engine in self.engines if engine.alive]
        for engine in living:
            engine.start(Host.close_all, 0.5 if untidy else 5.0)
        for engine in living:
            engine.links.clear()
            if not engine.result() and not untidy:
                problems.append(f"{engine.name}: close() says that not everything ended")
            # A call about a dead peer may still be in the library, which needs a while to find that it is dead.
            until = time.monotonic() + (10.0 if untidy else 0.0)
            while (left := engine(Host.threads)) and time.monotonic() < until:
                time.sleep(0.05)
            problems += [f"{engine.name} leaves threads {left}"] if left else []
            problems += [f"{engine.name}: {each}" for each in engine(Host.take_errors)]
        for engine in self.engines[2:]:
            engine.dismiss()
        self._leaving += self.engines[2:]
        del self.engines[2:]
        assert not problems, "\n".join(problems)

    def abandon(self) -> None:
        """Kill every process: one of them did not do what it was told, so that no other test can use them."""
        for engine in [*self._leaving, *self.engines, *self._spares]:
            engine.kill()

    @property
    def usable(self) -> bool:
        return all(engine.alive for engine in (self.prefill, self.decode))

    def dismiss(self) -> list[Engine]:
        """End its processes; those that are still to be waited for."""
        everyone = [*self._leaving, *self.engines, *self._spares]
        for engine in everyone:
            engine.dismiss()
        return everyone


@pytest.fixture(scope="session")
def _engine_pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., TwoEngines]]:
    """Two processes for each backend and purpose. Not a fixture with parameters, which ends with a backend's turn."""
    made: dict[str, TwoEngines] = {}

    def get(backend: str, purpose: str = "two_engines") -> TwoEngines:
        name = f"{purpose}-{backend}"
        if name not in made or not made[name].usable:
            made[name] = TwoEngines(backend, tmp_path_factory.mktemp(name))
        return made[name]

    yield get
    for engine in [each for two_engines in made.values() for each in two_engines.dismiss()]:
        engine.leave()


@pytest.fixture
def pair(backend: str, _engine_pairs: Callable[..., TwoEngines]) -> Iterator[Pair]:
    """Links between two processes that serve every test of a backend: what one test does must not harm the next.

    After each, the next request succeeds, and nothing is left of those before it; otherwise the pair is made anew.
    """
    engines = _engine_pairs(backend, "pair")
    made, engines.lasting = engines.lasting or engines.pair(), None
    yield made
    try:
        if made.all_done:  # otherwise the test failed, and has said so
            made.run()
            made.idle()
            assert made.errors() == []
            engines.lasting = made
    finally:
        if engines.lasting is None:
            try:
                made.prefill.close(0.5)
                made.decode.close(0.5)
                made.errors()
            except Exception:
                engines.abandon()
                raise


@pytest.fixture
def two_engines(
    request: pytest.FixtureRequest, backend: str, _engine_pairs: Callable[..., TwoEngines]
) -> Iterator[TwoEngines]:
    """Two processes for links of a test's own, staged where it is marked so. After it, nothing may be left of them."""
    made = _engine_pairs(backend)
    made.usual = {"staging": FORCED} if request.node.get_closest_marker("staged") else {}
    yield made
    try:
        made.clear()
    except Exception:
        made.abandon()
        raise
