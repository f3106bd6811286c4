"""What a server of `apart` is beside a server of SGLang: it is in a network namespace, and notes what happens when."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.namespaces import enter

__all__ = ["COUNT", "FOLDER", "ROLE", "WHOLE", "install"]

FOLDER, ROLE = "STATELINK_BENCH_FOLDER", "STATELINK_BENCH_ROLE"
"""Variables with a folder for what a server notes, in a file that is called as its role, and with this role."""
WHOLE, COUNT = "whole", "count"
"""While a file of the first name is in the folder, no layer leaves before the forward pass has ended. The other one has
the number of requests that prefill waits for before it computes them in one step."""


def install() -> None:
    """Be that server: before SGLang makes any process, and has read its options."""
    import torch
    from sglang.srt.disaggregation.decode import DecodeTransferQueue
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner
    from support.connectors import name_host_memory

    from statelink_sglang.backend import Manager

    role, folder = os.environ[ROLE], Path(os.environ[FOLDER])
    enter(role)
    name_host_memory()
    # SGLang's Mooncake connector records events on it, which stand in, too.
    torch.cuda.current_stream = lambda *_: None  # type: ignore[assignment]

    def note(*what: float) -> None:
        with (folder / role).open("a") as file:
            file.write(json.dumps(what) + "\n")

    inner, take = ModelRunner.forward, DecodeTransferQueue._commit_transfer_to_req  # noqa: SLF001

    def forward(runner: Any, batch: Any, *given: Any, **more: Any) -> Any:
        began = time.perf_counter()
        result = inner(runner, batch, *given, **more)
        if role == "prefill" and batch.forward_mode.is_extend():
            note(began, time.perf_counter())
        return result

    def commit(queue: Any, request: Any) -> Any:
        note(time.perf_counter())
        return take(queue, request)

    ModelRunner.forward, DecodeTransferQueue._commit_transfer_to_req = forward, commit  # noqa: SLF001

    next_batch = Scheduler.get_new_batch_prefill

    def get_new_batch_prefill(scheduler: Any, *given: Any, **more: Any) -> Any:
        held = scheduler.waiting_queue
        if role == "decode" or len(held) >= int((folder / COUNT).read_text()):
            return next_batch(scheduler, *given, **more)
        scheduler.waiting_queue = []
        try:
            return next_batch(scheduler, *given, **more)
        finally:
            scheduler.waiting_queue = held

    Scheduler.get_new_batch_prefill = get_new_batch_prefill

    def order(manager: Any) -> Any:
        return () if (folder / WHOLE).exists() else vars(manager)["layer_order"]

    def set_order(manager: Any, layers: Any) -> None:
        vars(manager)["layer_order"] = layers

    Manager.layer_order = property(order, set_order)  # type: ignore[assignment]
