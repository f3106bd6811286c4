"""Every benchmark, one after the other."""

from __future__ import annotations

import runpy

for name in ("plan", "tcp_backend", "handoff", "rooms"):
    print(f"== {name}", flush=True)
    try:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    except SystemExit as ended:  # --help of one of them is not the end of the others
        if ended.code:
            raise
