"""The command ``sglang``, as ``python -m support.sglang_command``, with the kernels that a release lacks on a CPU.

SGLang spawns its schedulers, and each spawned process imports the main module again.
"""

from __future__ import annotations

from support.kernels import pages

pages.after_imports()

if __name__ == "__main__":
    from sglang.cli.main import main

    main()
