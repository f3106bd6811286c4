"""Makes Statelink a transfer backend of SGLang's prefill/decode disaggregation.

SGLang loads `register` through the entry point ``statelink`` in the group ``sglang.srt.plugins``. It does so in each of
its processes, even if the user chose another backend. So `register` imports no scheduler of SGLang's, and no backend.
Everything else is imported when SGLang asks for the classes of the backend ``statelink``.

A program that parses SGLang's options before it loads plugins, such as NVIDIA Dynamo, finds the name through `offer`.
"""

from __future__ import annotations

from ._choice import offer
from ._register import register

__all__ = ["offer", "register"]
