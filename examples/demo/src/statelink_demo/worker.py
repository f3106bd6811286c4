"""One process of the demo: `python -m statelink_demo.worker prefill|decode|reference`."""

from __future__ import annotations

import sys

from statelink.errors import StatelinkError
from statelink_demo.control import Control, StoppedError
from statelink_demo.messages import Start, Stopped

__all__ = ["main"]


def main(role: str) -> int:
    """Play a role until the parent hangs up; the exit status."""
    control = Control()
    try:
        start = control.receive(Start)
        if start is None:
            return 0
        # Imported late: it takes seconds, and nothing that it prints may reach the pipe.
        if role == "prefill":
            from statelink_demo.prefill_worker import run
        elif role == "decode":
            from statelink_demo.decode_worker import run
        else:
            from statelink_demo.reference_worker import run
        run(control, start)
    except (StatelinkError, StoppedError) as error:
        control.send(Stopped(str(error)))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
