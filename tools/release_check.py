"""Builds every distribution from a clean tree, looks into what was built, and installs and tries it.

    python -m tools.release_check [--only core nixl] [--folder build/release] [--no-install] [--python PYTHON...]
                                  [--dependencies pinned oldest newest]

Each sdist is built from a clone of the last commit, and each wheel from its unpacked sdist. Every archive must have the
licence and the marker of types, and no tests. The wheels are then installed into fresh environments: each alone, with
what it requires, and all together. In each environment the distribution's module is imported, and `statelink` moves
bytes. The environments need gigabytes, because some distributions require torch or CUDA libraries.

Before that, the core's wheel passes the core's tests with every interpreter that is at hand: with the dependencies that
``constraints.txt`` pins, with the oldest that its metadata allows, and with the newest that there are. The oldest are
tried with the oldest Python only, because several of them have no wheels for a later one. Files of tests that need
torch are left out. The output names what is left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PLACES = (
    "core",
    "plugins/nixl",
    "plugins/mooncake",
    "plugins/mori",
    "plugins/ascend",
    "plugins/etcd",
    "plugins/bench",
    "plugins/conformance",
    "plugins/explain",
    "adapters/sglang",
    "adapters/vllm",
    "examples/demo",
)
NOT_SHIPPED = frozenset({"tests", "standin", "conftest.py", "__pycache__", "build", "dist"})
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

PYTHONS = tuple(f"python3.{minor}" for minor in range(10, 15))
DEPENDENCIES = ("pinned", "oldest", "newest")
OLDEST_PYTHON = (3, 10)
"""The core's `requires-python`."""
SUITE = ("core/tests", *(f"tests/{each}" for each in ("backend", "config", "plan", "state", "tcp", "wire")))
"""Tests that need nothing but the core, its extras and the kit, but for some files: see `needing_torch`."""
EXTRAS = "opentelemetry,prometheus,verify"
TEST_TOOLS = ("hypothesis", "opentelemetry-sdk", "pytest-timeout", "pytest-xdist")


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


