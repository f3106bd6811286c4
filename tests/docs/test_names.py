"""What is public: exactly what ``__all__`` says, little of it, and all of it explained."""

from __future__ import annotations

import ast
import inspect
import re
import types
from pathlib import Path
from typing import Any

import pytest

import statelink
import statelink.backend
import statelink.backend.native
import statelink.errors
import statelink.rendezvous
import statelink.state
import statelink.telemetry
import statelink.testing
import statelink_conformance

MODULES = (
    statelink,
    statelink.state,
    statelink.backend,
    statelink.backend.native,
    statelink.errors,
    statelink.rendezvous,
    statelink.telemetry,
    statelink.testing,
    statelink_conformance,
)


def public(module: types.ModuleType) -> set[str]:
    """Names that a reader of the module would take for public ones."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name != "annotations"
    }


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_all_says_what_is_public(module: types.ModuleType) -> None:
    exported = module.__all__
    assert len(set(exported)) == len(exported)
    for name in exported:
        assert getattr(module, name) is not None
    if module is statelink.errors:
        # One file, whose imports are not hidden in other modules.
        own = {name for name in public(module) if getattr(getattr(module, name), "__module__", "") == module.__name__}
        assert set(exported) == own
    else:
        assert set(exported) - {"__version__"} == public(module)


ROOT = Path(__file__).parents[2]
STRANGERS = sorted(
    [
        *(ROOT / "examples").glob("backend-*/**/*.py"),
        *(ROOT / "tests" / "third_party" / "packages").glob("*.py"),
        *(ROOT / "core" / "src" / "statelink" / "cli" / "templates").glob("*.py.*"),
    ]
)


@pytest.mark.parametrize("path", STRANGERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_stranger_writes_uses_published_names_only(path: Path) -> None:
    known = {module.__name__: set(module.__all__) for module in MODULES}
    text = re.sub(r"\$\{\w+\}", "made", path.read_text())
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == "statelink":
            assert {alias.name for alias in node.names} <= known.get(str(node.module), set()), ast.unparse(node)
        if isinstance(node, ast.Import):
            for alias in node.names:
                assert not alias.name.startswith("statelink.") or alias.name in known, ast.unparse(node)


def test_there_are_strangers() -> None:
    assert len(STRANGERS) >= 12


def test_the_root_is_small() -> None:
    assert len(statelink.__all__) <= 20


def test_every_error_is_exported_and_has_one_root_and_a_code_of_its_own() -> None:
    errors = {
        value
        for value in vars(statelink.errors).values()
        if isinstance(value, type) and issubclass(value, BaseException) and value.__module__ == "statelink.errors"
    }
    assert {each.__name__ for each in errors} <= set(statelink.errors.__all__)
    assert all(issubclass(each, statelink.StatelinkError) for each in errors)
    codes = [each.default_code for each in errors if issubclass(each, statelink.StatelinkError)]
    assert len(set(codes)) == len(codes)
    drawn = statelink.errors.__doc__ or ""
    assert [each.__name__ for each in errors if each.__name__ not in drawn] == []


def documented() -> list[tuple[str, Any]]:
    """Every public class, function, method and property, by its path."""
    found: list[tuple[str, Any]] = []
    for module in MODULES:
        for name in module.__all__:
            value = getattr(module, name)
            path = f"{module.__name__}.{name}"
            if inspect.isclass(value):
                found.append((path, value))
                found += [(f"{path}.{member}", each) for member, each in members(value)]
            elif callable(value):
                found.append((path, value))
    return found


def members(kind: type) -> list[tuple[str, Any]]:
    own = {
        member: each
        for base in reversed(kind.__mro__)
        if base.__module__.startswith("statelink")
        for member, each in vars(base).items()
    }
    return [
        (member, each.__func__ if isinstance(each, (classmethod, staticmethod)) else each)
        for member, each in own.items()
        if not member.startswith("_")
        and (inspect.isroutine(each) or isinstance(each, (property, classmethod, staticmethod)))
    ]


DOCUMENTED = documented()


def test_there_is_something_to_document() -> None:
    paths = {path for path, _ in DOCUMENTED}
    assert len(paths) > 120
    assert {
        "statelink.open",
        "statelink.Link.receive",
        "statelink.state.Memory.of",
        "statelink.backend.Backend.poll",
    } <= paths
    assert "statelink.errors.StatelinkError.code" in paths


@pytest.mark.parametrize(("path", "value"), DOCUMENTED, ids=[path for path, _ in DOCUMENTED])
def test_everything_public_has_a_docstring(path: str, value: Any) -> None:
    text = value.__doc__
    assert text, f"{path} has no docstring"
    assert text.strip()[0].isupper() or text.strip()[0] in "`[0123456789", f"{path}: {text[:40]!r}"
    assert not text.startswith(f"{getattr(value, '__name__', '')}("), f"{path} has a generated docstring"
    if isinstance(value, type) and issubclass(value, tuple):
        assert text != f"{value.__name__}({', '.join(value._fields)})"  # type: ignore[attr-defined]


def test_a_backend_author_has_at_most_eight_abstract_methods_beside_construction() -> None:
    abstract = statelink.backend.Backend.__abstractmethods__ - {"__init__", "probe"}
    assert len(abstract) <= 8, sorted(abstract)


def test_the_version_is_that_of_the_distribution() -> None:
    from importlib.metadata import version

    assert statelink.__version__ == version("statelink")
