"""Starts an ordinary server: ``python -m support.launch ARGUMENTS``, as ``python -m sglang.launch_server``.

SGLang spawns its schedulers, and each spawned process imports the main module again. So what this module installs is in
every process of the server.
"""

from __future__ import annotations

import os
import sys

from support import events
from support.kernels import pages

events.install()
pages.after_imports()


def main() -> None:
    """What ``sglang.launch_server`` does as the main module."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
