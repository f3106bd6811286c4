"""Registration in real processes, as SGLang does it in each of its own."""

from __future__ import annotations

import re

import pytest
from support.fresh import seen_by

SEEN = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES as choices
from sglang.srt.disaggregation import utils
seen = {
    "choice": "statelink" in choices,
    "members": [member.value for member in utils.TransferBackend],
    "backend": any(name.startswith(("statelink_nixl", "statelink_mooncake", "statelink.tcp.")) for name in sys.modules),
    "queues": "sglang.srt.disaggregation.prefill" in sys.modules,
}
"""

CLASSES = """
backend = utils.TransferBackend("statelink")
kinds = [kind for kind in utils.KVClassType]
found = [utils.get_kv_class(backend, kind) for kind in kinds]
from statelink_sglang import backend as ours
from sglang.srt.disaggregation.base.conn import KVArgs
seen["classes"] = found == [KVArgs, ours.Manager, ours.Sender, ours.Receiver, ours.BootstrapServer]
seen["fake"] = utils.get_kv_class(utils.TransferBackend.FAKE, utils.KVClassType.SENDER).__name__
"""

QUEUES = """
from sglang.srt.disaggregation import decode, prefill
from sglang.srt.managers.data_parallel_controller import DataParallelController
seen["hooked"] = [
    hasattr(method, "__wrapped__")
    for method in (
        prefill.PrefillBootstrapQueue._init_kv_manager,
        prefill.PrefillBootstrapQueue.add,
        prefill.PrefillBootstrapQueue.create_sender,
        decode.DecodePreallocQueue.add,
        decode.DecodePreallocQueue._init_kv_manager,
        decode.DecodePreallocQueue._create_receiver_and_enqueue,
        DataParallelController.follow_bootstrap_room_scheduler,
    )
]
seen["same"] = prefill.TransferBackend is utils.TransferBackend is decode.TransferBackend
"""


def test_a_process_without_a_scheduler_learns_the_name_and_imports_neither_a_backend_nor_the_queues() -> None:
    seen, _ = seen_by(SEEN)
    assert seen["choice"]
    assert seen["members"] == ["mooncake", "mori", "nixl", "ascend", "fake", "statelink"]
    assert not seen["backend"]
    assert not seen["queues"]


@pytest.mark.smoke
def test_a_scheduler_gets_the_classes_and_the_hooks() -> None:
    imports = "import sglang.srt.managers.scheduler, sglang.srt.managers.data_parallel_controller"
    seen, _ = seen_by(imports, SEEN, CLASSES, QUEUES)
    assert seen["classes"] is True
    assert seen["fake"] == "FakeKVSender"
    assert seen["hooked"] == [True] * 7
    assert seen["same"]


OTHER = """
from importlib import metadata
found = metadata.version
metadata.version = lambda name: "0.5.99" if name == "sglang" else found(name)
"""
EXPECTED = "SGLang 0.5.21, 0.5.22 or 0.5.23 is expected; 0.5.99 is installed"


@pytest.mark.smoke
def test_a_release_that_is_not_known_is_refused() -> None:
    seen, logged = seen_by(OTHER, SEEN)
    assert not seen["choice"]
    assert EXPECTED in logged
    assert "'version' in 'allow'" in logged


@pytest.mark.smoke
def test_a_release_that_is_not_known_can_be_tried_if_all_that_is_needed_is_there() -> None:
    allowed = """import os; os.environ["STATELINK_SGLANG_CONFIG"] = '{"sglang": {"allow": ["version"]}}'"""
    seen, logged = seen_by(OTHER, allowed, SEEN)
    assert seen["choice"]
    assert f"this SGLang was not tested with Statelink, and 'allow' has 'version': {EXPECTED}" in logged


@pytest.mark.smoke
def test_an_sglang_that_lacks_something_is_not_tried_whatever_is_allowed() -> None:
    allowed = """import os; os.environ["STATELINK_SGLANG_CONFIG"] = '{"sglang": {"allow": ["version"]}}'"""
    lacks = "from sglang.srt.disaggregation.base import conn\ndel conn.BaseKVSender.clear"
    seen, logged = seen_by(OTHER, allowed, lacks, SEEN)
    assert not seen["choice"]
    assert re.search(r"BaseKVSender lacks the methods [^;]*\bclear\b", logged), logged
    assert "'version' in 'allow'" not in logged


@pytest.mark.smoke
def test_another_sglang_is_refused_with_what_differs_and_the_name_stays_unknown() -> None:
    seen, logged = seen_by("from sglang.srt.disaggregation.base import conn\ndel conn.BaseKVSender.clear", SEEN)
    assert not seen["choice"]
    assert "statelink" not in str(seen["members"])
    assert "statelink is not registered as a transfer backend of SGLang" in logged
    assert "BaseKVSender lacks the methods clear" in logged


def test_a_method_that_cannot_be_hooked_is_named_and_the_name_stays_unknown() -> None:
    seen, logged = seen_by(
        "import sglang.srt.managers.scheduler",
        "from sglang.srt.disaggregation.decode import DecodePreallocQueue\ndel DecodePreallocQueue._init_kv_manager",
        SEEN,
    )
    assert not seen["choice"]
    assert "DecodePreallocQueue._init_kv_manager is missing" in logged
