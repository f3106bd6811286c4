"""Prints what SGLang's adapter describes of real pools, as msgpack in hexadecimal: a line for each kind.

A script for SGLang's environment. The tests of its adapter have to be on the path.
Usage: say_sglang.py MODEL KIND...
"""

from __future__ import annotations

import sys

import msgspec
from support.connectors import publish
from support.pools import make

from statelink import state

MODEL = "tiny@1"


def main(model: str, *kinds: str) -> None:
    publish("prefill", "statelink", model, 1)
    from statelink_sglang.backend import describe_pools  # imports SGLang's queues, after its plugins

    for kind in kinds:
        pools, args = make(kind)
        made = describe_pools(pools._replace(rows_optional=True), args)[0]
        print("state:", msgspec.msgpack.encode(state.describe("sglang", made, model=MODEL)).hex())


if __name__ == "__main__":
    main(*sys.argv[1:])
