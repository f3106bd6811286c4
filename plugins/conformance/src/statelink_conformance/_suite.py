"""The classes from which a plugin's test classes are derived."""

from __future__ import annotations

from .clauses._connecting import Connecting
from .clauses._declaration import Declaration
from .clauses._dying import Dying
from .clauses._fencing import Fencing
from .clauses._leaking import Leaking
from .clauses._moving import Moving
from .clauses._packaging import Packaging
from .clauses._refusing import Refusing
from .clauses._registration import Registration
from .clauses._rooms import Rooms
from .clauses._stalling import Stalling
from .clauses._states import StateTypes
from .clauses._strategies import Strategies

__all__ = ["BackendTests", "PackageTests", "StrategyTests"]


# pytest takes the last base first.
class BackendTests(
    Rooms, StateTypes, Leaking, Dying, Stalling, Fencing, Refusing, Moving, Connecting, Registration, Declaration
):
    """Every clause of the backend contract, against one backend.

    Derive a class whose name begins with ``Test``, and name the backend in it.

    Attributes:
        backend: The backend's entry-point name; its package has to be installed.
        options: Its options.
        config: Further keys of the links' configuration.
        environment: Environment variables of its processes.
        processes: Number of processes for the two ends: 1 for a backend that reaches no other process.
        patience: Seconds within which a failure must be reported, such as the death of a peer.
        memory: Kind of the memory that is moved: ``dram``, or that of a device such as ``cuda:0``.
        allocator: Function that allocates memory of a device, as ``module:name``; torch if empty.
        simulator: Whether a stand-in for the real library moves the bytes.
        moved_by: What moves the bytes, for the report: the library, its version, and what it runs on.
        deviations: Clauses that the backend is known to break: name of the test to reason. They are strict expected
            failures: if the backend keeps such a clause, the clause fails.
    """


class StrategyTests(Strategies):
    """Every clause on strategies, against one strategy.

    Derive a class whose name begins with ``Test``, and name the strategy in it. It also has the attributes of
    `BackendTests`.

    Attributes:
        strategy: The strategy's name. Its package has to be installed.
        state_type: The state type that it carries.
        backend: The backend over which it carries this type.
        config: Keys of the links' configuration that the strategy needs.
    """


class PackageTests(Packaging):
    """Every clause on the package of a backend: its metadata, its names, its options, and its library.

    Derive a class whose name begins with ``Test``, and name the backend in it. Of the attributes of `BackendTests`,
    ``backend``, ``options``, ``environment``, ``memory`` and ``deviations`` count.

    Attributes:
        library: Top-level modules of the libraries that the plugin imports late. Tests make them unavailable.
        probes_elsewhere: Whether the probe leaves the import of the library to another process.
        refused_options: Wrong options, each of which must be refused.
    """
