"""Clauses on the package of a backend."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from statelink.config import read_options
from statelink.errors import ConfigError
from statelink.registry import Listed, conflict_hint, list_backends

from .. import _alone, _inside
from .._lab import Suite, needs
from .._saying import refused
from .._worker import Finding

if TYPE_CHECKING:
    import pytest

    from .._bench import Subject

__all__ = ["Packaging"]

TENSORS = frozenset({"cupy", "jax", "mindspore", "paddle", "tensorflow", "torch"})
"""Libraries whose import takes seconds, or starts a device."""
NO_LIBRARY = "the test class names no library"
GROUP = "statelink.backends"
NO_ENTRY = (
    f'Write `NAME = "module:Class"` below `[project.entry-points."{GROUP}"]` in `pyproject.toml`, and install the '
    "package again (`pip install -e .`). `backend` of the test class is that NAME."
)


class Packaging(Suite):
    """The package around a backend's class."""

    library: ClassVar[Sequence[str]] = ()
    """Top-level modules of the libraries that the plugin imports late."""
    probes_elsewhere: ClassVar[bool] = False
    """Whether the probe leaves the import of the library to another process."""
    refused_options: ClassVar[Sequence[Mapping[str, Any]]] = ()
    """Wrong options, each in the form of an engine's configuration."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give the clause on options each set of them."""
        if "wrong" in metafunc.fixturenames:
            metafunc.parametrize("wrong", self.refused_options, ids=lambda wrong: msgspec.json.encode(wrong).decode())

    def test_its_metadata_is_complete(self) -> None:
        """One package brings the backend, and says what it is, which Python it needs and which versions of the core.

        Write `description`, `requires-python` and a range such as `statelink>=0.1,<0.2` in `pyproject.toml`, and
        install the package again.
        """
        metadata = importlib.metadata.metadata(_listed(self.backend).distribution)
        for field in ("Summary", "Requires-Python"):
            assert metadata[field], f"{field} is empty"
        needed = [each for each in metadata.get_all("Requires-Dist") or () if re.match(r"statelink\b(?![-_.])", each)]
        assert needed, "it does not require statelink"
        assert any(">" in each and "<" in each for each in needed), f"it requires {needed}, not a range of versions"

    def test_its_module_lists_its_public_names(self) -> None:
        """The module that the entry point names has its public names, and no others, in a sorted `__all__`.

        Import there what is public, and list it: the backend's class, and `Options` with it.
        """
        module, kind = _module(self.backend), _inside.kind_of(self.backend)
        listed = list(getattr(module, "__all__", ()))
        public = [
            name
            for name, value in vars(module).items()
            if name.isidentifier()
            and not name.startswith("_")
            and name != "annotations"
            and not _is_part(value, module)
        ]
        assert listed == sorted(public), f"__all__ is {listed}, and the public names are {sorted(public)}"
        for needed in (kind, kind.Options):
            assert needed.__name__ in listed, f"{needed.__name__} is not public"

    def test_it_is_typed(self) -> None:
        """It ships the marker `py.typed`, so that type checkers read its annotations.

        Put an empty file `py.typed` beside the package's `__init__.py`.
        """
        spec = importlib.util.find_spec(_module(self.backend).__name__.partition(".")[0])
        homes = spec.submodule_search_locations or () if spec else ()
        assert any((Path(home) / "py.typed").is_file() for home in homes), "there is no py.typed"

    def test_its_options_are_documented(self) -> None:
        """The first table under the heading "Options" of its README has one row for each option, and no others.

        Write a row for each: `| name | default | meaning |`, with the name in backticks.
        """
        listed, kind = _listed(self.backend), _inside.kind_of(self.backend)
        documented = sorted(_rows(_readme(type(self), listed.distribution)))
        fields = sorted(field.encode_name for field in msgspec.structs.fields(kind.Options))
        assert documented == fields, f"the README documents the options {documented}, and there are {fields}"

    def test_a_wrong_option_is_refused(self, wrong: Mapping[str, Any]) -> None:
        """What an option cannot be is refused when the configuration is read, before anything starts.

        Check it in the type of the field, or in `__post_init__` with a `ValueError`.
        """
        with refused(f"the options {wrong}", ConfigError):
            read_options(_inside.kind_of(self.backend).Options, wrong, "options")

    def test_importing_it_imports_no_library(self) -> None:
        """To import the plugin takes no time: it imports neither its library nor a tensor library, and prints nothing.

        Import the library in `probe` and in the constructor.
        """
        found = self._alone("import")
        _silent(found, "importing the plugin")
        _without(found, TENSORS.union(self.library), "importing the plugin")

    def test_probing_it_prints_nothing(self) -> None:
        """A probe prints nothing, and imports no tensor library.

        If the test class says so, the probe does not import its own library either.

        Return what was found as the reason; keep what the library prints away from standard output.
        """
        found = self._alone("probe")
        _silent(found, "the probe")
        library = frozenset(self.library)
        _without(found, TENSORS | library if self.probes_elsewhere else TENSORS - library, "the probe")

    def test_it_names_its_library(self) -> None:
        """The test class names what the probe and the constructor import, so that the kit can take it away.

        Write the top-level module of the library into `library`: `library = ("vendor",)`.
        """
        found = self._alone("open")
        ended = f"the process that opened the backend ended with status {found.status}"
        assert found.status == 0, f"{ended}: {found.printed}"
        late = ", ".join(found.late) or "no module of a library"
        if not self.library:
            assert not found.late, f"`library` is empty, and the probe or the constructor imported {late}"
            return
        needs(found.ok and not found.refused, f"the backend cannot run here: {found.refused or found.reason}")
        named = ", ".join(self.library)
        assert not frozenset(self.library).isdisjoint(found.imported), (
            f"`library` names {named}, and the probe and the constructor imported {late}"
        )

    def test_without_its_library_it_says_so(self) -> None:
        """Where the library is not installed, the probe says so with a hint, and no link opens.

        Catch what the import raises. Return `Probe(ok=False, reason=..., hint=...)` from `probe`, and raise
        `BackendUnavailableError` in the constructor.
        """
        needs(bool(self.library), NO_LIBRARY)
        found = self._alone("open", absent=tuple(self.library))
        _unusable(found, "the library is not installed")
        assert found.hint, f"the probe gives no hint: {found.reason}"

    def test_with_a_broken_library_it_says_why(self) -> None:
        """Where the library's import fails, the probe and the constructor give the reason in the loader's own words.

        Catch `Exception` around the import: native libraries raise more than `ImportError`.
        """
        needs(bool(self.library), NO_LIBRARY)
        found = self._alone("open", broken=tuple(self.library))
        _unusable(found, "the library's import fails")
        for who, said in (("the probe", found.reason), ("the constructor", found.refused)):
            assert _alone.BROKEN in said, f"{who} does not say {_alone.BROKEN!r}: {said}"

    def test_a_process_may_end_without_closing(self, subject: Subject) -> None:
        """A process that ends while links are open ends with status 0, and prints nothing.

        Let no thread or destructor of the library outlive the interpreter: stop them at exit.
        """
        found = self._alone("leave")
        assert found.imported, f"it ended with status {found.status} before its links were open: {found.printed}"
        _silent(found, "a process that ends with open links")

    def _alone(self, step: Any, absent: tuple[str, ...] = (), broken: tuple[str, ...] = ()) -> _alone.Found:
        _listed(self.backend)  # that there is no such package is no fault of the step
        return _alone.run(step, self.backend, self.options, self.environment, absent, broken)


