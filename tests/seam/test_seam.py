"""What an adapter uses of an engine: every kind of difference is found and named, by release."""

from __future__ import annotations

import abc
import enum
import functools
import sys
from dataclasses import dataclass, make_dataclass
from importlib import metadata
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from statelink.errors import ConfigError
from statelink.seam import Kind, Seam, Table, methods

if TYPE_CHECKING:
    from pathlib import Path

ENGINE = "engine_of_the_test"


class Connector:
    def __init__(self, config: Any) -> None:
        self.config = config

    def load(self, blocks: Any, stream: Any) -> None: ...

    @property
    def role(self) -> str:
        return ""

    @classmethod
    def layout(cls, config: Any) -> str:
        return ""


@dataclass
class Spec:
    heads: int
    draft: bool


class Mode(enum.Enum):
    NULL = 0
    PREFILL = 1


class Wider(enum.Enum):
    NULL = 0
    PREFILL = 1
    DECODE = 2


class Poll:
    FAILED = 0
    DONE = 1


class Queue:
    def __init__(self) -> None:
        self.limit = 1.0


def _free(blocks: Any) -> None: ...


def _lend(blocks: Any, limit: int = 1) -> None: ...


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The engine's module, as its newest release has it."""
    module = ModuleType(ENGINE)
    connector = type("Connector", (), dict(vars(Connector)))
    vars(module).update(
        Connector=connector, Spec=Spec, Mode=Mode, Poll=Poll, free=_free, lend=_lend, Envs=Poll, Queue=Queue
    )
    monkeypatch.setitem(sys.modules, ENGINE, module)
    installed(monkeypatch, "3.2.0")
    return module


