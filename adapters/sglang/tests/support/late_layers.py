"""Lets the attention of a server on a CPU write its pages late, as a card does that is behind the thread that launches.

The pages of each layer are no numbers until a thread puts the right bytes there, layer after layer. Events of a device
pass when everything has come that was launched before them. A pass reads the pages of earlier ones, so it waits for
their bytes, as on a stream.
"""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any

from late_device import Device

__all__ = ["GROUP", "KEPT", "LATE", "SEEN", "install"]

LATE = "STATELINK_TEST_LATE_LAYERS"
"""Variable with the seconds after which the bytes of a layer come."""
SEEN = "STATELINK_TEST_LAYERS_SEEN"
"""Variable with the path of a file that gets a letter for each of these, and the process that did it."""
GROUP, KEPT = "gk"
"""A group of layers that a request pushes; pages that are kept for one, although the cache has given them back."""


def install() -> None:
    """Put it where SGLang looks for events and attention, in this process, if the variables say so."""
    if os.environ.get(LATE):
        _write_late(float(os.environ[LATE]))
    if os.environ.get(SEEN):
        _count(Path(os.environ[SEEN]))


def _write_late(seconds: float) -> None:
    import torch
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    for module in (torch.cpu, torch.cuda):
        module.Event = _Event  # type: ignore[attr-defined]
    inner = TorchNativeAttnBackend.forward_extend

    def forward_extend(backend: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, *given: Any, **more: Any) -> Any:
        pool, number = backend.token_to_kv_pool, layer.layer_id
        slots = batch.out_cache_loc.clone()  # SGLang has one buffer for the slots of all passes
        if number == 0:
            before = _Event()
            before.record()
            before.synchronize()
        result = inner(backend, q, k, v, layer, batch, *given, **more)
        buffers = pool.get_key_buffer(number), pool.get_value_buffer(number)
        right = [each[slots].clone() for each in buffers]
        for each in buffers:
            each[slots] = float("nan")

        def come() -> None:
            time.sleep(seconds)
            for each, rows in zip(buffers, right, strict=True):
                each[slots] = rows

        _device().current.launch(come)
        return result

    TorchNativeAttnBackend.forward_extend = forward_extend


@functools.cache
def _device() -> Device:
    """The device. It has threads, so a scheduler makes it once it has been forked."""
    return Device()


class _Event:
    """An event of that device, on its one stream, whatever stream SGLang names."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._event = _device().Event()
        self.query, self.synchronize = self._event.query, self._event.synchronize

    def record(self, stream: Any = None) -> None:
        self._event.record()


def _count(path: Path) -> None:
    from statelink_sglang.backend import Sender

    def counted(name: str, letter: str) -> None:
        inner = getattr(Sender, name)

        def call(sender: Any, *given: Any) -> None:
            if given[0]:
                with path.open("a") as file:
                    file.write(f"{letter}{os.getpid()}\n")
            inner(sender, *given)

        setattr(Sender, name, call)

    counted("push_layers", GROUP)
    counted("keep", KEPT)
