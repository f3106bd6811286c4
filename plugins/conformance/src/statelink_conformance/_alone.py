"""Runs one step of a backend's life in a process of its own, and reports which libraries the step imported.

Run as ``python -m statelink_conformance._alone SETTINGS``, with a `Settings` as JSON. The result goes to a file.
Standard output and standard error contain only what the plugin and its library print.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from statelink.backend import BackendContext
from statelink.config import read_options
from statelink.errors import BackendUnavailableError
from statelink.registry import load_backend

__all__ = ["BROKEN", "Found", "Settings", "run"]

Step = Literal["import", "probe", "open", "leave"]
BROKEN = "libstatelink-kit.so: cannot open shared object file"
"""The error of importing a library that is broken on purpose."""
STEP_SECONDS = 120.0
"""Most seconds for a step."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The step, and where to run it.

    Attributes:
        step: How far to go: import the plugin; probe; probe and construct a backend; or leave with open links.
        backend: The backend's name.
        options: Its options.
        absent: Top-level modules that cannot be imported.
        file: The file for `Found`.
    """

    step: Step
    backend: str
    options: Mapping[str, Any]
    absent: tuple[str, ...]
    file: str


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a step.

    Attributes:
        imported: Top-level modules that the process has imported.
        late: Those of them that came after the plugin itself, without Python's own and without private ones.
        ok: Whether the probe said that the backend can run.
        reason: The probe's reason.
        hint: The probe's hint.
        refused: Error of the constructor if it refused to start; empty if it started, or was not called.
        status: Exit status of the process.
        printed: Its standard output and standard error.
    """

    imported: list[str] = []
    late: list[str] = []
    ok: bool = True
    reason: str = ""
    hint: str = ""
    refused: str = ""
    status: int = 0
    printed: str = ""


def run(
    step: Step,
    backend: str,
    options: Mapping[str, Any],
    environment: Mapping[str, str],
    absent: tuple[str, ...] = (),
    broken: tuple[str, ...] = (),
) -> Found:
    """Do a step in a new process, and wait for its end.

    Args:
        step: How far to go.
        backend: The backend's name.
        options: Its options.
        environment: Changes to this process's environment.
        absent: Top-level modules that cannot be imported there, as if they were not installed. Processes that the
            plugin starts find them broken.
        broken: Those whose import raises an ``OSError`` there, and in every process that the plugin starts.

    Raises:
        AssertionError: The process did not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="statelink-testing-") as folder:
        for name in (*absent, *broken):
            (Path(folder) / f"{name}.py").write_text(f"raise OSError({BROKEN!r})\n", encoding="utf-8")
        settings = Settings(step=step, backend=backend, options=options, absent=absent, file=f"{folder}/found.json")
        path = environment.get("PYTHONPATH") or os.pathsep.join(filter(None, sys.path))
        try:
            done = subprocess.run(
                [sys.executable, "-m", __name__, msgspec.json.encode(settings).decode()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join([folder, path])},
                timeout=STEP_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise AssertionError(
                f"the step {step!r} did not end within {STEP_SECONDS:g} s: {error.stdout!r}"
            ) from error
        file = Path(settings.file)
        found = msgspec.json.decode(file.read_bytes(), type=Found) if file.exists() else Found()
        return msgspec.structs.replace(found, status=done.returncode, printed=done.stdout)


def main(settings: Settings) -> None:
    """Do the step in this process."""
    for name in settings.absent:
        sys.modules[name] = None  # type: ignore[assignment]  # the import system then says that there is no such module
    kind = load_backend(settings.backend)
    found = Found()
    if settings.step != "import":
        options = read_options(kind.Options, settings.options, "options")
    early = imported()
    if settings.step in ("probe", "open"):
        probe = kind.probe(options)
        found = Found(ok=probe.ok, reason=probe.reason, hint=probe.hint)
    if settings.step == "open":
        try:
            kind(BackendContext(options=options, link="alone", role="prefill")).close()
        except BackendUnavailableError as error:
            found = msgspec.structs.replace(found, refused=str(error))
    if settings.step == "leave":
        several = kind.capabilities.single_process and kind.capabilities.links_per_process != 1
        roles = ("prefill", "decode") if several else ("decode",)
        backends = {role: kind(BackendContext(options=options, link=role, role=role)) for role in roles}
        for backend in backends.values():
            backend.register(())
        for role, backend in backends.items():
            for peer in backends.keys() - {role}:
                backend.connect(peer, backends[peer].descriptor(), ())
        _left.update(backends)
    names = imported()
    late = [name for name in names - early - sys.stdlib_module_names if not name.startswith("_")]
    found = msgspec.structs.replace(found, imported=sorted(names), late=sorted(late))
    Path(settings.file).write_bytes(msgspec.json.encode(found))


def imported() -> set[str]:
    """Top-level modules that this process has imported."""
    return {name.partition(".")[0] for name, module in sys.modules.items() if module is not None}


_left: dict[str, Any] = {}
"""Backends that are still open when the process ends."""

if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Settings))
