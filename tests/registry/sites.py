"""Hand-written installed packages: real metadata on the path, found as any package's is."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

import statelink

Environment = Mapping[str, str]
SOURCE = Path(statelink.__file__).parents[1]

BACKEND = """
import msgspec
from statelink.backend import ANY, DIRECT, Backend, Capabilities, Fence, Probe, SubmitMode


class Options(msgspec.Struct):
    depth: int = 1


class {cls}(Backend):
    api_version = {api}
    name = "{name}"
    Options = Options
    capabilities = Capabilities(
        memory_kinds=frozenset({{"dram"}}),
        submit_mode=SubmitMode.BLOCKING,
        source=Fence.MOVER, target=Fence.NONE,
        state_types=ANY,
    )
    strategies = {{"*": DIRECT}}

    def __init__(self, context): ...

    @classmethod
    def probe(cls, options):
        return Probe(ok=True, reason="here [always]", details={{"depth": str(options.depth)}})

    def register(self, regions): ...
    def descriptor(self): return b""
    def connect(self, peer, descriptor, regions): ...
    def submit(self, peer, batch): raise NotImplementedError
    def poll(self, transfers): ...
    def disconnect(self, peer): ...
    def close(self): ...
"""


class Site:
    """A folder of packages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def package(self, name: str, version: str = "0.1", **groups: dict[str, str]) -> None:
        """A distribution's metadata; ``groups`` are ``statelink_backends={"name": "module:object"}`` and the like."""
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = []
        for group, points in groups.items():
            lines += [f"[{group.replace('_', '.')}]", *(f"{point} = {value}" for point, value in points.items()), ""]
        (info / "entry_points.txt").write_text("\n".join(lines))

    def module(self, name: str, source: str) -> None:
        (self.folder / f"{name}.py").write_text(textwrap.dedent(source))

    def backend(self, name: str, *, api: int = 1, source: str = "", value: str = "") -> None:
        """A distribution ``statelink-<name>`` that brings a backend of that name."""
        module = f"statelink_{name}"
        self.package(f"statelink-{name}", statelink_backends={name: value or f"{module}:Made"})
        self.module(module, source or BACKEND.format(cls="Made", api=api, name=name))

    def python(
        self,
        code: str,
        *,
        path: str = "",
        flags: tuple[str, ...] = (),
        environment: Environment | None = None,
    ) -> str:
        """Run a program of its own that sees these packages; returns what it prints."""
        command = [sys.executable, *flags, "-c", textwrap.dedent(code)]
        return self.run(command, path=path, environment=environment)

    def run(
        self,
        command: list[str],
        *,
        path: str = "",
        expect: int = 0,
        environment: Environment | None = None,
    ) -> str:
        """Run a command that sees these packages; returns what it prints, on either stream."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith("STATELINK_")}
        python_path = os.pathsep.join([str(self.folder), path or str(SOURCE)])
        done = subprocess.run(
            command,
            env={**clean, "PYTHONPATH": python_path, "COLUMNS": "200", **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == expect, done.stdout
        return done.stdout


def bare(folder: Path) -> str:
    """A path on which the core and what it needs are installed, and nothing else of this environment."""
    folder.mkdir()
    waiting = ["statelink"]
    seen: set[str] = set()
    while waiting:
        found = distribution(waiting.pop())
        if found.name in seen:
            continue
        seen.add(found.name)
        for text in found.requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
        for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            link = folder / top
            if not link.exists() and not top.endswith(".pth"):
                link.symlink_to(Path(str(found.locate_file(top))))
    return os.pathsep.join([str(SOURCE), str(folder)])
