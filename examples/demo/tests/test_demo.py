"""The demo as a user runs it: whole processes, real libraries, and answers that must be right to the bit."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from click.testing import CliRunner
from tests.helpers.availability import problem_of

from statelink_demo.cli import demo
from statelink_demo.demo import LENGTHS
from statelink_demo.messages import CHUNK_TOKENS, Expect, Expected, Failed, Finished, Prompt, Ready, Serve, Settings
from statelink_demo.processes import Crew, DemoError

if TYPE_CHECKING:
    from collections.abc import Iterator

DEMO = [sys.executable, "-c", "from statelink.cli import main; main()", "demo"]
REQUIRED = {"tcp", *filter(None, os.environ.get("STATELINK_TEST_REQUIRE", "").split(","))}

PAGE = 2 * 2 * 16 * 4 * 32 * 2
"""Bytes of one page: keys and values, layers, tokens, heads, width, bytes of a number."""
SLOT = 6 * (384 * 3 * 2 + 8 * 16 * 32 * 4)
"""Bytes of one slot: layers, then convolution and recurrent state."""
ROW = 4 * 64

CHANGES_LOGITS = [
    *(f"{part}.{layer}" for part in "kv" for layer in (3, 7)),
    *(f"{part}.{layer}" for part in ("conv", "recurrent") for layer in (0, 1, 2, 4, 5, 6)),
    "output_ids",
]
IS_REFUSED = {"counts": r"row \d+ says 0 tokens", "room": r"belongs to room 0"}
POOLS = [*CHANGES_LOGITS, *IS_REFUSED, "logprobs"]


class Done(NamedTuple):
    """How a run of the demo ended."""

    status: int
    stdout: str
    stderr: str


def command(*args: str) -> Done:
    """Run the demo as a user does."""
    done = subprocess.run([*DEMO, *args], capture_output=True, text=True, timeout=160, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def here(*args: str) -> Done:
    """Run the demo with this process as its parent: then all runs share one process that imports torch."""
    done = CliRunner().invoke(demo, args)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return Done(done.exit_code, done.stdout, done.stderr)


@pytest.fixture(scope="module", autouse=True)
def _no_process_left() -> Iterator[None]:
    yield
    # Python has no public name for the end of this process.
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # noqa: SLF001


@pytest.mark.parametrize("backend", ["tcp", "nixl", "mooncake"])
def test_decode_answers_as_one_process_does(backend: str) -> None:
    if backend != "tcp" and (problem := problem_of(backend)):
        if backend in REQUIRED:
            pytest.fail(f"backend {backend} is required and cannot run here: {problem}", pytrace=False)
        pytest.skip(problem)
    # The backend that needs nothing runs the demo as it is; the others a smaller one.
    if backend == "tcp":
        count, tokens, done = 4, 32, command()
    else:
        count, tokens, done = 2, 4, here("--backend", backend, "--requests", "2", "--tokens", "4")
    assert (done.status, done.stderr) == (0, "")
    verdict = f"{count} of {count} requests as in one process: first-step logits bit-equal, {tokens} tokens identical"
    assert f"ok    by chunks of {CHUNK_TOKENS} tokens: {verdict}" in done.stdout
    assert f"ok    by layers, during the forward pass: {verdict}" in done.stdout
    assert f"moved from prefill to decode over {backend}" in done.stdout
    rows = re.findall(r"(kv|mamba|metadata) +│ +([\d,]+) │ +([\d,]+) │ +(\d+) │ +(\d+\.\d)", done.stdout)
    assert [row[0] for row in rows] == ["kv", "mamba", "metadata"] * 2
    parts = [(name, int(size.replace(",", "")), int(pushes)) for name, size, _, pushes, _ in rows]
    for chunks, slots, metadata in (parts[:3], parts[3:]):
        assert chunks[1] % PAGE == 0
        assert chunks[1] >= count * PAGE * LENGTHS.start // 16
        assert (slots[1], metadata[1]) == (count * SLOT, count * ROW)
    by_chunk, by_layer = parts[0][2], parts[3][2]
    assert by_chunk >= 2 * count
    assert by_layer >= 2 * 2 * count  # chunks, times layers with keys and values
    assert [part[2] for part in (*parts[1:3], *parts[4:])] == [count, count, 6 * count, count]
    assert f"run 2 of 2: {count} of {count} requests answered\n" in done.stdout


@pytest.fixture(scope="module")
def sabotaged() -> dict[str, Any]:
    """One more request than there are pools: each has one zeroed after it arrived, the last has none."""
    chosen = [arg for pool in POOLS for arg in ("--sabotage", pool)]
    done = here("--json", "--no-by-layer", "--tokens", "2", "--requests", str(len(POOLS) + 1), *chosen)
    assert (done.status, done.stderr) == (1, "")
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["ok"] is False
    return found


@pytest.mark.parametrize("pool", POOLS)
def test_a_pool_that_does_not_arrive_shows(sabotaged: dict[str, Any], pool: str) -> None:
    (verdict,) = (each for each in sabotaged["runs"][0]["verdicts"] if each["sabotage"] == pool)
    assert verdict["moved"]
    assert not verdict["ok"]
    assert verdict["altered"] == [pool]
    assert verdict["problems"][0] == f"not what prefill held: {pool} (zeroed on purpose: {pool})"
    assert verdict["refused"] == (pool in IS_REFUSED)
    if pool in CHANGES_LOGITS:
        assert not verdict["logits_equal"]
        assert re.fullmatch(r"first-step logits differ in \d+ of 512 places", verdict["problems"][1])
    elif pool in IS_REFUSED:
        assert re.search(f"^decode refused it: .*{IS_REFUSED[pool]}", verdict["problems"][1])
    else:
        assert verdict["problems"][1].startswith("prefill's token arrived as ")


def test_what_is_left_alone_beside_it_is_right(sabotaged: dict[str, Any]) -> None:
    """Also: more requests than the pools can hold at once, so that memory is released and used again."""
    (report,) = sabotaged["runs"]
    verdict = report["verdicts"][-1]
    assert verdict["ok"]
    assert verdict["logits_equal"]
    assert verdict["tokens_equal"]
    assert verdict["problems"] == []
    tokens = [each["tokens"] for each in report["verdicts"]]
    sizes = {name: part["nbytes"] for name, part in report["components"].items()}
    assert sizes == {
        "kv": sum(-(-n // 16) for n in tokens) * PAGE,
        "mamba": len(tokens) * SLOT,
        "metadata": len(tokens) * ROW,
    }
    assert report["components"]["kv"]["pushes"] == sum(-(-n // CHUNK_TOKENS) for n in tokens)


def test_workers_that_do_not_agree_or_end_are_reported() -> None:
    """Another model on the other side, a pool that does not exist, a worker that crashes, one that is killed."""
    prompt = Prompt(1, tuple(range(100)))
    with Crew(timeout=60) as crew:
        crew.start("prefill", Settings())
        crew.start("decode", Settings(seed=1))
        ready = dict(crew.hear("both") for _ in range(2))
        assert isinstance(ready["prefill"], Ready)
        address = ready["prefill"].address
        crew.send("decode", Expect((Expected(prompt.room, 100),), address))
        role, failed = crew.hear("decode")
        assert role == "decode"
        assert isinstance(failed, Failed)
        assert "model" in failed.why
        assert isinstance(crew.hear("decode to finish")[1], Finished)
        crew.send("decode", Expect((Expected(2, 100, "nothing.0"),), address))
        with pytest.raises(DemoError, match=r"no pool named 'nothing\.0' to zero; there are k\.3, k\.7, "):
            crew.hear("decode")
        with pytest.raises(DemoError, match=r"(?s)^decode exited with status 1; its last words:.* not describe the"):
            crew.hear("decode")
    with Crew(timeout=60) as crew:
        crew.start("prefill", Settings())
        crew.hear("prefill")
        crew.send("prefill", Serve((prompt,)))
        (worker,) = multiprocessing.active_children()
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(DemoError, match=r"^prefill was killed by SIGKILL$"):
            crew.hear("prefill")
    with Crew(timeout=60) as crew:
        crew.start("reference", Settings())
        crew.hear("reference")
        crew.send("reference", Expect((), ""))
        with pytest.raises(DemoError, match=r"(?s)^reference exited with status 1; its last words:.*ValidationError"):
            crew.hear("reference")
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("moment", ["loading the model", "reference: "])
def test_an_interrupt_ends_everything(moment: str) -> None:
    """While torch is imported, and when all workers work."""
    # A shell's background job ignores interrupts, and so does what it starts: the demo is to be like one in front.
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        started = subprocess.Popen(
            [*DEMO, "--plain"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
    finally:
        signal.signal(signal.SIGINT, heard)
    with started:
        assert started.stdout is not None
        assert any(line.startswith(moment) for line in started.stdout)
        family = descendants(started.pid)
        assert len(family) >= (4 if moment == "reference: " else 1)
        os.killpg(started.pid, signal.SIGINT)  # as a terminal does
        _, printed = started.communicate(timeout=100)
    assert started.returncode == 130
    assert printed.strip() == "Interrupted."
    until = time.monotonic() + 20
    while left := [pid for pid in family if is_running(pid)]:
        assert time.monotonic() < until, left
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (
            ["--backend", "nixxl"],
            1,
            "Error: no backend named 'nixxl' in group 'statelink.backends' (installed: ",
        ),
        (
            ["--sabotage", "k.3", "--sabotage", "v.3", "--requests", "1"],
            2,
            "Error: 2 pools to sabotage, one a request, and only 1 requests",
        ),
    ],
)
def test_a_mistake_is_told_at_once(args: list[str], status: int, message: str) -> None:
    done = command(*args)
    assert (done.status, done.stdout) == (status, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def descendants(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(each for child in children for each in descendants(child))]
