"""The smaller wheel of NIXL: it has what its UCX needs, and lists what it has."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import shutil
import subprocess
import zipfile
from typing import TYPE_CHECKING

import pytest
from tools.gpu_wheels import slim

if TYPE_CHECKING:
    from pathlib import Path

INFO = "nixl_cu13-1.0.dist-info"
STAYS = (
    "nixl_cu13/_api.py",
    "nixl_cu13/_bindings.so",
    "nixl_cu13.libs/libone.so.1",
    "nixl_cu13.libs/libtwo.so",
    "nixl_cu13.libs/ucx/libuct_cuda.so.0.0.0",
    "nixl_cu13.libs/nixl/libplugin_UCX.so",
    f"{INFO}/METADATA",
)
GOES = (
    "nixl_cu13.libs/libstore.so",
    "nixl_cu13.libs/nixl/libplugin_OBJ.so",
    "nixl_cu13.libs/ucx/libuct_cuda.la",
    "nixl_cu13.libs/ucx/libucx_perftest.so.0",
    "nixl_ep_cu13/kernels.so",
    "nixl_cu13-1.0.data/scripts/tool",
)
NEEDS = {
    "nixl_cu13/_bindings.so": ["libone.so.1"],
    "nixl_cu13.libs/libone.so.1": ["libtwo.so"],
    "nixl_cu13.libs/nixl/libplugin_OBJ.so": ["libstore.so"],
}


def library(folder: Path, name: str) -> bytes:
    """A library that needs others, which need not be there."""
    source = folder / "empty.c"
    source.write_text("")
    (folder / "libs").mkdir(exist_ok=True)
    needed = [folder / "libs" / each for each in NEEDS.get(name, ())]
    for each in needed:
        command = ["cc", "-shared", "-nostdlib", f"-Wl,-soname,{each.name}", "-o", str(each), str(source)]
        subprocess.run(command, check=True)
    made = folder / "made.so"
    command = ["cc", "-shared", "-nostdlib", "-Wl,--no-as-needed", "-o", str(made), str(source), *map(str, needed)]
    subprocess.run(command, check=True)
    return made.read_bytes()


@pytest.mark.skipif(not shutil.which("cc") or not shutil.which("readelf"), reason="no compiler, or no readelf, here")
def test_the_smaller_wheel_has_what_ucx_needs(tmp_path: Path) -> None:
    whole = tmp_path / "nixl_cu13-1.0-cp312-cp312-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(whole, "w") as archive:
        for name in (*STAYS, *GOES):
            is_library = re.search(r"\.so(\.|$)", name)
            archive.writestr(name, library(tmp_path, name) if is_library else name)
        archive.writestr(f"{INFO}/RECORD", "")
    (tmp_path / "slim").mkdir()
    made = slim(whole, tmp_path / "slim")
    assert made.name == "nixl_cu13-1.0-1ucx-cp312-cp312-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(made) as archive:
        assert set(archive.namelist()) == {*STAYS, f"{INFO}/RECORD"}
        rows = list(csv.reader(io.StringIO(archive.read(f"{INFO}/RECORD").decode())))
        for name, digest, size in rows[:-1]:
            content = archive.read(name)
            assert int(size) == len(content)
            found = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            assert digest == f"sha256={found}"
        assert {row[0] for row in rows} == set(archive.namelist())
