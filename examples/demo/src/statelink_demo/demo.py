"""The demo itself: starts the workers, hands them requests, and collects what became of each."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from statelink_demo.messages import (
    CHUNK_TOKENS,
    Answer,
    Event,
    Expect,
    Expected,
    Failed,
    Finished,
    Prompt,
    Ready,
    Role,
    Sent,
    Serve,
    Served,
    Settings,
    Solved,
)
from statelink_demo.processes import Crew, DemoError, SilenceError

__all__ = ["LENGTHS", "Log", "Run", "Say", "make_prompt", "run_demo"]

ROLES: tuple[Role, ...] = ("reference", "prefill", "decode")
LENGTHS = range(100, 221)
"""Lengths of prompts: at least two chunks, and hardly ever a whole number of pages."""
LOADING = 180.0
"""Seconds for a worker to build the model."""
GRACE = 5.0
"""Seconds for the others to end once a request has failed."""

Say = Callable[[str], None]
"""Tells the user what the demo is at, in one line."""


@dataclass(slots=True, eq=False)
class Log:
    """What became of one request."""

    prompt: Prompt
    sabotage: str = ""
    reference: Answer | None = None
    sent: Sent | None = None
    served: Served | None = None
    failures: dict[Role, str] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Run:
    """All requests that are served together."""

    by_layer: bool
    logs: dict[int, Log]

    @property
    def failed(self) -> bool:
        """Whether a room of it failed."""
        return any(log.failures for log in self.logs.values())

    @property
    def title(self) -> str:
        """What is special about it."""
        return "by layers, during the forward pass" if self.by_layer else f"by chunks of {CHUNK_TOKENS} tokens"


def make_prompt(seed: int, length: int) -> tuple[int, ...]:
    """Return a prompt without a tokenizer: `length` token ids that depend on `seed` alone."""
    rng = random.Random(seed)
    return tuple(rng.randrange(512) for _ in range(length))


def run_demo(settings: Settings, say: Say) -> list[Run]:
    """Serve every run's requests, and answer them in one process too.

    Raises:
        DemoError: It could not be carried out; what became of single requests is in the logs instead.
    """
    runs = [_make_run(settings, by_layer, number) for number, by_layer in enumerate(settings.modes)]
    with Crew(timeout=settings.timeout + GRACE) as crew:
        say("loading the model, in three processes")
        peer = _start(crew, settings)
        _solve(crew, runs, say)
        for number, run in enumerate(runs, 1):
            _serve(crew, run, peer, say, f"run {number} of {len(runs)}")
            if run.failed:
                return runs[:number]  # its memory may be in quarantine: the next run would not be a fair one
        crew.dismiss()
    return runs


def _make_run(settings: Settings, by_layer: bool, number: int) -> Run:
    # Other prompts in each run, so that nothing left of one passes in the next.
    rng = random.Random(f"{settings.seed} {number}")
    logs = {}
    for index in range(settings.requests):
        room = rng.getrandbits(64) or 1  # any 64 bits but zero
        prompt = Prompt(room, make_prompt(rng.getrandbits(32), rng.choice(LENGTHS)))
        logs[room] = Log(prompt, settings.sabotage[index] if index < len(settings.sabotage) else "")
    return Run(by_layer, logs)


def _start(crew: Crew, settings: Settings) -> str:
    """Have every worker build its model; prefill's address."""
    for role in ROLES:
        crew.start(role, settings)
    address = ""
    for _ in ROLES:
        role, event = crew.hear("the workers to load the model", LOADING)
        if not isinstance(event, Ready):
            raise _unexpected(role, event)
        address = event.address or address
    return address


def _solve(crew: Crew, runs: list[Run], say: Say) -> None:
    """Have the reference answer everything, before the runs, whose times it would spoil."""
    logs = {room: log for run in runs for room, log in run.logs.items()}
    say(f"reference: {len(logs)} requests in one process")
    crew.send("reference", Serve(tuple(log.prompt for log in logs.values())))
    for _ in logs:
        role, event = crew.hear("the reference's answers")
        if not isinstance(event, Solved):
            raise _unexpected(role, event)
        logs[event.room].reference = event.answer


def _serve(crew: Crew, run: Run, peer: str, say: Say, name: str) -> None:
    """Have decode expect a run's requests and prefill serve them, until both have released their memory."""
    say(f"{name}: {len(run.logs)} requests, {run.title}")
    expected = tuple(Expected(log.prompt.room, len(log.prompt.prompt), log.sabotage) for log in run.logs.values())
    crew.send("decode", Expect(expected, peer))
    crew.send("prefill", Serve(tuple(log.prompt for log in run.logs.values()), run.by_layer))
    busy: set[Role] = {"prefill", "decode"}
    answered = 0
    while busy:
        try:
            role, event = crew.hear(f"{' and '.join(sorted(busy))} to finish", GRACE if run.failed else None)
        except SilenceError:
            if run.failed:
                return  # what is known already says more
            raise
        if isinstance(event, Finished):
            busy.discard(role)
        elif isinstance(event, Sent):
            run.logs[event.room].sent = event
        elif isinstance(event, Served):
            run.logs[event.room].served = event
            answered += 1
            say(f"{name}: {answered} of {len(run.logs)} requests answered")
        elif isinstance(event, Failed):
            run.logs[event.room].failures[role] = event.why
        else:
            raise _unexpected(role, event)


def _unexpected(role: Role, event: Event) -> DemoError:
    return DemoError(f"{role} said something unexpected: {event!r:.200}")
