"""CURVE keys that are the same in every process, so that tests named after them are, too."""

from __future__ import annotations

import zmq
import zmq.utils.z85


def key_pair(number: int) -> tuple[str, str]:
    """A public and a secret key; different for each number below 256."""
    secret = zmq.utils.z85.encode(bytes([number + 1]) * 32)
    return zmq.curve_public(secret).decode(), secret.decode()
