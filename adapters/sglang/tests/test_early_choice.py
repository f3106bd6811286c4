"""The name ``statelink`` in a program that parses SGLang's options before it loads SGLang's plugins, as Dynamo does."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from support.fresh import seen_by

if TYPE_CHECKING:
    from pathlib import Path

PARSED = """
import argparse
from sglang.srt.server_args import ServerArgs
from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES as choices
from sglang.srt.platforms import current_platform
import sglang.srt.plugins as plugins
parser = argparse.ArgumentParser(exit_on_error=False)
ServerArgs.add_cli_args(parser)
def parsed(name):
    try:
        found = parser.parse_args(["--model-path", "m", "--disaggregation-transfer-backend", name])
        return found.disaggregation_transfer_backend
    except argparse.ArgumentError as error:
        return str(error)
seen = {"platform": type(current_platform).__name__}
"""

ASKED = """
seen["nixl"], seen["loaded for nixl"] = parsed("nixl"), plugins._plugins_loaded
seen["statelink"], seen["loaded for statelink"] = parsed("statelink"), plugins._plugins_loaded
seen["unknown"] = parsed("statelinks")
from sglang.srt.disaggregation.utils import TransferBackend
seen["members"] = [member.value for member in TransferBackend]
"""

OTHER = """
from sglang.srt.platforms.cpu import CpuSRTPlatform
class Other(CpuSRTPlatform):
    pass
def activate():
    return "other_platform.Other"
"""


def other_platform(folder: Path) -> str:
    """A path with an installed distribution that brings a platform named ``other``."""
    made = folder / "other_platform-1.dist-info"
    made.mkdir()
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: other-platform\nVersion: 1\n")
    (made / "entry_points.txt").write_text("[sglang.srt.platforms]\nother = other_platform:activate\n")
    (folder / "other_platform.py").write_text(OTHER)
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))


@pytest.mark.smoke
def test_the_name_is_taken_and_plugins_are_loaded_for_no_other_name() -> None:
    seen, logged = seen_by(PARSED, ASKED)
    assert seen["platform"] == "CpuSRTPlatform"
    assert (seen["nixl"], seen["loaded for nixl"]) == ("nixl", False)
    assert (seen["statelink"], seen["loaded for statelink"]) == ("statelink", True)
    assert "invalid choice: 'statelinks'" in str(seen["unknown"])
    assert "statelink" in seen["members"]
    assert "statelink" not in logged


def test_sglang_without_such_a_list_is_named_and_goes_on() -> None:
    lacks = "from sglang.srt.arg_groups import choices\nmade = choices.DISAGG_TRANSFER_BACKEND_CHOICES\n"
    asked = "from statelink_sglang import offer\nseen = {'offered': offer()}"
    seen, logged = seen_by(lacks + "del choices.DISAGG_TRANSFER_BACKEND_CHOICES", asked)
    assert seen == {"offered": None}
    assert "DISAGG_TRANSFER_BACKEND_CHOICES" in logged
    assert "hint: install the SGLang" in logged


def test_plugins_that_are_left_out_stay_out() -> None:
    seen, _ = seen_by(PARSED, ASKED, SGLANG_PLUGINS="another")
    assert "invalid choice: 'statelink'" in str(seen["statelink"])
    seen, _ = seen_by(PARSED, ASKED, SGLANG_PLUGINS="another, statelink")
    assert seen["statelink"] == "statelink"


def test_a_platform_beside_it_is_the_platform(tmp_path: Path) -> None:
    seen, _ = seen_by(PARSED, ASKED, PYTHONPATH=other_platform(tmp_path))
    assert (seen["platform"], seen["statelink"]) == ("Other", "statelink")


def test_a_platform_that_is_chosen_by_its_name_leaves_statelink_out(tmp_path: Path) -> None:
    """SGLang then loads nothing of other distributions that are listed among platforms."""
    seen, _ = seen_by(PARSED, ASKED, PYTHONPATH=other_platform(tmp_path), SGLANG_PLATFORM="other")
    assert seen["platform"] == "Other"
    assert "invalid choice: 'statelink'" in str(seen["statelink"])


def test_statelink_is_no_platform() -> None:
    failed = "try:\n    from sglang.srt.platforms import current_platform\nexcept RuntimeError as error:\n    "
    seen, _ = seen_by(f"{failed}seen = {{'error': str(error)}}", SGLANG_PLATFORM="statelink")
    assert "'statelink' is installed but activate() returned None" in str(seen["error"])
