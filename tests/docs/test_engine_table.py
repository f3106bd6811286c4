"""The table of what the tests with an engine found says each test, its outcome and its time."""

from __future__ import annotations

from tools.engine_table import render


def test_every_test_has_a_row_under_its_file() -> None:
    report = {
        "python": "3.11.2",
        "cores": 2,
        "versions": {"sglang": "0.5.23", "nixl": "none"},
        "seconds": 119.0,
        "files": {"tests/test_pools.py": "Real pools.", "tests/test_empty.py": "Nothing was run."},
        "tests": [
            {
                "file": "tests/test_pools.py",
                "name": "test_each_pool[mha|x]",
                "outcome": "passed",
                "seconds": 1.26,
                "why": "",
            },
            {
                "file": "tests/test_pools.py",
                "name": "test_more",
                "outcome": "skipped",
                "seconds": 0.0,
                "why": "no root",
            },
        ],
    }
    text = render(report)
    assert "1 passed, 1 skipped, in 2 minutes on 2 cores, with Python 3.11.2, sglang 0.5.23." in text
    assert "## `test_pools.py`\n\nReal pools. 1 s.\n" in text
    assert "| each pool: `mha/x` | passed | 1.3 |" in text
    assert "| more | skipped: no root | 0.0 |" in text
    assert "test_empty" not in text
