"""Real processes to run links in: a pair that lives for all tests of a backend, and engines for more of them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from tests.helpers.availability import environment_of
from tests.helpers.engine import Engine, LinkHandle
from tests.helpers.pair import Pair
from tests.helpers.pools import Component, hybrid

if TYPE_CHECKING:
    from pathlib import Path

_numbers = itertools.count()
LINGERS = 10.0
"""Seconds that a library may need to find that a peer is dead, while its thread is waited for."""
FORCED: dict[str, Any] = {"mode": "always", "ring_bytes": 96 << 10, "parcel_bytes": 32 << 10}
"""Staging of everything, in rings that are a fraction of a request, and parcels that are a few items."""


class TwoEngines:
    """Opens links in a prefill and a decode process, as often as a test likes.

    Attributes:
        prefill: The process with prefill links.
        decode: The process with decode links.
        usual: What every link is configured with that says nothing else.
        environment: What a process needs to find the backend's library, or its simulator.
    """

    def __init__(self, backend: str, folder: Path) -> None:
        self.backend = backend
        self.folder = folder
        self.environment = environment_of(backend)
        self.prefill = Engine(folder, "prefill", environment=self.environment)
        self.decode = Engine(folder, "decode", environment=self.environment)
        self.engines = [self.prefill, self.decode]
        self.untidy = False
        self.usual: dict[str, Any] = {}
        self._spare: Engine | None = None
        self._leaving: list[Engine] = []

    def engine(self, *inside: str) -> Engine:
        """Another process, which ends with the test. One is always started ahead, since that takes a while.

        Args:
            *inside: See `Engine`.
        """
        made = self._start(*inside) if inside else self._spare or self._start()
        if not inside:
            self._spare = self._start()
        self.engines.append(made)
        made.answer()
        return made

    def start(self, count: int) -> list[Engine]:
        """So many more processes, which end with the test; they start at the same time."""
        made = [self._start() for _ in range(count)]
        self.engines += made
        for engine in made:
            engine.answer()
        return made

    def _start(self, *inside: str) -> Engine:
        made = Engine(self.folder, f"other-{next(_numbers)}", inside, self.environment)
        made.ask("warm", self.backend)
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
        self,
        prefill: Sequence[Component] | None = None,
        decode: Sequence[Component] | None = None,
        **config: Any,
    ) -> Pair:
        """Open a link on each side."""
        theirs = config.pop("decode_config", {})
        return Pair(self.open("prefill", prefill, **config), self.open("decode", decode, **{**config, **theirs}))

    def clear(self) -> None:
        """Close what a test opened, and see that nothing is left."""
        untidy, self.untidy = self.untidy, False
        problems: list[str] = []
        living = [engine for engine in self.engines if engine.process.poll() is None]
        for engine in living:
            engine.ask("close_all", 0.5 if untidy else 5.0)
        for engine in list(self.engines):
            if engine not in (self.prefill, self.decode):
                self.engines.remove(engine)
                self._leaving.append(engine)
            if engine not in living:
                engine.dismiss()
                continue
            engine.links.clear()
            if not engine.answer() and not untidy:
                problems.append(f"{engine.name}: close() says that not everything ended")
            left = self._threads(engine)
            until = time.monotonic() + LINGERS
            while untidy and left and time.monotonic() < until:  # a call about a dead peer may still be in the library
                time.sleep(0.05)
                left = self._threads(engine)
            problems += [f"{engine.name} leaves threads {left}"] if left else []
            problems += [f"{engine.name}: {each}" for each in engine.call("take_errors")]
            if engine not in (self.prefill, self.decode):
                engine.dismiss()
        assert not problems, "\n".join(problems)

    @staticmethod
    def _threads(engine: Engine) -> list[str]:
        """Threads of links that a process has."""
        return [name for name in engine.call("threads") if name.startswith(("statelink-", "tcp-"))]

    def dismiss(self) -> list[Engine]:
        """End its processes; those that are still to be waited for."""
        everyone = [*self._leaving, *self.engines, *([self._spare] if self._spare else [])]
        for engine in everyone:
            engine.dismiss()
        return everyone


class SharedPair:
    """The pair that every test of a backend uses, made anew when a test has harmed it."""

    def __init__(self, backend: str, folder: Path) -> None:
        self._backend = backend
        self._engines = Engine(folder, "prefill"), Engine(folder, "decode")
        self.pair = self._open()

    def _open(self) -> Pair:
        prefill, decode = self._engines
        return Pair(prefill.open("prefill", self._backend, hybrid()), decode.open("decode", self._backend, hybrid()))

    def check(self) -> None:
        """The next request succeeds, and nothing is left of those before it."""
        if not self.pair.all_done:
            self._renew()  # the test failed, and has said so
            return
        try:
            self.pair.run()
            self.pair.idle()
            assert self.pair.errors() == []
        except BaseException:
            self._renew()
            raise

    def _renew(self) -> None:
        self.pair.prefill.close(0.5)
        self.pair.decode.close(0.5)
        self.pair = self._open()
        self.pair.errors()

    def dismiss(self) -> list[Engine]:
        """End its processes; those that are still to be waited for."""
        for engine in self._engines:
            engine.dismiss()
        return list(self._engines)


@pytest.fixture(scope="session")
def _shared_pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], SharedPair]]:
    """A pair for each backend. Not a fixture with parameters: those end whenever another backend has its turn."""
    made: dict[str, SharedPair] = {}

    def get(backend: str) -> SharedPair:
        if backend not in made:
            made[backend] = SharedPair(backend, tmp_path_factory.mktemp(f"pair-{backend}"))
        return made[backend]

    yield get
    for engine in [each for shared in made.values() for each in shared.dismiss()]:
        engine.end()


@pytest.fixture
def pair(backend: str, _shared_pairs: Callable[[str], SharedPair]) -> Iterator[Pair]:
    """Links between two processes that serve every test of a backend: what one test does must not harm the next."""
    shared = _shared_pairs(backend)
    yield shared.pair
    shared.check()


@pytest.fixture(scope="session")
def _engine_pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], TwoEngines]]:
    made: dict[str, TwoEngines] = {}

    def get(backend: str) -> TwoEngines:
        if backend not in made:
            made[backend] = TwoEngines(backend, tmp_path_factory.mktemp(f"two_engines-{backend}"))
        return made[backend]

    yield get
    for engine in [each for two_engines in made.values() for each in two_engines.dismiss()]:
        engine.end()


@pytest.fixture
def two_engines(
    request: pytest.FixtureRequest, backend: str, _engine_pairs: Callable[[str], TwoEngines]
) -> Iterator[TwoEngines]:
    """Two processes in which a test opens links of its own. They are closed after it, and nothing may be left.

    Staging is forced on in a test that is marked so.
    """
    made = _engine_pairs(backend)
    made.usual = {"staging": FORCED} if request.node.get_closest_marker("staged") else {}
    yield made
    made.clear()
