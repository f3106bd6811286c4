"""Starts an ordinary server: ``python -m support.launch ARGUMENTS``, as ``python -m sglang.launch_server``.

SGLang spawns its schedulers, and each spawned process imports the main module again. So what this module installs is in
every process of the server.
"""

from __future__ import annotations

from support import events

events.install()

if __name__ == "__main__":
    import runpy

    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
