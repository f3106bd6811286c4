"""Stands in for what vLLM's connector for offloading needs of a device: streams, events, and a copy of blocks.

vLLM copies blocks between a device and the host. Here both are the host's memory, and every copy is done at once. vLLM
loads it as a plugin in each of its processes; see `plugin_folder`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path
from typing import Any

from .devices import Event, Stream

__all__ = ["install", "plugin_folder"]


def plugin_folder(folder: Path) -> dict[str, str]:
    """Make an installed distribution with this as a plugin of vLLM. Returns changes to a server's environment."""
    made = folder / "stand_in_for_offloading-1.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: stand-in-for-offloading\nVersion: 1\n")
    (made / "entry_points.txt").write_text("[vllm.general_plugins]\noffloading = support.offloading:install\n")
    return {"PYTHONPATH": os.pathsep.join((str(folder), str(Path(__file__).parents[1])))}


class Torch:
    """Torch, with such events."""

    def __getattr__(self, name: str) -> Any:
        import torch

        return Event if name == "Event" else getattr(torch, name)


def copy(sources: Any, targets: Any, sizes: Any, **more: Any) -> None:
    """Copy runs of bytes between addresses."""
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


def install() -> None:
    """Put the stand-ins in place. Called in each process of vLLM; calling it again does nothing."""
    import torch
    import vllm._custom_ops as operations
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.kv_offload.cpu import gpu_worker, spec

    if isinstance(gpu_worker.torch, Torch):
        return

    class OnDevice(torch.Tensor):
        """Memory that says that it is a device's."""

        is_cuda = True

    platform: Any = CpuPlatform
    platform.Stream, platform.stream = Stream, staticmethod(lambda stream: contextlib.nullcontext())
    platform.current_stream = staticmethod(lambda *device: Stream())
    gpu_worker.torch = Torch()  # vLLM puts events in place of torch's own that cannot be asked
    operations.swap_blocks_batch = copy
    handler: Any = gpu_worker.SingleDirectionOffloadingHandler
    begin = handler.__init__

    def on_device(self: Any, gpu_tensors: list[torch.Tensor], *arguments: Any, **named: Any) -> None:
        begin(self, [each.as_subclass(OnDevice) for each in gpu_tensors], *arguments, **named)

    def get_worker(self: Any, caches: Any) -> Any:
        if not self._worker:
            self._worker = self.create_worker(caches)
        return self._worker

    handler.__init__ = on_device
    spec.CPUOffloadingSpec.get_worker = get_worker
