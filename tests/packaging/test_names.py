"""The check that no name stands for two things."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tools.names import faults

if TYPE_CHECKING:
    from pathlib import Path

ONE = '''
WAIT_SECONDS = 0.5
"""Seconds between two looks."""
MOST = 4
KIND = "x"


class Room:
    pass
'''


def package(folder: Path, **modules: str) -> Path:
    """A package with a subsystem ``link`` and a subsystem ``wire``."""
    for name, text in modules.items():
        path = folder / "made" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "made"


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ("class Room:\n    pass\n", "a class 'Room' is also at "),
        ("MOST = 8\n", "MOST is 8, and 4 at "),
        ('LATE = 1.0\n"""Seconds by which it is late."""\n', "LATE is a time, and its name does not end with SECONDS"),
        ('LATE: int = 9\n"""Milliseconds of rest."""\n', "LATE is a time, and its name does not end with MS"),
    ],
)
def test_a_fault_is_named_with_its_place(tmp_path: Path, added: str, said: str) -> None:
    (line,) = faults(package(tmp_path, link___one=ONE, link__deep___two=added))
    assert line.startswith(f"{tmp_path}/made/link/deep/_two.py:1: {said}")


def test_subsystems_are_apart_and_equal_numbers_are_no_fault(tmp_path: Path) -> None:
    made = package(
        tmp_path,
        link___one=ONE,
        link___two="MOST = 4\nKIND = 'y'\n",
        wire___one="MOST = 9\n\n\nclass Room:\n    pass\n",
    )
    assert list(faults(made)) == []
