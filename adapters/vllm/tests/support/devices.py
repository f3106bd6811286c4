"""Stands in for what vLLM has of a device on a GPU: streams and events, so that it schedules ahead of the model.

Everything is done at once, so there is nothing to wait for. Also here: what else vLLM's CPU platform lacks and tests
need. None of this is a kernel.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch

__all__ = ["install"]


class Stream:
    """Whatever is asked of it is done already."""

    device = torch.device("cpu")

    def __init__(self, *given: Any, **options: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Event:
        return Event()


class Event:
    """The same."""

    def __init__(self, *given: Any, **options: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 1.0


def install() -> None:
    """Put all of it in place. Called once in a process, after vLLM was imported."""
    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event = Stream, Event
    torch.Event = Event  # type: ignore[assignment,misc]
    cuda.current_stream = lambda *device: Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    torch.Tensor.record_stream = lambda *given: None  # type: ignore[method-assign]
    import vllm.v1.worker.cpu_model_runner as runner

    runner._torch_cuda_wrapper = contextlib.nullcontext  # noqa: SLF001  # it would put events of its own in place
    _make_stages_buffers()
    _share_memory_nodes()
    _rebind_classes_only()


def _make_stages_buffers() -> None:
    """Make the buffers of later pipeline stages. Otherwise only vLLM's warm-up does, which a CPU leaves out."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    gather = GPUModelRunner.sync_and_gather_intermediate_tensors

    def with_buffers(self: Any, *given: Any, **named: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return gather(self, *given, **named)

    GPUModelRunner.sync_and_gather_intermediate_tensors = with_buffers


def _share_memory_nodes() -> None:
    """Let all ranks of data parallelism use the machine's one memory node; vLLM wants one for each."""
    import vllm.platforms.cpu as platform
    import vllm.utils.cpu_resource_utils as resources
    import vllm.v1.worker.cpu_worker as worker

    for module in (platform, resources, worker):
        if hasattr(module, "get_visible_memory_node"):
            module.get_visible_memory_node = lambda *given, **named: [0]


def _rebind_classes_only() -> None:
    """vLLM looks for kernels of Triton in everything that has a ``__dict__``, also where that is no dictionary."""
    import vllm.triton_utils.dispatcher as dispatcher

    source = inspect.getsource(dispatcher._rebind_kernels)  # noqa: SLF001
    wrong = 'if hasattr(value, "__dict__"):'
    assert wrong in source
    right = 'if isinstance(getattr(value, "__dict__", None), (dict, type(vars(type)))):'
    exec(source.replace(wrong, right), dispatcher.__dict__)
