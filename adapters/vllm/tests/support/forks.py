"""What a process has imported that forks vLLM's engines and servers, and what it makes of each; see `forks` beside the
adapters.

vLLM spawns its engine core and its workers on a CPU, and here they are forked, too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import absent_packages
import forks
from engine_environments import VLLM

__all__ = ["fork"]

TESTS = Path(__file__).parents[1]
PATH = tuple(map(str, (TESTS, TESTS.parents[1] / "testing")))
IMPORTED = (
    "torch",
    "transformers",
    "vllm",
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.model_loader",
    "vllm.v1.spec_decode.eagle",
    "vllm.v1.spec_decode.ngram_proposer",
    "xgrammar",
    "statelink_vllm.connector",
    "statelink.tcp",
)
"""Modules that take long, and that every engine needs."""


def fork(
    what: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log: IO[bytes],
    *,
    piped: bool = False,
    triton: bool = False,
    python: str = sys.executable,
) -> forks.Forked:
    """Start an engine or a server.

    Args:
        what: ``engine`` or ``serve``.
        arguments: Of `engine_process`, or of ``vllm serve``.
        environment: All variables of its environment.
        log: Where what it prints goes.
        piped: Whether its standard input and output are pipes.
        triton: Whether Triton's interpreter runs the kernels of vLLM's second model runner.
        python: The interpreter, which may have another release of vLLM.
    """
    given = INTERPRETED if triton else {}
    made = forks.forks("support.forks", PATH, tuple({**VLLM, **given}.items()), python)
    return made.fork([what, *arguments], {**environment, **given}, log, piped=piped)


INTERPRETED = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
"""Makes vLLM believe that Triton works here. It looks at this when it is imported, and Triton when a kernel runs."""


def prepare() -> None:
    """Before vLLM is imported: it has kernels of its own for processors with instructions for matrices."""
    import torch

    torch.cpu._is_amx_tile_supported = lambda: False  # noqa: SLF001


def settle() -> None:
    """When it has been imported."""
    from support import devices, expert_parallel, kernels
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    _allow_images()
    kernels.install()
    devices.install()
    expert_parallel.install()
    _fork_workers()


def _fork_workers() -> None:
    """Let vLLM fork where it would start a process anew: its workers, and one that looks a model's class up."""
    import vllm.model_executor.models.registry as registry
    from vllm.platforms.cpu import CpuPlatform

    def here(function: Any) -> Any:
        return function()

    registry._run_in_subprocess = here  # noqa: SLF001
    settled = CpuPlatform.check_and_update_config.__func__

    def check(cls: Any, config: Any) -> None:
        ahead, executor = config.scheduler_config.async_scheduling, config.parallel_config.distributed_executor_backend
        settled(cls, config)
        if executor == "uni":  # vLLM's rule for a CPU is about OpenMP's threads, and each process here has one
            config.parallel_config.distributed_executor_backend = executor
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        # vLLM turns this off on a CPU, which has no streams. Here are stand-ins for them.
        config.scheduler_config.async_scheduling = bool(ahead)

    CpuPlatform.check_and_update_config = classmethod(check)


def _allow_images() -> None:
    """vLLM's module of LLaVA imports torchvision. `transformers` has seen that there is none, and uses Pillow."""
    from transformers.utils.import_utils import is_torchvision_available

    assert not is_torchvision_available()
    sys.meta_path.append(absent_packages.AbsentFinder())


def become(arguments: Sequence[str]) -> None:
    """Be an engine or a server."""
    from support import poison

    if "STATELINK_UNPOISONED" not in os.environ:  # benchmarks say it
        poison.install()
    what, *given = arguments
    if what == "engine":
        sys.argv = ["engine_process", *given]
        from support import engine_process

        engine_process.main()
    else:
        sys.argv = ["vllm", "serve", *given]
        from vllm.entrypoints.cli.main import main

        main()
