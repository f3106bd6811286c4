"""Programs in fresh processes, which say what they saw."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

__all__ = ["seen_by"]


def seen_by(*code: str, **environment: str) -> tuple[dict[str, object], str]:
    """What a fresh process has in ``seen`` at the end, and what it logged.

    Args:
        code: Parts of its program.
        environment: Changes to its environment.
    """
    program = "\n".join(textwrap.dedent(each) for each in (*code, "import json\nprint('SEEN ' + json.dumps(seen))"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "STATELINK_ABSENT_PACKAGES": "1", **environment},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("SEEN ")]
    assert lines, done.stderr[-4000:]
    return json.loads(lines[0].removeprefix("SEEN ")), done.stderr
