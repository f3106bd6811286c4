"""Two processes that play prefill and decode for a part, and what each of them found."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

__all__ = ["PAGE_TOKENS", "Side", "both", "succeeded"]

PAGE_TOKENS = 16
Job = dict[str, Any]
Side = Callable[[str, "Connection", Job], Any]
"""Runs in a process of its own, with its role, a pipe to the other side, and what to do. Returns what it found."""


def both(side: Side, job: Job, seconds: float) -> dict[str, Any]:
    """Run both sides. Returns what each found, by role.

    Raises:
        RuntimeError: A side raised an error, ended without an answer, or took too long.
    """
    context = multiprocessing.get_context("spawn")
    ends = context.Pipe()
    answers, processes = {}, {}
    for role, end in zip(("prefill", "decode"), ends, strict=True):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(side, role, end, job, theirs, seconds))
        process.start()
        theirs.close()
        answers[role], processes[role] = ours, process
    for end in ends:
        end.close()  # so that a side sees when the other one dies
    found: dict[str, Any] = {}
    failed: list[str] = []
    until = time.monotonic() + seconds
    try:
        for role in answers:
            if not answers[role].poll(max(0.1, until - time.monotonic())):
                failed.append(f"{role} came to no end within {seconds:g} seconds")
                continue
            try:
                what, value = answers[role].recv()
            except EOFError:
                processes[role].join(5)
                failed.append(f"{role} ended without an answer, with exit status {processes[role].exitcode}")
                continue
            if what == "found":
                found[role] = value
            else:
                failed.append(f"{role}: {value}")
        for process in processes.values():
            process.join(0 if failed else 5)
    finally:
        for process in processes.values():
            process.kill()
    if failed:
        raise RuntimeError("; ".join(failed))
    return found


def succeeded(room: Any) -> None:
    """Wait for a room's success, and until nothing touches its memory."""
    room.wait(30, quiesced=True)
    room.check()


def _run(side: Side, role: str, pipe: Connection, job: Job, answers: Connection, seconds: float) -> None:
    faulthandler.dump_traceback_later(max(1.0, seconds - 2))  # where it hangs, before it is killed
    try:
        said = ("found", side(role, pipe, job))
    except BaseException as error:
        traceback.print_exc()
        said = ("error", f"{type(error).__name__}: {error}")
    answers.send(said)
    answers.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # libraries of cards may crash a process at its normal end; its answer is sent
