"""The conformance kit: every clause of the backend contract, as tests that a plugin's own repository runs.

Installed with ``statelink[testing]``. A plugin's whole file::

    from statelink.testing import BackendTests


    class TestMine(BackendTests):
        backend = "mine"
"""

from __future__ import annotations

import typing

if typing.TYPE_CHECKING:
    from ._suite import BackendTests

__all__ = ["BackendTests"]


def __getattr__(name: str) -> typing.Any:
    # Late: the kit's workers import this package, too, and have no use for pytest.
    if name != "BackendTests":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import pytest

    pytest.register_assert_rewrite(f"{__name__}.clauses")
    from ._suite import BackendTests

    globals()[name] = BackendTests
    return BackendTests
