"""What ``statelink doctor nixl`` finds over the card's memory.

python -m tools.card.doctor
"""

from __future__ import annotations

import argparse
import json
import sys

from .command import statelink
from .say import answer


def main() -> int:
    """Run it, and say each check."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    done = statelink("doctor", "nixl", "--json", seconds=100.0)
    try:
        checks = json.loads(done.output)["checks"]
    except (ValueError, KeyError):
        answer("doctor", f"no report, exit status {done.status}: {done.errors[-400:]}")
        return 1
    for check in checks:
        if check["verdict"] != "not applicable":
            answer(f"{check['about']}, {check['what']}", f"{check['verdict']}: {check['found']}")
    return done.status or 0


if __name__ == "__main__":
    sys.exit(main())
