"""Dynamo's worker for vLLM, which is started with this script instead of ``python -m dynamo.vllm``.

Dynamo 1.6.1 pins vLLM 0.31.0. At its import, it takes a name from vLLM that vLLM 0.33.0 lacks, and uses it only for
``--embedding-worker-processes``.
"""

from __future__ import annotations

if __name__ == "__main__":
    import vllm.v1.engine.utils

    if not hasattr(vllm.v1.engine.utils, "get_engine_zmq_addresses"):
        vllm.v1.engine.utils.get_engine_zmq_addresses = None

    from dynamo.vllm.main import main

    main()
