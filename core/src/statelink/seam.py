"""What an adapter uses of an engine, release by release, and how the installed engine differs from that.

The classes through which an engine calls a connector are no stable interface: they change in every release. So an
adapter writes down, as data, what it inherits, calls and reads in the newest release that it knows, and what older
releases have instead. Then it can say which releases it works with, and refuse another one with the list of what
differs. Only tests can show what an engine does with what looks the same.
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Any, NamedTuple

from statelink.errors import ConfigError

__all__ = ["Difference", "Kind", "Seam", "Table", "Variable", "methods"]


class Kind(enum.Enum):
    """What the names in a table are names of. A name that a table does not have is a difference, unless said below."""

    METHODS = "methods"
    """Public methods and properties that a class itself defines, its ``__init__``, and every abstract method."""
    FIELDS = "fields"
    """Fields of a dataclass, or annotated fields of another class."""
    MEMBERS = "members"
    """Members of an enumeration, or public constants of a class that is used like one."""
    PARAMETERS = "parameters"
    """The definition of a function: ``@property``, ``@abstract``, ``async`` and ``yield`` if it is that, and then its
    parameters in their order, with the signs of Python: ``async self blocks limit= * why= **options``."""
    VARIABLES = "variables"
    """Variables of a class, among others that are no difference."""
    ATTRIBUTES = "attributes"
    """Attributes of any object that methods of a class set, among others that are no difference."""


class Table(NamedTuple):
    """Places in an engine, and the names that each one has in the newest release.

    Attributes:
        kind: What the names are names of.
        places: For each place, written ``module:path``, its names with spaces between them.
        imported: A module. The table is looked at only in a process that has imported it; empty: in every process.
    """

    kind: Kind
    places: Mapping[str, str]
    imported: str = ""


class Difference(NamedTuple):
    """One way in which the installed engine differs.

    Attributes:
        text: What differs.
        needed: Whether the adapter needs what is missing. No release that it knows is without it.
    """

    text: str
    needed: bool


class Variable(NamedTuple):
    """A variable of the environment with which operators configure an adapter.

    Attributes:
        name: Its name.
        read: Reads it as the adapter does. Returns the link's `statelink.LinkConfig`, or raises a `StatelinkError`.
    """

    name: str
    read: Callable[[], Any]


def methods(classes: Mapping[str, Mapping[str, str]]) -> tuple[Table, Table]:
    """Tables of all methods of classes, and of the definition of each method.

    Args:
        classes: For each class, the definition of each method (`Kind.PARAMETERS`), by the method's name.
    """
    names = {place: " ".join(each) for place, each in classes.items()}
    parameters = {f"{place}.{name}": each for place, all_of in classes.items() for name, each in all_of.items()}
    return Table(Kind.METHODS, names), Table(Kind.PARAMETERS, parameters)


class Seam:
    """What an adapter uses of an engine.

    Thread-safe; the tables are not copied, and must not change.

    Args:
        adapter: Name of the adapter's distribution.
        engine: Name of the engine's distribution.
        title: The engine's name in texts.
        tables: What the newest release has.
        releases: For each release from the newest to the oldest, such as ``0.33``, what differs from the release before
            it in this order: for each place, the names that it has beyond, as ``+name``, and those that it lacks, as
            ``-name``. Of a function, the whole definition is given. ``None``: the place is not there. The newest
            release has an empty table.
        variable: What ``statelink doctor`` checks besides; ``None`` if operators configure the adapter elsewhere.

    Raises:
        ValueError: A place is in two tables, or `releases` name one that is in none.
    """

    def __init__(
        self,
        *,
        adapter: str,
        engine: str,
        title: str,
        tables: tuple[Table, ...],
        releases: Mapping[str, Mapping[str, str | None]],
        variable: Variable | None = None,
    ) -> None:
        self.variable = variable
        self.adapter, self.engine, self.title = adapter, engine, title
        self._tables = tables
        self._kinds = {place: table.kind for table in tables for place in table.places}
        unknown = {place for changes in releases.values() for place in changes} - self._kinds.keys()
        if unknown or len(self._kinds) < sum(len(table.places) for table in tables):
            raise ValueError(f"each place is in one table; in none: {', '.join(sorted(unknown)) or 'nothing'}")
        now: dict[str, list[str] | None] = {
            place: names.split() for table in tables for place, names in table.places.items()
        }
        self._expected: dict[str, dict[str, list[str] | None]] = {}
        for release, changes in releases.items():
            now = {**now, **{place: self._changed(place, now[place], words) for place, words in changes.items()}}
            for place, names in list(now.items()):
                owner, _, name = place.rpartition(".")
                of = now.get(owner) if self._kinds.get(owner) is Kind.METHODS else [name]
                now[place] = names if of is not None and name in of else None
            self._expected[release] = now

    def _changed(self, place: str, names: list[str] | None, words: str | None) -> list[str] | None:
        if words is None:
            return None
        if self._kinds[place] is Kind.PARAMETERS:
            return words.split()
        lacking = {each[1:] for each in words.split() if each[0] == "-"}
        return [
            *(each for each in names or () if each not in lacking),
            *(each[1:] for each in words.split() if each[0] == "+"),
        ]

    @property
    def releases(self) -> tuple[str, ...]:
        """The releases that the adapter knows, from the oldest to the newest."""
        return tuple(reversed(self._expected))

    @property
    def window(self) -> str:
        """The releases that the adapter knows, as a text."""
        *most, newest = (f"{self.title} {self.releases[0]}", *self.releases[1:])
        return f"{', '.join(most)} or {newest}" if most else newest

    def installed(self) -> str:
        """The version of the installed engine, as its package states it; empty if it is not installed."""
        try:
            return metadata.version(self.engine)
        except metadata.PackageNotFoundError:
            return ""

    def release(self) -> str:
        """The release of which the installed engine is a version; empty if the adapter does not know it."""
        # What follows the sign says for which device it was built.
        parts = self.installed().partition("+")[0].split(".")
        return next((each for each in self._expected if each.split(".") == parts[: each.count(".") + 1]), "")

    def differences(self) -> list[Difference]:
        """How the installed engine differs from its release, or from the newest one if its release is not known.

        Imports the modules of the engine in which the adapter uses something. Blocks meanwhile.
        """
        return list(self._differences())

    def check(self, *, allowed: bool) -> list[str]:
        """Check that the adapter works with the installed engine.

        Args:
            allowed: Whether the operator allows a version that the adapter does not know.

        Returns:
            What differs and is not needed, if the operator allows it. It belongs into the log.

        Raises:
            ConfigError: The engine differs. The error lists every difference (``config.engine``).
        """
        found = self.differences()
        needed = any(each.needed for each in found)
        if not found or (allowed and not needed):
            return [each.text for each in found]
        hint = f"install {self.window}, or the {self.adapter} for this {self.title}"
        if not needed:
            hint += "; or try it: everything that the adapter needs is there, and the word 'version' in 'allow' of the "
            hint += "adapter's own options lets it start"
        raise ConfigError(
            f"{self.adapter} was not tested with the installed {self.title}",
            cause="; ".join(each.text for each in found),
            hint=hint,
            code="config.engine",
        )

    def _differences(self) -> Iterator[Difference]:
        release = self.release()
        if not release:
            found = f"{self.installed()} is installed" if self.installed() else "none is installed"
            yield Difference(f"{self.window} is expected; {found}", needed=not self.installed())
        expected = self._expected[release or self.releases[-1]]
        for table in self._tables:
            if table.imported and table.imported not in sys.modules:
                continue
            for place in table.places:
                names = expected[place]
                if names is not None:
                    yield from self._compare(place, table.kind, names)

    def _compare(self, place: str, kind: Kind, wanted: list[str]) -> Iterator[Difference]:
        name, what = place.replace(":", "."), kind.value
        known = [each[place] for each in self._expected.values()]
        try:
            there = _resolve(place)
            found = _READ[kind](there)
        except Exception as error:  # an engine's import may raise anything, for example for a driver that is missing
            if self._kinds.get(place.rpartition(".")[0]) is Kind.METHODS:
                return  # what the class lacks is said once
            why = "" if isinstance(error, AttributeError) else f": {error}"
            yield Difference(f"{name} is missing{why}", needed=None not in known)
            return
        if kind is Kind.PARAMETERS:
            if found != wanted:
                text = f"{name} is defined with '{' '.join(found)}', and is known with '{' '.join(wanted)}'"
                yield Difference(text, needed=found not in known)
            return
        lacking = [each for each in wanted if each not in found]
        more = [] if kind in _AMONG_OTHERS else [each for each in found if each not in wanted]
        if lacking:
            needed = any(all(names is not None and each in names for names in known) for each in lacking)
            yield Difference(f"{name} lacks the {what} {', '.join(lacking)}", needed)
        if more:
            # No object can be made of a class that lacks an abstract method.
            needed = kind is Kind.METHODS and not _abstract(there).isdisjoint(more)
            yield Difference(f"{name} has the {what} {', '.join(more)}, which are not known", needed)


def _resolve(place: str) -> Any:
    module, _, path = place.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = inspect.getattr_static(found, name)
    return found


def _methods(found: Any) -> list[str]:
    own = [
        name
        for name, each in vars(found).items()
        if (inspect.isfunction(each) or isinstance(each, (property, classmethod, staticmethod)))
        and (name == "__init__" or not name.startswith("_"))
    ]
    return [*own, *sorted(_abstract(found).difference(own))]


def _abstract(found: Any) -> frozenset[str]:
    return getattr(found, "__abstractmethods__", frozenset())


def _fields(found: Any) -> list[str]:
    if dataclasses.is_dataclass(found):
        return [field.name for field in dataclasses.fields(found)]
    return list(inspect.get_annotations(found))


class _Default:
    """Stands for every default: only that there is one matters to a caller."""

    def __repr__(self) -> str:
        return ""


def _definition(found: Any) -> list[str]:
    words = ["@property"] if isinstance(found, property) else []
    if getattr(found, "__isabstractmethod__", False):
        words.append("@abstract")
    if isinstance(found, property):
        found = found.fget
    if isinstance(found, (classmethod, staticmethod)):
        found = found.__func__
    layers = [found]
    while hasattr(layers[-1], "__wrapped__"):
        layers.append(layers[-1].__wrapped__)
    if any(inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each) for each in layers):
        words.append("async")
    if any(inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each) for each in layers):
        words.append("yield")
    # Callers meet the outermost layer that does more with its arguments than to pass all of them on.
    met = next(each for each in layers if each is layers[-1] or not _passes_all(each))
    signature = inspect.signature(met, follow_wrapped=False)
    parameters = [
        each.replace(annotation=each.empty, default=each.empty if each.default is each.empty else _Default())
        for each in signature.parameters.values()
    ]
    written = str(signature.replace(parameters=parameters, return_annotation=signature.empty))
    return words + [each for each in written[1:-1].split(", ") if each]


def _passes_all(layer: Any) -> bool:
    taken = inspect.signature(layer, follow_wrapped=False).parameters.values()
    first = [each.name for each in taken if each.kind not in _REST]
    inside = [*inspect.signature(layer.__wrapped__).parameters]
    return len(first) + len(_REST) == len(taken) and inside[: len(first)] == first


def _attributes(found: Any) -> list[str]:
    functions = (each for each in vars(found).values() if inspect.isfunction(each))
    steps = (step for each in functions for step in dis.get_instructions(each))
    return [step.argval for step in steps if step.opname == "STORE_ATTR"]


def _variables(found: Any) -> list[str]:
    return list(found.__members__ if issubclass(found, enum.Enum) else vars(found))


def _members(found: Any) -> list[str]:
    return [name for name in _variables(found) if not name.startswith("_")]


_READ: dict[Kind, Callable[[Any], list[str]]] = {
    Kind.METHODS: _methods,
    Kind.FIELDS: _fields,
    Kind.MEMBERS: _members,
    Kind.PARAMETERS: _definition,
    Kind.VARIABLES: _variables,
    Kind.ATTRIBUTES: _attributes,
}
_REST = frozenset({inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD})
_AMONG_OTHERS = frozenset({Kind.VARIABLES, Kind.ATTRIBUTES})
