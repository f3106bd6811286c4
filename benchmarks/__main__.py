"""Every benchmark, one after the other."""

from __future__ import annotations

import runpy

for name in ("plan", "tcp_backend", "handoff"):
    print(f"== {name}", flush=True)
    runpy.run_module(f"benchmarks.{name}", run_name="__main__")
