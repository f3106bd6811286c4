"""The demo as a user runs it: whole processes, real libraries, and answers that must be right to the bit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from functools import partial
from operator import attrgetter, methodcaller
from pathlib import Path
from subprocess import PIPE

import pytest
from tests.helpers.availability import problem_of

from statelink.testing.process import Process
from statelink_demo.cli import worker
from statelink_demo.messages import Request

DEMO = [sys.executable, "-c", "from statelink.cli import main; main()", "demo"]
REQUIRED = {"tcp", *filter(None, os.environ.get("STATELINK_TEST_REQUIRE", "").split(","))}
SLOT = 6 * (384 * 3 * 2 + 8 * 16 * 32 * 4)
"""Bytes of one slot: layers, then convolution and recurrent state."""
LINEAR = [f"{part}.{layer}" for part in ("conv", "recurrent") for layer in (0, 1, 2, 4, 5, 6)]
LOGITS = ["k.3", "k.7", "v.3", "v.7", *LINEAR, "output_ids"]
REFUSED = {"counts": r"row \d+ says 0 tokens", "room": r"row \d+ belongs to room 0"}


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*DEMO, *args], capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("backend", ["tcp", "nixl", "mooncake"])
def test_decode_answers_as_one_process_does(backend: str) -> None:
    if backend != "tcp" and (problem := problem_of(backend)):
        if backend in REQUIRED:
            pytest.fail(f"backend {backend} is required and cannot run here: {problem}", pytrace=False)
        pytest.skip(problem)
    # The backend that needs nothing runs the demo as it is; the others a smaller one.
    count, tokens = (4, 32) if backend == "tcp" else (2, 4)
    done = run() if backend == "tcp" else run("--backend", backend, "--requests", "2", "--tokens", "4")
    assert (done.returncode, done.stderr) == (0, "")
    right = f"{count} of {count} requests as in one process: first-step logits bit-equal, {tokens} tokens identical"
    assert f"ok    by chunks of 64 tokens: {right}\nok    by layers, during the forward pass: {right}\n" in done.stdout
    assert f"moved from prefill to decode over {backend}" in done.stdout
    rows = re.findall(r"(kv|mamba|metadata) +│ +([\d,]+) │ +[\d,]+ │ +(\d+) │ +\d+\.\d", done.stdout)
    assert [row[0] for row in rows] == ["kv", "mamba", "metadata"] * 2
    sizes, pushes = ([int(row[at].replace(",", "")) for row in rows] for at in (1, 2))
    assert [sizes[at] for at in (1, 2, 4, 5)] == [count * SLOT, count * 256] * 2
    assert [pushes[at] for at in (1, 2, 4, 5)] == [count, count, 6 * count, count]
    assert pushes[0] >= 2 * count  # chunks
    assert pushes[3] >= 2 * 2 * count  # times layers with keys and values
    assert min(sizes[0], sizes[3]) >= count * 7 * 16384  # pages


def test_a_pool_that_does_not_arrive_shows_and_what_is_beside_it_is_right() -> None:
    pools = [*LOGITS, *REFUSED, "logprobs"]
    chosen = [arg for pool in pools for arg in ("--sabotage", pool)]
    done = run("--tokens", "2", "--requests", str(len(pools) + 1), *chosen)
    assert (done.returncode, done.stderr) == (1, "")
    assert f"WRONG by chunks of 64 tokens: {len(pools)} of {len(pools) + 1} requests not as in one p" in done.stdout
    assert f"request {len(pools) + 1} " not in done.stdout
    for number, pool in enumerate(pools, 1):
        first, second, *_ = re.findall(rf"\n  request {number} \(room \d+\): (.*)", done.stdout)
        assert first == f"not what prefill held: {pool} (zeroed on purpose: {pool})"
        known = {pool: r"first-step logits differ in \d+ of 512 places" for pool in LOGITS}
        known |= {pool: rf"decode refused it: .*{why}" for pool, why in REFUSED.items()}
        assert re.match(known.get(pool, "prefill's token arrived as "), second), (pool, second)


def test_sides_with_other_weights_refuse_each_other() -> None:
    made = [partial(worker, "Side", role, "tcp", 1, seed, 1) for seed, role in enumerate(("prefill", "decode"))]
    with Process(made[0]) as prefill, Process(made[1]) as decode:
        address = prefill(attrgetter("link.address"))
        answer = decode(methodcaller("decode", [Request(1, 100, "")], address))[1]
        assert answer.failed.startswith("the room failed: ")
        assert "model" in answer.failed
        assert decode.leave() == prefill.leave() == 0


def test_an_interrupt_ends_everything() -> None:
    # A shell's background job ignores interrupts, and so does what it starts: the demo is to be like one in front.
    front = ["env", "--default-signal=SIGINT", *DEMO]
    with subprocess.Popen(front, stdout=PIPE, stderr=PIPE, text=True, start_new_session=True) as started:
        assert started.stdout is not None
        assert any(line.startswith("reference: ") for line in started.stdout)
        family = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
        assert len(family) == 3
        os.killpg(started.pid, signal.SIGINT)  # as a terminal does
        assert started.communicate(timeout=100)[1].strip() == "Interrupted."
    assert started.returncode == 130
    assert not any(Path(f"/proc/{pid}").exists() for pid in family)


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (["--backend", "nixxl"], 1, "Error: no backend named 'nixxl' in group 'statelink.backends' (installed: "),
        (["--sabotage", "k.3", "--sabotage", "v.3", "--requests", "1"], 2, "2 pools to sabotage, one a request, and "),
        (["--sabotage", "k.0"], 1, "no pool named 'k.0' to zero; there are k.3, k.7, v.3, "),
    ],
)
def test_a_mistake_is_told(args: list[str], status: int, message: str) -> None:
    done = run(*args)
    assert done.returncode == status
    assert message in done.stderr
    assert "Traceback" not in done.stderr
