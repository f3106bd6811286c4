"""Makes Statelink a transfer backend of SGLang's prefill/decode disaggregation.

SGLang loads `register` through the entry point ``statelink`` in the group ``sglang.srt.plugins``. It does so in each of
its processes, even if the user chose another backend. So `register` imports no scheduler of SGLang's, and no backend.
Everything else is imported when SGLang asks for the classes of the backend ``statelink``.
"""

from __future__ import annotations

from ._register import register

__all__ = ["register"]
