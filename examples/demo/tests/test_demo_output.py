"""What the user is shown: progress, table, verdicts. Nothing is moved here."""

from __future__ import annotations

import io

import numpy as np
import torch
from rich.console import Console

from statelink_demo.demo import Log, Run
from statelink_demo.display import Bars, Lines
from statelink_demo.inventory import describe_pools
from statelink_demo.judge import judge
from statelink_demo.messages import Answered, Arrived, Count, Prompt, Refused, Sent
from statelink_demo.model import tiny_config
from statelink_demo.pools import StatePools
from statelink_demo.report import print_reports
from statelink_demo.shape import StateShape

LOGITS = np.linspace(-1, 1, 512, dtype=np.float32).view(np.uint16)[1::2].tobytes()
SAME = {"k.3": "1", "conv.0": "2"}


def log(room: int, **changes: object) -> Log:
    found = Log(Prompt(room, tuple(range(100))), "")
    found.reference = Answered(room, 5, -0.5, LOGITS, (1, 2, 3))
    found.sent = Sent(room, {"kv": 2, "mamba": 1}, {"kv": 10.0, "mamba": 10.001}, SAME)
    found.arrived = Arrived(room, 10.004, {"kv": Count(1024, 4), "mamba": Count(512, 2)})
    found.answered = Answered(room, 5, -0.5, LOGITS, (1, 2, 3), SAME)
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def text_of(run: Run) -> str:
    console = Console(file=io.StringIO(), width=80)
    print_reports(console, [judge(run)], "tcp", 3)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def run_of(*logs: Log, by_layer: bool = False) -> Run:
    return Run(by_layer, {each.prompt.room: each for each in logs})


def test_a_good_run_is_summed_up() -> None:
    text = text_of(run_of(log(1), log(2)))
    assert "│   kv                   │ 2,048 │      8 │      4 │ 4.0 │" in text
    assert "│   mamba                │ 1,024 │      4 │      2 │ 3.0 │" in text
    assert "ok    by chunks of 64 tokens: 2 of 2 requests as in one process: " in text
    assert "request 1" not in text


def test_wrong_answers_are_named() -> None:
    flipped = bytearray(LOGITS)
    flipped[0] ^= 1
    text = text_of(
        run_of(
            log(1),
            log(2, answered=Answered(2, 5, -0.5, bytes(flipped), (1, 2, 3), SAME)),
            log(3, answered=Answered(3, 5, -0.5, LOGITS, (1, 9, 3), {**SAME, "conv.0": "x"})),
            log(4, answered=Answered(4, 6, -0.5, LOGITS, (1, 2, 3), SAME)),
            log(5, answered=None, refused=Refused(5, "row 3 belongs to room 0, not to room 5", SAME)),
            log(6, arrived=None, answered=None, failures={"decode": "component 'kv' was never pushed"}),
            log(7, sent=None, arrived=None, answered=None),
        )
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
    found = log(1, reference=Answered(1, 5, -0.5, nan, (1,)), answered=Answered(1, 5, -0.5, nan, (1,), SAME))
    (verdict,) = judge(run_of(found)).verdicts
    assert not verdict.ok
    assert not verdict.logits_equal


def test_progress_is_bars_on_a_terminal_and_lines_elsewhere() -> None:
    shown = {}
    for kind, terminal in ((Bars, True), (Lines, False)):
        file = io.StringIO()
        with kind(Console(file=file, force_terminal=terminal, width=80)) as display:
            display.show("prefill", "loading the model")
            for done in range(4):
                display.show("prefill", "computing [3]", done, 3)
        shown[kind] = file.getvalue()
    assert shown[Lines].splitlines() == [
        "prefill   loading the model",
        "prefill   computing [3]",
        "prefill   computing [3]: 3 of 3",
    ]
    assert "━" in shown[Bars]
    assert "3/3" in shown[Bars]


def test_the_inventory_names_every_pool() -> None:
    pools = StatePools(StateShape.of(tiny_config()), pages=12, slots=3, rows=4)
    inventory = describe_pools("prefill", pools.layouts(), "revision")
    assert {each.name: (each.kind.name, each.page, len(each.buffers)) for each in inventory.components} == {
        "kv": ("kv", 16, 4),
        "mamba": ("mamba", 0, 12),
        "metadata": ("aux", 0, 4),
    }
    assert len(inventory.regions) == len(pools.layouts())
    conv = next(each for each in inventory.component("mamba").buffers if each.name == "layers.0.conv")
    assert [(slab.start[0], slab.stop[0]) for slab in conv.layout.slabs] == [(0, 64), (64, 128), (128, 384)]
    assert inventory.model == "revision"
