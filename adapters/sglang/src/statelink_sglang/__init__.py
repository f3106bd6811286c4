"""Makes Statelink a transfer backend of SGLang's prefill/decode disaggregation.

SGLang loads `register` through the entry point ``statelink`` in the group ``sglang.srt.plugins``, in each of its
processes, also in those of users who do not use it. So it imports little: neither Statelink nor SGLang's schedulers.
Everything else is imported when SGLang asks for the classes of the backend ``statelink``.
"""

from __future__ import annotations

from ._register import register

__all__ = ["register"]