def installed(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    def found(name: str) -> str:
        if not version:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", found)


def seam(**releases: dict[str, str | None]) -> Seam:
    """The seam of an adapter that knows release 3.2, and others."""
    return Seam(
        adapter="statelink-engine",
        engine="engine",
        title="Engine",
        tables=(
            *methods(
                {
                    f"{ENGINE}:Connector": {
                        "__init__": "self config",
                        "load": "self blocks stream",
                        "role": "@property self",
                        "layout": "cls config",
                    }
                }
            ),
            Table(Kind.FIELDS, {f"{ENGINE}:Spec": "heads draft"}),
            Table(Kind.MEMBERS, {f"{ENGINE}:Mode": "NULL PREFILL", f"{ENGINE}:Poll": "FAILED DONE"}),
            Table(Kind.VARIABLES, {f"{ENGINE}:Envs": "DONE"}),
            Table(Kind.ATTRIBUTES, {f"{ENGINE}:Queue": "limit"}),
            Table(Kind.PARAMETERS, {f"{ENGINE}:free": "blocks", f"{ENGINE}:lend": "blocks limit="}),
            Table(Kind.PARAMETERS, {f"{ENGINE}:never": "self"}, "a.module.that.nobody.imports"),
        ),
        releases={"3.2": {}, **{name.replace("_", ".")[1:]: each for name, each in releases.items()}},
    )


def texts(found: Seam) -> list[str]:
    return [each.text.replace(ENGINE, "engine") for each in found.differences()]


def needed(found: Seam) -> set[bool]:
    return {each.needed for each in found.differences()}


@pytest.mark.parametrize("version", ["3.2.0", "3.2.7", "3.2.0+cu130", "3.2", "3.2.0.post1"])
def test_a_patch_release_with_the_same_seam_is_no_difference(
    engine: ModuleType, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, version)
    assert (seam().release(), texts(seam()), seam().check(allowed=False)) == ("3.2", [], [])


@pytest.mark.parametrize("version", ["3.1.9", "3.20.0", "4.2.0", "3.2rc1", "3"])
def test_a_release_that_is_not_known_is_refused_unless_it_is_allowed(
    engine: ModuleType, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, version)
    said = f"Engine 3.2 is expected; {version} is installed"
    assert (seam().release(), texts(seam())) == ("", [said])
    with pytest.raises(ConfigError, match=r"statelink-engine was not tested with the installed Engine") as refused:
        seam().check(allowed=False)
    assert refused.value.code == "config.engine"
    assert "'version' in 'allow'" in refused.value.hint
    assert seam().check(allowed=True) == [said]


def test_an_engine_that_is_not_installed_is_refused_whatever_is_allowed(
    engine: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, "")
    with pytest.raises(ConfigError, match=r"Engine 3\.2 is expected; none is installed") as refused:
        seam().check(allowed=True)
    assert "allow" not in refused.value.hint


def _lacks_a_method(engine: Any) -> None:
    del engine.Connector.load


def _has_a_method(engine: Any) -> None:
    engine.Connector.save = lambda self: None


def _has_a_parameter(engine: Any) -> None:
    engine.free = lambda blocks, why: None


def _lacks_a_parameter(engine: Any) -> None:
    engine.free = lambda: None


def _other_order(engine: Any) -> None:
    engine.Connector.load = lambda self, stream, blocks: None


def _keyword_only(engine: Any) -> None:
    engine.lend = lambda blocks, *, limit=1: None


def _positional_only(engine: Any) -> None:
    engine.lend = lambda blocks, /, limit=1: None


def _without_a_default(engine: Any) -> None:
    engine.lend = lambda blocks, limit: None


def _a_coroutine(engine: Any) -> None:
    async def lend(blocks: Any, limit: int = 1) -> None: ...

    engine.lend = _wrapped(lend)


def _a_generator(engine: Any) -> None:
    def lend(blocks: Any, limit: int = 1) -> Any:
        yield

    engine.lend = lend


def _collects(engine: Any) -> None:
    engine.lend = lambda blocks, *limit: None


def _wrapped(inside: Any) -> Any:
    @functools.wraps(inside)
    def passes_all(blocks: Any, *args: Any, **kwargs: Any) -> Any: ...

    return passes_all


def _wrapped_by_another_signature(engine: Any) -> None:
    @functools.wraps(_lend)
    def other(pool: Any, *args: Any, **kwargs: Any) -> None: ...

    engine.lend = other


def _no_property(engine: Any) -> None:
    engine.Connector.role = lambda self: ""


def _is_abstract(engine: Any) -> None:
    body = {**vars(Connector), "load": abc.abstractmethod(lambda self, blocks, stream: None)}
    engine.Connector = abc.ABCMeta("Connector", (), body)


def _has_an_abstract_method(engine: Any) -> None:
    base = abc.ABCMeta("Base", (), {"_ready": abc.abstractmethod(lambda self: None)})
    engine.Connector = abc.ABCMeta("Connector", (base,), dict(vars(Connector)))


def _has_a_field(engine: Any) -> None:
    engine.Spec = make_dataclass("Spec", [("heads", int), ("draft", bool), ("fresh", int)])


def _lacks_a_field(engine: Any) -> None:
    engine.Spec = make_dataclass("Spec", [("heads", int)])


def _has_a_member(engine: Any) -> None:
    engine.Mode = Wider


def _lacks_a_constant(engine: Any) -> None:
    engine.Poll = type("Poll", (), {"DONE": 1})


def _lacks_a_variable(engine: Any) -> None:
    engine.Envs = type("Envs", (), {})


def _lacks_an_attribute(engine: Any) -> None:
    engine.Queue = type("Queue", (), {"__init__": lambda self: None})


def _lacks_a_class(engine: Any) -> None:
    del engine.Mode


@pytest.mark.parametrize(
    ("change", "said", "is_needed"),
    [
        (_lacks_a_method, "engine.Connector lacks the methods load", True),
        (_has_a_method, "engine.Connector has the methods save, which are not known", False),
        (_has_a_parameter, "engine.free is defined with 'blocks why', and is known with 'blocks'", True),
        (_lacks_a_parameter, "engine.free is defined with '', and is known with 'blocks'", True),
        (
            _other_order,
            "engine.Connector.load is defined with 'self stream blocks', and is known with 'self blocks stream'",
            True,
        ),
        (_keyword_only, "engine.lend is defined with 'blocks * limit=', and is known with 'blocks limit='", True),
        (_positional_only, "engine.lend is defined with 'blocks / limit=', and is known with 'blocks limit='", True),
        (_without_a_default, "engine.lend is defined with 'blocks limit', and is known with 'blocks limit='", True),
        (_a_coroutine, "engine.lend is defined with 'async blocks limit=', and is known with 'blocks limit='", True),
        (_a_generator, "engine.lend is defined with 'yield blocks limit=', and is known with 'blocks limit='", True),
        (_collects, "engine.lend is defined with 'blocks *limit', and is known with 'blocks limit='", True),
        (
            _wrapped_by_another_signature,
            "engine.lend is defined with 'pool *args **kwargs', and is known with 'blocks limit='",
            True,
        ),
        (_no_property, "engine.Connector.role is defined with 'self', and is known with '@property self'", True),
        (
            _is_abstract,
            "engine.Connector.load is defined with '@abstract self blocks stream', and is known with "
            "'self blocks stream'",
            True,
        ),
        (_has_an_abstract_method, "engine.Connector has the methods _ready, which are not known", True),
        (_has_a_field, "engine.Spec has the fields fresh, which are not known", False),
        (_lacks_a_field, "engine.Spec lacks the fields draft", True),
        (_has_a_member, "engine.Mode has the members DECODE, which are not known", False),
        (_lacks_a_constant, "engine.Poll lacks the members FAILED", True),
        (_lacks_a_variable, "engine.Envs lacks the variables DONE", True),
        (_lacks_an_attribute, "engine.Queue lacks the attributes limit", True),
        (_lacks_a_class, "engine.Mode is missing", True),
    ],
)
def test_every_kind_of_difference_is_named(
    engine: ModuleType, change: Any, said: str, is_needed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(engine)
    found = seam().differences()
    assert [(each.text.replace(f"{ENGINE}.", "engine."), each.needed) for each in found] == [(said, is_needed)]
    with pytest.raises(ConfigError):  # also of a known version: a patch release may change what is used
        seam().check(allowed=False)
    if is_needed:
        with pytest.raises(ConfigError):
            seam().check(allowed=True)
    else:
        assert len(seam().check(allowed=True)) == 1


def test_an_older_release_has_its_own_table(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each table says what differs from the next newer release."""
    known = seam(
        _3_1={f"{ENGINE}:Connector": "-load", f"{ENGINE}:Spec": "-draft +width"},
        _3_0={f"{ENGINE}:Mode": None, f"{ENGINE}:free": "pool blocks"},
    )
    assert (known.releases, known.window) == (("3.0", "3.1", "3.2"), "Engine 3.0, 3.1 or 3.2")
    assert texts(known) == []
    _lacks_a_method(engine)
    engine.Spec = make_dataclass("Spec", [("heads", int), ("width", int)])
    assert texts(known) == [
        "engine.Connector lacks the methods load",
        "engine.Spec lacks the fields draft",
        "engine.Spec has the fields width, which are not known",
    ]
    assert needed(known) == {False}  # a release that the adapter knows is without them
    installed(monkeypatch, "3.1.4")
    assert texts(known) == []
    installed(monkeypatch, "3.0.0")
    assert texts(known) == ["engine.free is defined with 'blocks', and is known with 'pool blocks'"]
    assert needed(known) == {False}
    _lacks_a_class(engine)
    engine.free = lambda pool, blocks: None
    assert texts(known) == []
    installed(monkeypatch, "3.1.4")
    assert texts(known) == [
        "engine.Mode is missing",
        "engine.free is defined with 'pool blocks', and is known with 'blocks'",
    ]


def test_a_function_that_is_wrapped_is_no_difference_if_all_is_passed_on(engine: Any) -> None:
    engine.lend = _wrapped(_lend)
    assert texts(seam()) == []


def test_an_engine_that_cannot_be_imported_is_a_difference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / f"{ENGINE}.py").write_text("raise OSError('libcuda.so.1 is missing')")
    monkeypatch.syspath_prepend(tmp_path)
    installed(monkeypatch, "3.2.0")
    assert "engine.Spec is missing: libcuda.so.1 is missing" in texts(seam())


def test_a_table_of_a_module_is_looked_at_where_that_is_imported(
    engine: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert texts(seam()) == []
    monkeypatch.setitem(sys.modules, "a.module.that.nobody.imports", engine)
    assert texts(seam()) == ["engine.never is missing"]


def test_a_place_that_no_table_has_is_refused() -> None:
    with pytest.raises(ValueError, match=r"in none: engine_of_the_test:Other"):
        seam(_3_1={f"{ENGINE}:Other": None})
