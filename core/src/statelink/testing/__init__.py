"""What tests of plugins and engines need: processes, free addresses, and a machine that a test makes up.

`statelink.testing.process` runs functions in processes of their own. The conformance kit for backends is a package of
its own, `statelink_conformance`.
"""

from __future__ import annotations

from ._host import bare_machine, free_addresses

__all__ = ["bare_machine", "free_addresses"]
