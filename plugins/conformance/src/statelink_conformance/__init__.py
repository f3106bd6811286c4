"""The conformance kit: the contract of backends and strategies, as tests for a plugin's own repository.

A plugin needs only this file::

    from statelink_conformance import BackendTests, PackageTests


    class TestMine(BackendTests):
        backend = "mine"


    class TestPackage(PackageTests):
        backend = "mine"
        library = ("vendor",)  # what `import vendor` imports

and for a strategy::

    from statelink_conformance import StrategyTests


    class TestPieces(StrategyTests):
        strategy, state_type, backend = "acme.pieces", "kv", "tcp"
"""

from __future__ import annotations

import importlib
import typing

if typing.TYPE_CHECKING:
    from ._remote import RemoteBackend
    from ._suite import BackendTests, PackageTests, StrategyTests

__all__ = ["BackendTests", "PackageTests", "RemoteBackend", "StrategyTests"]


def __getattr__(name: str) -> typing.Any:
    # Imported late, because the kit's workers import this package, too, and need no pytest.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module("._remote" if name == "RemoteBackend" else "._suite", __name__)
    found = globals()[name] = getattr(home, name)
    return found
