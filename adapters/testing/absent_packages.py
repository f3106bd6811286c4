"""Stands in for two packages that engines import and that have no build for a CPU: ``sgl_kernel`` and ``torchvision``.

Every process of an SGLang server must have it, so `tools/engine-env.sh` puts it into the environment's site-packages,
with a ``.pth`` file that imports it. It does nothing unless ``STATELINK_ABSENT_PACKAGES=1``, or until somebody adds the
finder. Whatever an engine takes from the two packages at import time is a class that allows everything. What a server
really calls must not come from here: a result of such a call is no tensor.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

ABSENT = ("sgl_kernel", "torchvision")


class Permissive(type):
    """Classes that answer to any attribute, index or alternative, so that module-level code runs."""

    def __getattr__(cls, name: str) -> Any:
        return _dunder_or(name, cls.__qualname__)

    def __getitem__(cls, key: object) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __or__(cls, other: object) -> Any:
        return cls

    __ror__ = __or__


def _dunder_or(name: str, owner: str) -> Any:
    if name[:2] == name[-2:] == "__":
        raise AttributeError(f"{owner} has no {name}")
    return _permissive(f"{owner}.{name}")


def _permissive(qualname: str) -> Permissive:
    def new(cls: type, *args: Any, **more: Any) -> Any:
        decorated = len(args) == 1 and not more and isinstance(args[0], (type, types.FunctionType))
        return args[0] if decorated else object.__new__(cls)

    def call(self: Any, *args: Any, **more: Any) -> Any:
        return new(type(self), *args, **more) if args else self

    body = {
        "__new__": new,
        "__init__": lambda self, *args, **more: None,
        "__call__": call,
        "__getattr__": lambda self, name: _dunder_or(name, qualname),
        "__qualname__": qualname,
    }
    return Permissive(qualname.rpartition(".")[2], (), body)


class AbsentModule(types.ModuleType):
    """A module of an absent package."""

    __version__ = "99.0"
    __path__: list[str]

    def __getattr__(self, name: str) -> Any:
        found = sys.modules.get(f"{self.__name__}.{name}") or _dunder_or(name, self.__name__)
        setattr(self, name, found)
        return found


class AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the absent packages, and their modules. It comes last, so that a real package is preferred."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a module of an absent package."""
        if fullname.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """A module that has every name."""
        return AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is in the module before it is asked for."""


if os.environ.get("STATELINK_ABSENT_PACKAGES") == "1":
    sys.meta_path.append(AbsentFinder())
