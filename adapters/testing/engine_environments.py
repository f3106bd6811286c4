"""What the engines need to run on the CPU: their environments, and what a vLLM server is asked."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["SGLANG", "VLLM", "completion", "python_of"]

_ANY = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

SGLANG = {
    **_ANY,
    "STATELINK_ABSENT_PACKAGES": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_HOST_IP": "127.0.0.1",
    "GLOG_minloglevel": "2",
}
"""Changes to the environment of a process that runs SGLang."""

VLLM = {
    **_ANY,
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    # A process may miss that vLLM's queue in shared memory wakes it. vLLM 0.31 looks again only after so many seconds.
    "VLLM_RINGBUFFER_WARNING_INTERVAL": "2",
}
"""Changes to the environment of a process that runs vLLM."""


def python_of(server: str) -> str:
    """The interpreter of a server, by its name.

    ``STATELINK_PREFILL_PYTHON`` and ``STATELINK_DECODE_PYTHON`` name those of other releases, for servers that are
    called ``prefill`` and ``decode``. Every other server has the interpreter of the tests.
    """
    return os.environ.get(f"STATELINK_{server.upper()}_PYTHON", sys.executable)


def completion(model: str, prompt: Sequence[int], count: int) -> dict[str, Any]:
    """The body of a request to a vLLM server: complete token ids, always with the likeliest token.

    Args:
        model: The model as the server was started with.
        prompt: Token ids.
        count: Tokens to generate, also after the end of the text.
    """
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
