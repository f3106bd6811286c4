"""How a release of an engine differs from what its adapter was written against, without installing it.

``python -m tools.engine_differences sglang|vllm RELEASE`` runs in the engine's environment, which `tools/engine-env.sh`
makes. RELEASE is a version, whose wheel pip then downloads, or a folder with an unpacked wheel. Only the wheel's
Python is looked at, with the packages that the tested release needs. Exit status 1: it differs. The adapter's tests
still have to show what the engine does with what looks the same.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

LOADED = {
    "sglang": (
        "sglang.srt.managers.scheduler",
        "sglang.srt.managers.data_parallel_controller",
        "sglang.srt.managers.tokenizer_manager",
    ),
    "vllm": (),
}
"""Modules that the processes of a server import. An adapter looks only at those that are there."""

ENVIRONMENT = {
    "sglang": {"SGLANG_USE_CPU_ENGINE": "1", "STATELINK_ABSENT_PACKAGES": "1"},
    "vllm": {"VLLM_TARGET_DEVICE": "cpu"},
}
"""Lets an engine be imported where there is no device."""


def unpacked(engine: str, version: str, folder: Path) -> Path:
    """Download a release's wheel and unpack its Python."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    if subprocess.run([*command, "--dest", str(folder), f"{engine}=={version}"], check=False).returncode:
        sys.exit(
            f"pip has no wheel of {engine} {version}\nhint: name another version, or a folder with an unpacked wheel"
        )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder, [name for name in packed.namelist() if not name.endswith((".so", ".cubin"))])
    return folder


def tell(engine: str) -> None:
    """Print what the adapter says of the engine that this process imports, and end with 1 if anything differs."""
    for module in LOADED[engine]:
        importlib.import_module(module)
    seam = importlib.import_module(f"statelink_{engine}._seam").SEAM
    found = seam.differences()
    for each in found:
        print(f"{each.text}{' (needed)' if each.needed else ''}")
    if not found:
        print(f"nothing that the adapter uses differs from what it knows of {seam.title} {seam.release()}")
    sys.exit(bool(found))


def main() -> None:
    """Compare in a process of its own, which imports the release in place of the installed one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=LOADED)
    parser.add_argument("release", help="a version, or a folder with an unpacked wheel")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        there = Path(given.release)
        place = there if there.is_dir() else unpacked(given.engine, given.release, Path(folder))
        path = os.pathsep.join(filter(None, (str(place.resolve()), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, **ENVIRONMENT[given.engine], "PYTHONPATH": path}
        asked = f"from tools.engine_differences import tell; tell({given.engine!r})"
        ended = subprocess.run([sys.executable, "-W", "ignore", "-c", asked], env=environment, check=False)
    sys.exit(ended.returncode)


if __name__ == "__main__":
    main()
