"""The checks of `statelink doctor` for Mooncake: its builds, which share one module, and what they need."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from statelink.backend import Check, Verdict
from statelink.backend.native import rdma_devices, settings

from ._library import BUILDS, PACKAGES, Library, forced_tcp, loads

if TYPE_CHECKING:
    from ._options import Options

__all__ = ["diagnose"]


def diagnose(options: Options) -> list[Check]:
    """See `statelink.backend.Diagnosing`."""
    return [*_build(), *_libraries(options), _protocol(options), *_environment()]


def _build() -> Iterator[Check]:
    builds = sorted(set(importlib.metadata.packages_distributions().get("mooncake", ())))
    found = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in builds)
    if not builds:
        yield Check(what="package", verdict=Verdict.PROBLEM, found="no build is installed", hint=BUILDS)
    elif len(builds) > 1:
        # They overwrite each other's files, so the import is a mixture.
        hint = f"pip uninstall -y {' '.join(builds)}, and install one of them again"
        yield Check(what="package", verdict=Verdict.PROBLEM, found=f"{len(builds)} builds: {found}", hint=hint)
    else:
        yield Check(what="package", verdict=Verdict.OK, found=found)


def _libraries(options: Options) -> Iterator[Check]:
    """Check shared libraries. Builds need different ones; if the import works, none is missing."""
    try:
        Library(options)
        works = True
    except Exception:  # the probe reports why
        works = False
    for library, package in PACKAGES.items():
        if loads(library):
            yield Check(what=library, verdict=Verdict.OK, found="loads")
        elif works:
            yield Check(what=library, verdict=Verdict.NOT_APPLICABLE, found="absent, and this build does without it")
        else:
            hint = f"sudo apt-get install -y {package}"
            yield Check(what=library, verdict=Verdict.PROBLEM, found="cannot be loaded", hint=hint)


def _protocol(options: Options) -> Check:
    devices = rdma_devices()
    if options.protocol == "rdma" and not devices:
        hint = "see `lspci` and the driver's modules, or set protocol to auto"
        found = "the library would use TCP without a word: this host has no RDMA device"
        return Check(what="protocol rdma", verdict=Verdict.PROBLEM, found=found, hint=hint)
    wrong = [name for name in options.devices.split(",") if name and name.strip() not in devices]
    if wrong:
        found = f"no RDMA device is called {', '.join(wrong)}; this host has {', '.join(devices) or 'none'}"
        return Check(what="devices", verdict=Verdict.PROBLEM, found=found, hint="see /sys/class/infiniband")
    uses = "TCP" if options.protocol == "tcp" or forced_tcp() or not devices else "RDMA"
    return Check(what=f"protocol {options.protocol}", verdict=Verdict.OK, found=f"{uses} on this host")


def _environment() -> Iterator[Check]:
    if os.environ.get("MC_TCP_PROTO"):
        found = "MC_TCP_PROTO is set: its older value reports a write as done before its bytes are there"
        yield Check(what="environment", verdict=Verdict.PROBLEM, found=found, hint="unset MC_TCP_PROTO")
    else:
        yield settings("MC_")
