"""The real NIXL, and UCX's own code for CUDA, over the stand-in GPU: a host access to its memory ends a process."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
from tools import gpu

if TYPE_CHECKING:
    from pathlib import Path

    from tests.gpu.conftest import Run
    from tests.gpu.standin import Standin

PLAIN, VIRTUAL, POOL = "0", "1", "3"
SHORT = ("--mib", "4", "--rounds", "2")


def test_it_is_for_tests_only(run: Run) -> None:
    ran = run("-m", "tools.card.link", "cuda", "cuda", *SHORT, STANDIN_GPU="")
    assert ran.status == 1
    assert "CUDA error 100" in ran.answer("failed")  # no device


@pytest.mark.parametrize(
    ("sides", "kind", "carrier"),
    [
        (("cuda", "cuda"), PLAIN, "cuda_ipc"),
        (("cuda", "dram"), PLAIN, "tcp"),
        (("dram", "cuda"), PLAIN, "tcp"),
        (("cuda", "cuda"), VIRTUAL, "tcp"),
        (("cuda", "cuda"), POOL, "tcp"),
    ],
    ids=["cuda-cuda", "cuda-dram", "dram-cuda", "virtual", "pool"],
)
def test_links(run: Run, sides: tuple[str, str], kind: str, carrier: str) -> None:
    ran = run("-m", "tools.card.link", *sides, *SHORT, STANDIN_GPU_KIND=kind)
    assert ran.status == 0, ran.output
    assert ran.answer("every byte is right") is True
    over_loopback = float(ran.answer("share that went over the loopback interface"))
    assert (over_loopback > 0.9) is (carrier == "tcp")
    warned = "which many libraries cannot register, or move slowly" in ran.output
    assert warned is (kind != PLAIN)


@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
def test_no_thread_takes_a_device_that_holds_none_of_the_memory(run: Run, staged: bool) -> None:
    """Not the threads of the link, and not torch on them."""
    words = ("--device", "1", *(("--staged",) if staged else ()))
    ran = run("-m", "tools.card.link", "cuda", "cuda", *SHORT, *words, torch="standin")
    assert ran.status == 0, ran.output
    assert ran.answer("every byte is right") is True
    assert ran.contexts() == {"1"}
    assert {device for _, device, _ in ran.log} <= {-1, 1}


def test_the_order_of_streams_is_kept(run: Run) -> None:
    """With an event. Without one, this has to see stale bytes: otherwise it could not see a broken order."""
    ran = run("-m", "tools.card.order", "--rooms", "3")
    assert ran.status == 0, ran.output
    for what in ("pushed", "accepted"):
        assert ran.answer(f"{what} with an event").startswith("0 of 3")
        assert ran.answer(f"{what} without an event").startswith("1 of 1")


def test_layers_leave_while_kernels_run(run: Run) -> None:
    """The launching thread is ahead of the device. How long all of it takes here says nothing."""
    ran = run("-m", "tools.card.layers", "--layers", "8", "--mib", "1", "--ms", "5", "--rounds", "2")
    assert ran.status == 0, ran.output
    assert ran.answer("rooms with wrong bytes") == "0 of 8"
    for way in ("one push", "groups of 1", "groups of 4", "the adapters' groups"):
        assert 0 < ran.answer(f"{way}: launching it") < ran.answer(f"{way}: forward pass")
        assert isinstance(ran.answer(f"{way}: left after it"), float)


def test_memory_is_what_the_driver_says(run: Run) -> None:
    ran = run("-m", "tests.gpu.programs", "kinds")
    assert ran.status == 0, ran.output
    answers = {what: said.partition(":")[0] for what, said in ran.answers.items()}
    assert answers.pop("memory of the card") == "opened"
    assert answers.pop("memory of the card, over auto") == "opened"
    refused = ran.answers["memory of the card, over tcp"]
    assert "'tcp'" in refused
    assert "cuda" in refused
    del answers["memory of the card, over tcp"]
    for what in answers:
        assert "state.memory" in ran.answers[what], what


def test_a_forked_child(run: Run) -> None:
    """CUDA does not work in a process that was forked after its start, and the error says so."""
    ran = run("-m", "tests.gpu.programs", "forked")
    assert ran.status == 0, ran.output
    said = ran.answer("in a forked child")
    assert "the CUDA driver has not started in this process" in said
    assert "CUDA was started before this process was forked" in said


def test_a_library_that_ucx_lacks_is_named(run: Run, standin: Standin, tmp_path: Path) -> None:
    library = "libnvidia-ml.so.1"
    ran = run("-m", "tests.gpu.programs", "opened", over=standin.without(library, tmp_path / "libraries"))
    assert ran.status == 0, ran.output
    said = ran.answer("memory of the card")
    assert "could not be registered" in said
    assert library in said


@pytest.mark.parametrize(("ordering", "flushes"), [("0", True), ("100", False), ("200", False)])
def test_writes_are_flushed_where_the_device_does_not_order_them(run: Run, ordering: str, flushes: bool) -> None:
    """On decode, once for each room at least, by a thread whose context is that of the memory."""
    ran = run("-m", "tools.card.link", "cuda", "cuda", *SHORT, "--device", "1", STANDIN_GPU_ORDERING=ordering)
    assert ran.status == 0, ran.output
    found = [device for _, device, text in ran.log if text == "cuFlushGPUDirectRDMAWrites"]
    assert bool(found) is flushes
    assert set(found) <= {1}
    assert not flushes or len(found) >= 3


def test_digests_of_memory_of_a_device(run: Run) -> None:
    """They are those of the same bytes in host memory, or the two sides would not agree."""
    ran = run("-m", "tools.card.link", "cuda", "dram", *SHORT, "--verify", "--device", "1")
    assert ran.status == 0, ran.output
    assert ran.answer("every byte is right") is True


@pytest.mark.parametrize(
    ("sides", "kind", "word"),
    [
        (("cuda", "cuda"), PLAIN, "cuda_ipc"),
        (("cuda", "dram"), PLAIN, "tcp"),
        (("cuda", "cuda"), POOL, "unknown"),  # memory for first writes would not stand for the pools
        (("dram", "dram"), PLAIN, "shm"),
    ],
)
def test_the_transport_of_memory_of_a_card_is_known(run: Run, sides: tuple[str, str], kind: str, word: str) -> None:
    ran = run("-m", "tools.card.link", *sides, *SHORT, STANDIN_GPU_KIND=kind)
    assert ran.status == 0, ran.output
    assert ran.answer("transport, as the report says") == word


@pytest.mark.parametrize("kind", [PLAIN, POOL], ids=["plain", "pool"])
def test_doctor_says_how_fast_memory_of_a_card_moves(run: Run, kind: str) -> None:
    """Slow memory is a problem. How fast the stand-in is says nothing."""
    ran = run(*gpu.over_card("doctor", "nixl", "--json"), STANDIN_GPU_KIND=kind)
    checks = json.loads(ran.output[ran.output.index("{\n") :])["checks"]
    (found,) = [check for check in checks if check["what"] == "loopback transfer"]
    verdict, text = found["verdict"], found["found"]
    told = re.search(r"ms \((\d+\.\d) GB/s\), every byte right", text)
    assert told is not None, found
    assert (verdict == "problem") is (float(told[1]) < 2.0)
    assert kind != POOL or verdict == "problem"
    assert f"transport: {'cuda_ipc' if kind == PLAIN else 'unknown'}" in text
