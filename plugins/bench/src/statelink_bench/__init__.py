"""``statelink bench``: measures installed backends between two processes, of one host or of two.

A *side* is a process that holds pages and opens links. The target side is here. The source side is a process of this
host, or of the host that ``--peer`` names. Both do what they are told by messages of JSON, one after the other.
"""

from __future__ import annotations

from ._command import bench
from ._ends import FailedError, Local, Remote
from ._messages import Close, Copy, Send
from ._side import Pages

__all__ = ["Close", "Copy", "FailedError", "Local", "Pages", "Remote", "Send", "bench"]
