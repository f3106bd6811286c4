"""The checks of `statelink doctor` for NIXL: its packages, which share one module, and what UCX finds here."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from statelink.backend import Check, Verdict
from statelink.backend.native import rdma_devices, settings

from ._library import Library
from ._transport import has_card, possible

if TYPE_CHECKING:
    from ._options import Options

__all__ = ["diagnose"]

FRONT = "nixl"
BUILDS = ("nixl-cu12", "nixl-cu13", "nixl-rocm")
OLDEST = [1, 5]
"""The oldest release that the backend takes."""


def diagnose(options: Options) -> list[Check]:
    """See `statelink.backend.Diagnosing`."""
    installed = {name: version for name in (FRONT, *BUILDS) if (version := _version(name))}
    return [*_packages(installed), *_cuda(installed), _modules(), _environment(), _transports(options)]


def _packages(installed: dict[str, str]) -> Iterator[Check]:
    builds = [name for name in BUILDS if name in installed]
    found = ", ".join(f"{name} {version}" for name, version in installed.items())
    if FRONT not in installed:
        hint = "pip install nixl, which chooses among its builds"
        yield Check(what="packages", verdict=Verdict.PROBLEM, found=found or "nixl is not installed", hint=hint)
    elif not builds:
        hint = "pip install nixl-cu12, or nixl-cu13: either works without CUDA, too"
        yield Check(what="packages", verdict=Verdict.PROBLEM, found=f"{found} is a front without a build", hint=hint)
    elif len({installed[name] for name in (FRONT, *builds)}) > 1:
        version = _common(installed)
        hint = (
            f"pip install {' '.join(f'{name}=={version}' for name in (FRONT, *builds) if installed[name] != version)}"
        )
        yield Check(what="packages", verdict=Verdict.PROBLEM, found=f"versions differ: {found}", hint=hint)
    else:
        yield Check(what="packages", verdict=Verdict.OK, found=found)


def _common(installed: dict[str, str]) -> str:
    """The version that the front and the builds can share: the lowest that is there and not too old; empty for none.

    An index may have a version of the front without a build of it.
    """
    recent = [version for version in installed.values() if _numbers(version) >= OLDEST]
    return min(recent or installed.values(), key=_numbers, default="")


def _numbers(version: str) -> list[int]:
    return [int(each) for each in version.split(".") if each.isdigit()]


def _cuda(installed: dict[str, str]) -> Iterator[Check]:
    """Check the build. ``pip install nixl`` installs one build, but its front imports the one for torch's CUDA."""
    what = "build for CUDA"
    try:
        major = importlib.import_module("nixl_meta_utils").detect_cuda_major()
    except Exception as error:  # not installed, or a version of the front that does not choose
        found = f"the front does not say which it needs ({type(error).__name__})"
        yield Check(what=what, verdict=Verdict.NOT_APPLICABLE, found=found)
        return
    needed = f"nixl-cu{major}"
    if major is None:
        found = "no CUDA in this Python environment: any build works"
        yield Check(what=what, verdict=Verdict.NOT_APPLICABLE, found=found)
    elif needed in installed:
        yield Check(what=what, verdict=Verdict.OK, found=f"CUDA {major}, and {needed} is there")
    else:
        found = f"this Python environment has CUDA {major}, and {needed} is not installed: import nixl fails"
        version = _common(installed)
        wanted = [FRONT] if installed.get(FRONT, version) != version else []
        hint = f"pip install {' '.join(f'{name}=={version}' if version else name for name in (*wanted, needed))}"
        yield Check(what=what, verdict=Verdict.PROBLEM, found=found, hint=hint)


def _modules() -> Check:
    """Load UCX's modules for CUDA, in a process of their own, where the host has a graphics card."""
    what = "UCX's modules for CUDA"
    if not has_card():
        return Check(what=what, verdict=Verdict.NOT_APPLICABLE, found="no graphics card of NVIDIA on the PCI bus")
    try:
        lacks = Library().lacks_cuda()
    except Exception as error:  # `probe` says why it cannot be imported
        found = f"NIXL cannot be imported ({type(error).__name__})"
        return Check(what=what, verdict=Verdict.NOT_APPLICABLE, found=found)
    if not lacks:
        return Check(what=what, verdict=Verdict.OK, found="they load")
    hint = "libnvidia-ml.so.1: NVIDIA_DRIVER_CAPABILITIES=compute,utility; libcudart: put it on the loader's path"
    return Check(what=what, verdict=Verdict.PROBLEM, found=lacks, hint=hint)


def _environment() -> Check:
    modules = os.environ.get("UCX_MODULES", "")
    if rdma_devices() and modules.startswith("^") and "ib" in modules:
        found = f"UCX_MODULES={modules} leaves RDMA out, and this host has {', '.join(rdma_devices())}"
        return Check(what="environment", verdict=Verdict.PROBLEM, found=found, hint="unset UCX_MODULES")
    return settings("UCX_", "NIXL_")


def _transports(options: Options) -> Check:
    may = possible(options)
    if not may:
        found = f"NIXL's own: {', '.join(options.backends)}"
        return Check(what="transports", verdict=Verdict.NOT_APPLICABLE, found=found)
    return Check(what="transports", verdict=Verdict.OK, found=f"UCX may use {', '.join(sorted(may))}")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
