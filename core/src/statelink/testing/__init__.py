"""The conformance kit: what a backend or a strategy promises, as tests that a plugin's own repository runs.

Installed with ``statelink[testing]``. A plugin's whole file::

    from statelink.testing import BackendTests, PackageTests


    class TestMine(BackendTests):
        backend = "mine"


    class TestPackage(PackageTests):
        backend = "mine"
        library = ("vendor",)  # what `import vendor` imports

and for a strategy::

    from statelink.testing import StrategyTests


    class TestPieces(StrategyTests):
        strategy, state_type, backend = "acme.pieces", "kv", "tcp"
"""

from __future__ import annotations

import importlib
import typing

from ._addresses import free_addresses
from ._machine import bare_machine

if typing.TYPE_CHECKING:
    from ._remote import RemoteBackend
    from ._suite import BackendTests, PackageTests, StrategyTests

__all__ = ["BackendTests", "PackageTests", "RemoteBackend", "StrategyTests", "bare_machine", "free_addresses"]


def __getattr__(name: str) -> typing.Any:
    # Late: the kit's workers import this package, too, and have no use for pytest.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module("._remote" if name == "RemoteBackend" else "._suite", __name__)
    found = globals()[name] = getattr(home, name)
    return found
