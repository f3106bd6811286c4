"""Clauses of the conformance kit over the card's memory: how many of each verdict, and why clauses failed.

python -m tools.card.kit -k 'Moving or Stalling' [-o 'ucx={"TLS": "tcp,cuda_copy"}'] [--seconds 75]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter

from .command import statelink
from .reasons import telling
from .say import answer


def main() -> int:
    """Run the clauses, and say what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", dest="expression", required=True)
    parser.add_argument("-o", dest="options", action="append", default=[], help="as for `statelink conform`")
    parser.add_argument("--seconds", type=float, default=75.0)
    arguments = parser.parse_args()
    options = [word for each in arguments.options for word in ("-o", each)]
    words = ("conform", "nixl", "--json", "--require", "-k", arguments.expression, *options)
    done = statelink(*words, seconds=arguments.seconds)
    what = f"clauses {arguments.expression}"
    if done.status is None:
        progress = [line for line in done.errors.splitlines() if " of " in line]
        failed = [line for line in progress if line.endswith(" failed")]
        answer(what, f"not finished within {arguments.seconds:g} seconds: {'; '.join(failed or progress[-1:])}")
        return 1
    try:
        clauses = json.loads(done.output)["runs"][0]["clauses"]
    except (ValueError, KeyError, IndexError):
        answer(what, f"no report, exit status {done.status}: {done.errors[-400:]}")
        return 1
    counts = Counter(clause["verdict"] for clause in clauses)
    answer(what, ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    for clause in clauses:
        if clause["verdict"] in ("failed", "deviates"):
            answer(f"{clause['verdict']}: {clause['name']}", telling(clause["reason"]))
    return done.status


if __name__ == "__main__":
    sys.exit(main())
