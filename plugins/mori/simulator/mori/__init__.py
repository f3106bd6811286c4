"""A simulator of AMD's MoRI, as far as ``mori.io`` is concerned: its names, refusals, limits and ways to end a process.

It is found only by a process whose ``PYTHONPATH`` names the folder above. Bytes really move between processes: what
stands for the NIC and the GPU copies with ``process_vm_writev``, and the target's Python has no part in it. Not here:
the import of torch, real GPUs (memory that is registered as a GPU's is host memory), UALink, timing, and what the
plugin does not use: transfers without a session, single ones, notifications of the target, and waits. Its answers are
compared with those of the real library, in tests/test_simulator.py.

The machine is described by environment variables that the real library does not have:

* ``MORI_SIM_GPUS`` (2) and ``MORI_SIM_PORTS`` (1): GPUs that ROCm reports, and RDMA ports that are active.
* ``MORI_SIM_NUMA_NODES`` (1): NUMA nodes, over which an engine's memories are dealt out in turn.
* ``MORI_SIM_MEMLOCK`` (no limit): bytes that a process may pin.
* ``MORI_SIM_MAX_MSG`` (1 GiB): bytes that one request may carry.
* ``MORI_SIM_DELAY_MS`` (0.3): how long after its submission an operation moves its bytes.
* ``MORI_SIM_HOLD``: a file; while it exists, no byte moves.
* ``MORI_SIM_LACKS``: names that this build does not have, such as ``IOEngine.create_session``, separated by commas.
* ``MORI_SIM_BREAK``: a file; while it exists, the NIC reports errors.
* ``MORI_SIM_FAULT``: a file; while it exists, the NIC breaks connections by itself.
"""

from __future__ import annotations

__version__ = "1.2.4+simulator"
