"""What a process has imported that forks SGLang's servers, and what it makes of each; see `forks` beside the adapters.

Each server has its own launcher, scheduler, detokenizer, plugins and HTTP port. SGLang spawns its schedulers, and here
they are forked, too.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import forks
from engine_environments import SGLANG

__all__ = ["INSTALLED", "PATH", "fork_server"]

INSTALLED = "STATELINK_TEST_INSTALLED"
"""Variable with the name of a module whose ``install`` changes a server, before it makes any process."""

TESTS = Path(__file__).parents[1]
PATH = (TESTS, TESTS.parents[1] / "testing")
"""Where the process finds what it imports."""
IMPORTED = (
    "torch",
    "transformers",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.tokenizer_manager",
    "sglang.srt.managers.data_parallel_controller",
    "sglang.srt.entrypoints.engine",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.models.registry",
    "sglang.launch_server",
    "statelink_sglang.backend",
)
"""Modules that take long, and that every server needs."""


def fork_server(arguments: Sequence[str], environment: Mapping[str, str], log: Path, python: str) -> forks.Forked:
    """Start a server.

    Args:
        arguments: Of ``python -m sglang.launch_server``.
        environment: All variables of its environment.
        log: Where what it prints goes.
        python: The interpreter, which may have another release of SGLang.
    """
    made = forks.forks("support.forks", tuple(map(str, PATH)), tuple(SGLANG.items()), python)
    with log.open("ab") as file:
        return made.fork(arguments, environment, file, piped=False)


def prepare() -> None:
    """Before SGLang is imported."""
    from support import kernels

    kernels.before_imports()


def settle() -> None:
    """When it has been imported."""
    from support import kernels

    kernels.after_imports()


def become(arguments: Sequence[str]) -> None:
    """Be a server."""
    sys.argv = ["sglang.launch_server", *arguments]
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from support import poison

    poison.install()
    if INSTALLED in os.environ:
        importlib.import_module(os.environ[INSTALLED]).install()
    load_plugins()
    run_server(prepare_server_args(list(arguments)))