def _listed(name: str) -> Listed:
    """The one package that brings a backend.

    Raises:
        AssertionError: No package brings it, or several do.
    """
    found = [each for each in list_backends() if each.name == name]
    if not found:
        raise Finding(f"no installed package has an entry point {name!r} in the group {GROUP!r}", NO_ENTRY)
    if len(found) > 1:
        hint = conflict_hint(found)
        words = f"{len(found)} packages bring a backend {name!r}: {', '.join(map(str, found))}"
        raise Finding(words, f"{hint[0].upper()}{hint[1:]}.")
    return found[0]


def _module(name: str) -> ModuleType:
    return importlib.import_module(_listed(name).value.partition(":")[0])


def _is_part(value: object, module: ModuleType) -> bool:
    """Whether it is a submodule that an import has added as an attribute."""
    return isinstance(value, ModuleType) and value.__name__.startswith(f"{module.__name__}.")


def _readme(suite: type, distribution: str) -> str:
    """The README of the test class's project, or else the one in the package's metadata."""
    for folder in Path(inspect.getfile(suite)).resolve().parents:
        project, readme = folder / "pyproject.toml", folder / "README.md"
        if project.exists() and readme.exists() and f'"{distribution}"' in project.read_text(encoding="utf-8"):
            return readme.read_text(encoding="utf-8")
    metadata: Any = importlib.metadata.metadata(distribution)
    return str(metadata["Description"] or metadata.get_payload() or "")


def _rows(readme: str) -> list[str]:
    """Names in the first column of the first table under the heading "Options"."""
    section = re.split(r"(?im)^#+ +options\b.*$", readme, maxsplit=1)[1:]
    table = re.search(r"(?m)(^\|.*\n?)+", section[0]) if section else None
    first = [row.split("|")[1] for row in table[0].splitlines()] if table else []
    return [name for cell in first for name in re.findall(r"`([^`]+)`", cell)]


def _silent(found: _alone.Found, what: str) -> None:
    assert found.status == 0, f"{what} ended the process with status {found.status}: {found.printed}"
    assert not found.printed, f"{what} printed {found.printed!r}"


def _without(found: _alone.Found, libraries: frozenset[str], what: str) -> None:
    imported = sorted(libraries.intersection(found.imported))
    assert not imported, f"{what} imported {', '.join(imported)}"


def _unusable(found: _alone.Found, why: str) -> None:
    assert found.status == 0, f"{why}, and the process ended with status {found.status}: {found.printed}"
    assert not found.ok, f"{why}, and the probe says that the backend can run: {found.reason}"
    assert found.reason, f"{why}, and the probe gives no reason"
    assert found.refused, f"{why}, and the constructor does not refuse to start"
