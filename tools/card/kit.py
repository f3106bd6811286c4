"""Clauses of the conformance kit over the card's memory: how many of each verdict, and why clauses failed.

    python -m tools.card.kit -k 'Moving or Stalling' [--backend nixl] [--allocator MODULE:NAME]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter

from .device import Card
from .say import answer

COMMAND = "from statelink_command import main; main()"


def main() -> int:
    """Run the clauses, and say what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", dest="expression", default="")
    parser.add_argument("--backend", default="nixl")
    parser.add_argument("--allocator", default="", help="allocates the memory; torch does if not given, and it can")
    arguments = parser.parse_args()
    by = arguments.allocator or ("" if Card().torch is not None else "tools.card.allocator:Memory")
    command = [sys.executable, "-c", COMMAND, "conform", arguments.backend, "--memory", "cuda:0", "--json", "--require"]
    command += ["-k", arguments.expression] if arguments.expression else []
    command += ["--allocator", by] if by else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    try:
        clauses = json.loads(done.stdout)["runs"][0]["clauses"]
    except (ValueError, KeyError, IndexError):
        print(done.stdout)
        answer(f"clauses {arguments.expression}", f"no report, exit status {done.returncode}")
        return 1
    counts = Counter(clause["verdict"] for clause in clauses)
    answer(f"clauses {arguments.expression}", ", ".join(f"{count} {what}" for what, count in counts.most_common()))
    for clause in clauses:
        if clause["verdict"] in ("failed", "deviates"):
            answer(f"{clause['verdict']}: {clause['name']}", clause["reason"][:400])
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
