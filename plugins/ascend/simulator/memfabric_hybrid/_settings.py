"""What tests can set, all in the environment, so that it holds in every process; read when it matters."""

from __future__ import annotations

import os

__all__ = ["bind_seconds", "contact_seconds", "devices", "fail_after", "has_npu", "lacks", "ports", "publish_seconds"]


def has_npu() -> bool:
    """``MEMFABRIC_SIM_NPU=absent``: every ``initialize`` returns -1, and everything after it does as the library."""
    return os.environ.get("MEMFABRIC_SIM_NPU") != "absent"


def devices() -> int:
    """``MEMFABRIC_SIM_DEVICES``: how many NPUs there are."""
    return int(os.environ.get("MEMFABRIC_SIM_DEVICES", "8"))


def contact_seconds() -> float:
    """``MEMFABRIC_SIM_CONTACT_S``: how long a first contact waits for a store that does not answer."""
    return float(os.environ.get("MEMFABRIC_SIM_CONTACT_S", "120"))


def bind_seconds() -> float:
    """``MEMFABRIC_SIM_BIND_S``: how long it tries to bind an address that it cannot; really about 56 s."""
    return float(os.environ.get("MEMFABRIC_SIM_BIND_S", "0.2"))


def publish_seconds() -> float:
    """``MEMFABRIC_SIM_PUBLISH_S``: until a registration reaches peers that are already connected."""
    return float(os.environ.get("MEMFABRIC_SIM_PUBLISH_S", "0.1"))


def fail_after() -> int | None:
    """``MEMFABRIC_SIM_FAIL_AFTER``: the device fails in every batch, when it has moved so many descriptors."""
    value = os.environ.get("MEMFABRIC_SIM_FAIL_AFTER")
    return int(value) if value else None


def lacks() -> list[str]:
    """``MEMFABRIC_SIM_LACKS``: names of methods and kinds of transfer that this version does not have yet."""
    return [name for name in os.environ.get("MEMFABRIC_SIM_LACKS", "").split(",") if name]


def ports() -> range:
    """The library's own two: where it looks for a port when it may choose one."""
    first = int(os.environ.get("MF_CONFIG_STORE_PORT_START", "9000"))
    return range(first, int(os.environ.get("MF_CONFIG_STORE_PORT_END", "65535")) + 1)