def fresh(interpreter: str, environment: Path, dist: Path, constraints: Path | None, wanted: Sequence[str]) -> str:
    """Make an environment with these requirements, wheels only. Returns its interpreter."""
    shutil.rmtree(environment, ignore_errors=True)
    run([interpreter, "-m", "venv", str(environment)], ROOT)
    python = str(environment / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--quiet"]
    limits = ["--constraint", str(constraints)] if constraints else []
    run([*pip, "--only-binary=:all:", *limits, "--find-links", str(dist), *wanted], ROOT)
    run([python, "-m", "pip", "check"], ROOT)
    return python


def install(built: Sequence[Built], dist: Path, environment: Path) -> None:
    """Install wheels into a fresh environment, with what they require, and try them."""
    wanted = [f"{each.name}=={each.version}" for each in built]
    python = fresh(sys.executable, environment, dist, ROOT / "constraints.txt", wanted)
    tried = [each.name for each in built if each.name not in ENGINES]
    # In a folder without packages, so that nothing but what is installed can be imported.
    run([python, "-I", "-c", SMOKE, *tried], environment)


def oldest(wheel: Path) -> Iterator[str]:
    """Constraints to the oldest versions that a wheel's requirements allow."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    for line in lines:
        name, _, text = line.partition("Requires-Dist: ")
        if name or not text:
            continue
        found = Requirement(text)
        # A constraint knows no extras: what holds without them, such as the version of Python, is kept.
        marker = re.sub(r"\s*(and\s+)?extra == \S+", "", str(found.marker or ""))
        for each in found.specifier:
            if each.operator == ">=":
                yield f"{found.name}=={each.version}" + (f"; {marker}" if marker else "")


def needing_torch(tree: Path) -> list[str]:
    """Files of the suite that import torch. They are left out, because a build of torch may have gigabytes."""
    files = sorted(path for folder in SUITE for path in (tree / folder).rglob("*.py"))
    texts = {str(path.relative_to(tree)): path.read_text() for path in files}
    return [name for name, text in texts.items() if re.search(r"^\s*(import|from) torch\b", text, re.MULTILINE)]


def suite(core: Built, kit: Built, tree: Path, folder: Path, interpreter: str, dependencies: str) -> None:
    """Let an installed wheel of the core pass the kit, and the core's tests, which run from the tree beside it."""
    constraints = {"pinned": ROOT / "constraints.txt", "oldest": folder / "oldest.txt", "newest": None}[dependencies]
    if dependencies == "oldest":
        (folder / "oldest.txt").write_text("\n".join([*oldest(core.wheel), *oldest(kit.wheel)]) + "\n")
    wanted = [f"{core.name}[{EXTRAS}]=={core.version}", f"{kit.name}=={kit.version}", *TEST_TOOLS]
    python = fresh(interpreter, folder / "venv", folder / "dist", constraints, wanted)
    run([python, "-I", "-c", SMOKE, core.name], folder / "venv")
    run([str(folder / "venv" / "bin" / "statelink"), "conform", "tcp"], folder / "venv")
    if dependencies == "oldest":  # the kit works with it; the settings of these tests are for a later pytest
        run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade", "pytest"], folder)
    left_out = [f"--ignore={each}" for each in needing_torch(tree)]
    run([python, "-m", "pytest", "-q", "--numprocesses=auto", "--dist=loadfile", *left_out, *SUITE], tree)


def version_of(interpreter: str) -> tuple[int, int]:
    """Major and minor version of an interpreter."""
    done = subprocess.run(
        [interpreter, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, check=True
    )
    major, minor = map(int, done.stdout.split())
    return major, minor


def trials(versions: Mapping[str, tuple[int, int]], dependencies: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Which interpreters the suite runs with, and which dependencies each of them has."""
    for (interpreter, version), wanted in itertools.product(versions.items(), dependencies):
        if wanted == "oldest" and version != OLDEST_PYTHON:
            why = f"not every one of the oldest dependencies has a wheel for Python {version[0]}.{version[1]}"
            print(json.dumps({"left_out": wanted, "python": interpreter, "why": why}), flush=True)
        else:
            yield interpreter, wanted


def at_hand() -> list[str]:
    """The interpreters of `PYTHONS` that run here."""
    there = [each for each in PYTHONS if shutil.which(each)]
    # A version manager may have a name on the path for what it does not run.
    return [each for each in there if not subprocess.run([each, "-c", ""], capture_output=True, check=False).returncode]


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
    parser.add_argument("--python", nargs="+", default=at_hand() or [sys.executable])
    parser.add_argument("--dependencies", nargs="+", choices=DEPENDENCIES, default=list(DEPENDENCIES))
    arguments = parser.parse_args()
    tried = list(trials({each: version_of(each) for each in arguments.python}, arguments.dependencies))
    if not tried:
        parser.error("nothing would be tested: the oldest dependencies need Python 3.10, which --python can name")
    folder = arguments.folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tree = clone(folder)
    only = set(arguments.only or ())
    if "core" in only:
        only.add("conformance")  # the core's wheel is tested with it
    places = [place for place in PLACES if not only or place.rpartition("/")[2] in only]
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
        kits = [each for each in built if each.name == "statelink-conformance"]
        for core, kit in ((each, kits[0]) for each in built if each.name == "statelink"):
            for interpreter, dependencies in tried:
                suite(core, kit, tree, folder, interpreter, dependencies)
                said = {"tested": core.name, "python": interpreter, "dependencies": dependencies}
                print(json.dumps({**said, "without": needing_torch(tree)}), flush=True)
        for alone in built:
            install([alone], folder / "dist", folder / "venv")
            print(json.dumps({"installed": [alone.name]}), flush=True)
        install(built, folder / "dist", folder / "venv")
        print(json.dumps({"installed": [each.name for each in built]}), flush=True)


if __name__ == "__main__":
    main()
