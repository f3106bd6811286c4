"""The demo itself: starts the workers, hands them requests, and collects what became of each."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from statelink_demo.crew import Crew, DemoError, Role, SilenceError
from statelink_demo.messages import (
    Answered,
    Arrived,
    Computed,
    Expect,
    Expected,
    Failed,
    Finished,
    Opened,
    Prompt,
    Ready,
    Refused,
    Sent,
    Serve,
    Solve,
    Start,
)
from statelink_demo.prompts import make_prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from statelink_demo.display import Display
    from statelink_demo.messages import Event

__all__ = ["CHUNK_TOKENS", "LENGTHS", "Log", "Run", "Settings", "run_demo"]

CHUNK_TOKENS = 64
"""Tokens per forward pass of prefill."""
LENGTHS = range(100, 221)
"""Lengths of prompts: at least two chunks, and hardly ever a whole number of pages."""
LOADING = 180.0
"""Seconds for the workers to import torch and build the model, from a cold disk."""
GRACE = 5.0
"""Seconds for the others to end once a request has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the user asked for.

    Attributes:
        backend: Name of the backend.
        requests: Concurrent requests of each run.
        tokens: Tokens to generate of each.
        seed: Of the weights and the prompts.
        modes: For each run, whether state is pushed by layers.
        timeout: Seconds that a request, or silence, may take.
        sabotage: Pools to zero in decode's memory, one request each.
    """

    backend: str
    requests: int
    tokens: int
    seed: int
    modes: tuple[bool, ...]
    timeout: float
    sabotage: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class Log:
    """What became of one request."""

    prompt: Prompt
    sabotage: str
    reference: Answered | None = None
    sent: Sent | None = None
    arrived: Arrived | None = None
    answered: Answered | None = None
    refused: Refused | None = None
    failures: dict[Role, str] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Run:
    """All requests that are served together."""

    by_layer: bool
    logs: dict[int, Log]

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """The requests."""
        return tuple(log.prompt for log in self.logs.values())

    @property
    def title(self) -> str:
        """What is special about it."""
        return "by layers, during the forward pass" if self.by_layer else f"by chunks of {CHUNK_TOKENS} tokens"


def run_demo(settings: Settings, display: Display) -> list[Run]:
    """Serve every run's requests, and answer them in one process too.

    Raises:
        DemoError: It could not be carried out; what became of single requests is in the logs instead.
    """
    runs = _runs(settings)
    with Crew("reference", "prefill", "decode", timeout=settings.timeout + GRACE) as crew:
        peer = _start(crew, settings, display)
        _solve(crew, settings, runs, display)
        for number, run in enumerate(runs, 1):
            _serve(crew, settings, run, peer, _Progress(display, run, number, len(runs), settings.tokens))
            if any(log.failures for log in run.logs.values()):
                return runs[:number]  # its memory may be in quarantine: the next run would not be a fair one
        crew.dismiss()
    return runs


def _runs(settings: Settings) -> list[Run]:
    rng = random.Random(settings.seed)
    runs = []
    for by_layer in settings.modes:
        logs = {}
        for index in range(settings.requests):
            # Any 64 bits but zero; other prompts in each run, so that nothing left of one passes in the next.
            room = rng.getrandbits(64) or 1
            prompt = Prompt(room, make_prompt(rng.getrandbits(32), rng.choice(LENGTHS)))
            logs[room] = Log(prompt, settings.sabotage[index] if index < len(settings.sabotage) else "")
        runs.append(Run(by_layer, logs))
    return runs


def _start(crew: Crew, settings: Settings, display: Display) -> str:
    """Have every worker build its model; prefill's address."""
    roles: list[Role] = ["reference", "prefill", "decode"]
    start = Start(settings.seed, settings.backend, CHUNK_TOKENS, settings.timeout)
    for role in roles:
        display.show(role, "loading the model")
        crew.send(role, start)
    display.show("statelink", "waiting")
    address = ""
    while roles:
        role, event = crew.hear(f"{' and '.join(roles)} to load the model", LOADING)
        if not isinstance(event, Ready):
            raise _unexpected(role, event)
        display.show(role, "ready")
        roles.remove(role)
        if role == "prefill":
            address = event.address
    return address


