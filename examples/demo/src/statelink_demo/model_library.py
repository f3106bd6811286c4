"""What the demo uses of transformers.

It takes seconds to import. So functions import this module when they need it, and `processes.Crew` has it imported
before the workers are forked.
"""

from __future__ import annotations

from transformers import AutoModelForCausalLM, DynamicCache, Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.utils.logging import set_verbosity

__all__ = ["AutoModelForCausalLM", "DynamicCache", "Qwen3NextConfig", "Qwen3NextForCausalLM", "set_verbosity"]
