"""Opens a link: from a configuration and an inventory to a link that listens.

`open` goes through these steps, and each may refuse:

1. `_checks` checks the configuration alone. `statelink doctor` makes the same checks.
2. `_select` picks the backend, by its name or as the best that can move what the rank holds.
3. `_staging` decides which components are staged, and opens the strategies, which may bring memory of their own.
4. `_slots` takes one of the links that the backend may have in this process.
5. `_open` makes the channel and the backend, registers memory, and makes the `Link`. What was opened before an error is
   closed again.
"""

from __future__ import annotations

from ._checks import CHECKS
from ._open import __version__, open, probe
from ._select import AUTO, check_options, check_transport, pick
from ._staging import choose_staging, open_strategies

__all__ = [
    "AUTO",
    "CHECKS",
    "__version__",
    "check_options",
    "check_transport",
    "choose_staging",
    "open",
    "open_strategies",
    "pick",
    "probe",
]