def _solve(crew: Crew, settings: Settings, runs: list[Run], display: Display) -> None:
    """Have the reference answer everything, before the runs, whose times it would spoil."""
    logs = {room: log for run in runs for room, log in run.logs.items()}
    prompts = tuple(prompt for run in runs for prompt in run.prompts)
    crew.send("reference", Solve(prompts, settings.tokens))
    for done in range(len(logs)):
        display.show("reference", "answering in one process", done, len(logs))
        role, event = crew.hear("the reference's answers")
        if not isinstance(event, Answered):
            raise _unexpected(role, event)
        logs[event.room].reference = event
    display.show("reference", "answered in one process", len(logs), len(logs))


def _serve(crew: Crew, settings: Settings, run: Run, peer: str, progress: _Progress) -> None:
    """Have decode expect a run's requests and prefill serve them, until both have released their memory."""
    expected = tuple(Expected(log.prompt.room, len(log.prompt.prompt), log.sabotage) for log in run.logs.values())
    crew.send("decode", Expect(expected, peer, settings.tokens))
    role, event = crew.hear("decode to open its rooms")
    if not isinstance(event, Opened):
        raise _unexpected(role, event)
    crew.send("prefill", Serve(run.prompts, run.by_layer))
    busy: set[Role] = {"prefill", "decode"}
    while busy:
        failed = any(log.failures for log in run.logs.values())
        try:
            role, event = crew.hear(f"{' and '.join(sorted(busy))} to finish", GRACE if failed else None)
        except SilenceError:
            if failed:
                return  # what is known already says more
            raise
        if isinstance(event, Finished):
            busy.discard(role)
        else:
            _note(run.logs, role, event)
            progress.note(event)


def _note(logs: Mapping[int, Log], role: Role, event: Event) -> None:
    if isinstance(event, Sent):
        logs[event.room].sent = event
    elif isinstance(event, Arrived):
        logs[event.room].arrived = event
    elif isinstance(event, Answered):
        logs[event.room].answered = event
    elif isinstance(event, Refused):
        logs[event.room].refused = event
    elif isinstance(event, Failed):
        logs[event.room].failures[role] = event.why
    elif not isinstance(event, Computed):
        raise _unexpected(role, event)


def _unexpected(role: Role, event: Event) -> DemoError:
    return DemoError(f"{role} said something unexpected: {event!r:.200}")


class _Progress:
    """Counts the events of one run for the display."""

    def __init__(self, display: Display, run: Run, number: int, runs: int, tokens: int) -> None:
        self._show: Callable[[str, str, int, int], None] = display.show
        self._prefix = f"run {number} of {runs}: "
        self._tokens = tokens
        self._totals = {
            "prefill": sum(-(-len(prompt.prompt) // CHUNK_TOKENS) for prompt in run.prompts),
            "statelink": len(run.logs),
            "decode": tokens * len(run.logs),
        }
        self._done = dict.fromkeys(self._totals, 0)
        self._verbs = {
            "prefill": "computing",
            "statelink": f"moving requests {'by layers' if run.by_layer else 'by chunks'}",
            "decode": "generating",
        }
        for row in self._totals:
            self._advance(row, 0)

    def note(self, event: Event) -> None:
        if isinstance(event, Computed):
            self._advance("prefill", 1)
        elif isinstance(event, Arrived):
            self._advance("statelink", 1)
        elif isinstance(event, (Answered, Refused)):
            self._advance("decode", self._tokens)

    def _advance(self, row: str, by: int) -> None:
        self._done[row] += by
        self._show(row, self._prefix + self._verbs[row], self._done[row], self._totals[row])
