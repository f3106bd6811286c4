"""Builds every distribution from a clean tree, looks into what was built, and installs and tries it.

    python -m tools.release_check [--only core nixl] [--folder build/release] [--no-install]

Each sdist is built from a clone of the last commit, and each wheel from its unpacked sdist. Every archive must have the
licence and the marker of types, and no tests. The wheels are then installed into fresh environments: each alone, with
what it requires, and all together. In each environment the distribution's module is imported, and `statelink` moves
bytes. The environments need gigabytes, because some distributions require torch or CUDA libraries.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PLACES = (
    "core",
    "plugins/nixl",
    "plugins/mooncake",
    "plugins/mori",
    "plugins/ascend",
    "adapters/sglang",
    "adapters/vllm",
    "examples/demo",
)
NOT_SHIPPED = frozenset({"tests", "simulator", "conftest.py", "__pycache__", "build", "dist"})
"""Names of files and folders that no archive has."""
SMOKE = """
import importlib, importlib.metadata, json, pathlib, subprocess, sys
names = sys.argv[1:]
for name in names:
    module = importlib.import_module(name.replace("-", "_"))
    assert module.__file__.startswith(sys.prefix), f"{module.__file__} is not the installed one"
    files = [str(each) for each in importlib.metadata.files(name)]
    assert any(each.endswith("py.typed") for each in files), f"{name} has no types"
    assert any(each.endswith("LICENSE") for each in files), f"{name} has no licence"
command = str(pathlib.Path(sys.prefix) / "bin" / "statelink")
listed = subprocess.run([command, "backends", "--no-probe", "--json"], check=True, capture_output=True)
assert "tcp" in [each["name"] for each in json.loads(listed.stdout)]
done = subprocess.run([command, "doctor", "tcp", "--json"], capture_output=True, text=True)
(moved,) = [each for each in json.loads(done.stdout)["checks"] if each["what"] == "loopback transfer"]
assert moved["verdict"] == "ok", moved
"""
ENGINES = {"statelink-sglang": "sglang", "statelink-vllm": "vllm"}
"""Distributions whose module needs an engine, which they do not require."""


class Built(NamedTuple):
    """What was built of one distribution.

    Attributes:
        name: Its name.
        version: Its version.
        sdist: The archive of its source.
        wheel: The wheel that was built from that.
    """

    name: str
    version: str
    sdist: Path
    wheel: Path


def defects(archive: Path) -> Iterator[str]:
    """What is wrong with the content of a wheel or an sdist."""
    names = contents(archive)
    is_wheel = archive.suffix == ".whl"
    # An sdist has one folder around everything.
    parts = [PurePosixPath(name).parts if is_wheel else PurePosixPath(name).parts[1:] for name in names]
    if not any(each and each[-1] == "LICENSE" for each in parts):
        yield "it has no LICENSE"
    if not any(each and each[-1] == "py.typed" for each in parts):
        yield "it has no py.typed"
    for name, each in zip(names, parts, strict=True):
        # The kit is shipped: it is the package `testing`, and not a folder of tests.
        if NOT_SHIPPED & set(each) or re.fullmatch(r"test_\w+\.py", each[-1] if each else ""):
            yield f"it ships {name}"
    if not is_wheel and not any(each == ("pyproject.toml",) for each in parts):
        yield "it has no pyproject.toml"


def contents(archive: Path) -> list[str]:
    """Names of the files in a wheel or an sdist."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return [each for each in wheel.namelist() if not each.endswith("/")]
    with tarfile.open(archive) as sdist:
        return [each.name for each in sdist.getmembers() if each.isfile()]


def build(project: Path, folder: Path) -> Built:
    """Build an sdist, and a wheel from what is in it.

    Args:
        project: A folder with a ``pyproject.toml``.
        folder: Where the archives go; it has no other ones of this distribution.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = set(folder.iterdir())
    run([sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(folder)], project)
    (sdist,) = set(folder.iterdir()) - before
    unpacked = folder.parent / "unpacked"
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    stem = sdist.name.removesuffix(".tar.gz")
    run([sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)], unpacked / stem)
    (wheel,) = set(folder.iterdir()) - before - {sdist}
    name, _, version = stem.rpartition("-")
    return Built(name.replace("_", "-"), version, sdist, wheel)


def install(built: Sequence[Built], dist: Path, environment: Path) -> None:
    """Install wheels into a fresh environment, with what they require, and try them."""
    shutil.rmtree(environment, ignore_errors=True)
    run([sys.executable, "-m", "venv", str(environment)], ROOT)
    python = str(environment / "bin" / "python")
    wanted = [f"{each.name}=={each.version}" for each in built]
    pip = [
        python,
        "-m",
        "pip",
        "install",
        "--no-input",
        "--disable-pip-version-check",
        "--quiet",
    ]
    run(
        [
            *pip,
            "--only-binary=:all:",
            "--constraint",
            str(ROOT / "constraints.txt"),
            "--find-links",
            str(dist),
            *wanted,
        ],
        ROOT,
    )
    run([python, "-m", "pip", "check"], ROOT)
    tried = [each.name for each in built if each.name not in ENGINES]
    # In a folder without packages, so that nothing but what is installed can be imported.
    run([python, "-I", "-c", SMOKE, *tried], environment)


def run(command: Sequence[str], folder: Path) -> None:
    """Run a command; its failure ends this program."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"failed: {' '.join(command)}\n{done.stdout}{done.stderr}")


def clone(folder: Path) -> Path:
    """A clean tree of the last commit."""
    tree = folder / "tree"
    run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(tree)], ROOT)
    return tree


def main() -> None:
    """Parse arguments, build, look, install, say what was done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="last parts of the folders of distributions")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "release")
    parser.add_argument("--no-install", action="store_true", help="build and look, and install nothing")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tree = clone(folder)
    places = [place for place in PLACES if not arguments.only or place.rpartition("/")[2] in arguments.only]
    built, wrong = [], []
    for place in places:
        made = build(tree / place, folder / "dist")
        built.append(made)
        for archive in (made.sdist, made.wheel):
            wrong += [f"{archive.name}: {each}" for each in defects(archive)]
        print(json.dumps({"built": made.name, "version": made.version}), flush=True)
    if wrong:
        sys.exit("\n".join(wrong))
    if not arguments.no_install:
        for alone in built:
            install([alone], folder / "dist", folder / "venv")
            print(json.dumps({"installed": [alone.name]}), flush=True)
        install(built, folder / "dist", folder / "venv")
        print(json.dumps({"installed": [each.name for each in built]}), flush=True)


if __name__ == "__main__":
    main()
