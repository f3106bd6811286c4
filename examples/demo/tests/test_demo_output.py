"""What the user is shown: progress, table, verdicts. Nothing is moved here."""

from __future__ import annotations

import io

import numpy as np
import torch
from rich.console import Console

from statelink_demo.cli import print_reports, progress
from statelink_demo.demo import Log, Run
from statelink_demo.judge import judge
from statelink_demo.messages import Answer, Prompt, Sent, Served

LOGITS = np.linspace(-1, 1, 512, dtype=np.float32).view(np.uint16)[1::2].tobytes()
ANSWER = Answer(5, -0.5, LOGITS, (1, 2, 3))
SAME = {"k.3": "1", "conv.0": "2"}
MOVED = {"kv": (1024, 4), "mamba": (512, 2)}


def log(room: int, answer: Answer | None = ANSWER, **changes: object) -> Log:
    found = Log(Prompt(room, tuple(range(100))))
    found.reference = ANSWER
    found.sent = Sent(room, {"kv": [9.0, 10.0], "mamba": [10.001]}, SAME)
    found.served = Served(room, 10.004, MOVED, SAME, answer)
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def text_of(*logs: Log) -> str:
    console = Console(file=io.StringIO(), width=80)
    print_reports(console, [judge(Run(False, {each.prompt.room: each for each in logs}))], "tcp", 3)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_good_run_is_summed_up() -> None:
    text = text_of(log(1), log(2))
    assert "│   kv                   │ 2,048 │      8 │      4 │ 4.0 │" in text
    assert "│   mamba                │ 1,024 │      4 │      2 │ 3.0 │" in text
    assert "ok    by chunks of 64 tokens: 2 of 2 requests as in one process: " in text
    assert "request 1" not in text


def test_wrong_answers_are_named() -> None:
    flipped = bytearray(LOGITS)
    flipped[0] ^= 1
    text = text_of(
        log(1),
        log(2, Answer(5, -0.5, bytes(flipped), (1, 2, 3))),
        log(3, served=Served(3, 10.0, MOVED, {**SAME, "conv.0": "x"}, Answer(5, -0.5, LOGITS, (1, 9, 3)))),
        log(4, Answer(6, -0.5, LOGITS, (1, 2, 3))),
        log(5, served=Served(5, 10.0, MOVED, SAME, refused="row 3 belongs to room 0, not to room 5")),
        log(6, served=None, failures={"decode": "component 'kv' was never pushed"}),
        log(7, sent=None, served=None),
    )
    assert "WRONG by chunks of 64 tokens: 6 of 7 requests not as in one process" in text
    for line in (
        "request 2 (room 2): first-step logits differ in 1 of 512 places",
        "request 3 (room 3): not what prefill held: conv.0",
        "request 3 (room 3): token 2 is 9, the reference has 2",
        "request 4 (room 4): prefill's token arrived as 6 with logprob -0.5, the reference has 5 with -0.5",
        "request 5 (room 5): decode refused it: row 3 belongs to room 0, not to room 5",
        "request 6 (room 6): the room failed: component 'kv' was never pushed",
        "request 7 (room 7): prefill and decode did not come to an end",
    ):
        assert line in text
    assert "request 1 " not in text


def test_logits_that_are_not_numbers_equal_nothing() -> None:
    nan = torch.full((512,), torch.nan, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    answer = Answer(5, -0.5, nan, (1,))
    (verdict,) = judge(Run(False, {1: log(1, answer, reference=answer)})).verdicts
    assert not verdict.ok
    assert not verdict.logits_equal


def test_progress_is_one_line_on_a_terminal_and_a_line_for_each_step_elsewhere() -> None:
    shown = []
    for terminal, plain in ((True, False), (True, True), (False, False)):
        file = io.StringIO()
        with progress(Console(file=file, force_terminal=terminal, width=80), plain=plain) as say:
            say("loading the model")
            say("run 1 of 2: 3 of 4 requests [answered]")
        shown.append(file.getvalue())
    assert shown[1] == shown[2] == "loading the model\nrun 1 of 2: 3 of 4 requests [answered]\n"
    assert "\x1b[?25l" in shown[0]  # hides the cursor while the line changes
