"""Makes a folder of wheels for a machine with a graphics card and without a network.

    python -m tools.gpu_wheels FOLDER [--python 3.12]

The folder gets this tree's core and its plugin for NIXL, NIXL's build for CUDA 13, and everything that these need but
numpy, torch and pytest, which such a machine has. There, `pip install --no-index --no-deps --target SITE FOLDER/*.whl`
installs them. NIXL's wheel is made smaller: of its libraries it keeps those that its UCX needs. Needs pip's network
here, and `readelf`.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
OURS = ("core", "plugins/nixl")
BUILD = "nixl-cu13"
NEEDED = (
    "cffi",
    "click",
    "cryptography",
    "hypothesis",
    "markdown-it-py",
    "mdurl",
    "msgspec",
    "nixl",
    "pluggy",
    "pycparser",
    "pygments",
    "pytest-timeout",
    "pyzmq",
    "rich",
    "sortedcontainers",
    "xxhash",
)
"""What the core, its kit and its tests need, without what the machine has. `constraints.txt` pins them."""
GLIBC = ("2_5", "2_12", "2_17", "2_24", "2_26", "2_27", "2_28", "2_31", "2_34")
"""The machine's is newer than each of these. pip matches the tags of wheels exactly."""

STARTS = re.compile(r"nixl_cu13/[^/]+\.so|.*/libplugin_UCX\.so|nixl_cu13\.libs/ucx/libu(ct|cm)_[^/]+\.so[.0-9]*")
"""The libraries that something loads by name: NIXL's bindings, its plugin for UCX, and UCX's modules."""
LEFT_OUT = re.compile(r"nixl_ep_cu13/|nixl_cu13\.scripts/|nixl_cu13-[^/]+\.data/|.*\.la$")
"""Other programs of the wheel."""


def download(python: str, folder: Path) -> None:
    """Fetch NIXL's build and what else is needed, as wheels for another interpreter."""
    platforms = [f"--platform=manylinux_{each}_x86_64" for each in GLIBC]
    platforms += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    pip += ["--no-deps", "--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms]
    version = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("nixl=="))
    run([*pip, "-c", "constraints.txt", "-d", str(folder), *NEEDED, f"{BUILD}{version.removeprefix('nixl')}"])


def needs(library: bytes) -> list[str]:
    """Names of the shared libraries that one asks for."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(library)
        file.flush()
        said = subprocess.run(["readelf", "-d", file.name], capture_output=True, text=True, check=True).stdout
    return re.findall(r"\(NEEDED\).*\[(.+)\]", said)


def kept(files: Mapping[str, bytes]) -> set[str]:
    """The libraries among a wheel's files that its UCX needs, and all that is no library."""
    libraries = {name for name in files if re.search(r"\.so(\.|$)", name)}
    by_name: dict[str, list[str]] = {}
    for name in libraries:
        by_name.setdefault(PurePosixPath(name).name, []).append(name)
    left, found = [name for name in libraries if STARTS.fullmatch(name)], set[str]()
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += [each for wanted in needs(files[name]) for each in by_name.get(wanted, ())]
    return found | (files.keys() - libraries)


def slim(wheel: Path, folder: Path) -> Path:
    """Write a smaller wheel of the same version. The build tag in its name says so."""
    with zipfile.ZipFile(wheel) as archive:
        modes = {each.filename: each.external_attr for each in archive.infolist() if not each.is_dir()}
        files = {name: archive.read(name) for name in modes if not LEFT_OUT.match(name)}
    (record,) = (name for name in files if name.endswith(".dist-info/RECORD"))
    stay = sorted(kept(files) - {record})
    name, version, *tags = wheel.name.split("-")
    smaller = folder / "-".join([name, version, "1ucx", *tags])
    with zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for each in [*stay, record]:
            entry = zipfile.ZipInfo(each)
            entry.external_attr, entry.compress_type = modes[each], zipfile.ZIP_DEFLATED
            archive.writestr(
                entry, recorded(record, {each: files[each] for each in stay}) if each == record else files[each]
            )
    return smaller


def recorded(record: str, files: Mapping[str, bytes]) -> str:
    """The content of a wheel's RECORD."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.writerow([name, f"sha256={digest}", len(content)])
    rows.writerow([record, "", ""])
    return text.getvalue()


def run(command: Iterable[str], folder: Path = ROOT) -> None:
    """Run a command; an error ends this one."""
    subprocess.run(list(command), cwd=folder, check=True)


def main() -> None:
    """Parse arguments, and make the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="the version of the machine's interpreter")
    arguments = parser.parse_args()
    folder: Path = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    with tempfile.TemporaryDirectory() as temporary:
        fetched = Path(temporary)
        download(arguments.python, fetched)
        for wheel in sorted(fetched.glob("*.whl")):
            if wheel.name.startswith(BUILD.replace("-", "_")):
                slim(wheel, folder)
            else:
                (folder / wheel.name).write_bytes(wheel.read_bytes())
    for place in OURS:
        run([sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)], ROOT / place)
    sizes = {wheel.name: wheel.stat().st_size for wheel in folder.glob("*.whl")}
    for name, size in sorted(sizes.items(), key=lambda each: each[1]):
        print(f"{size / 2**20:6.2f} MiB  {name}")
    print(f"{sum(sizes.values()) / 2**20:6.2f} MiB  in all")


if __name__ == "__main__":
    main()
