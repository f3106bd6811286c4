"""Stands in for ``memfabric_hybrid`` 1.3.0 on machines without an NPU: its TransferEngine and what belongs to it.

Names, signatures, order of checks, return codes, texts and delays are those of the library, where they are known;
bytes really move, from process to process, and the target's Python takes no part in it. Nothing finds this package
unless its folder is put on ``PYTHONPATH``. Long waits are short here; `_settings` lists what tests can set. Not here:
``bm``, ``shm`` and ``offload``, which no transfer needs.
"""

from __future__ import annotations

from . import _settings
from ._engine import TransferEngine
from ._errors import get_and_clear_last_err_msg, get_last_err_msg
from ._native import (
    TransDataOpType,
    TransferOpcode,
    create_config_store,
    set_conf_store_tls,
    set_extern_logger,
    set_log_level,
)

__all__ = [
    "TransDataOpType",
    "TransferEngine",
    "TransferOpcode",
    "create_config_store",
    "get_and_clear_last_err_msg",
    "get_last_err_msg",
    "set_conf_store_tls",
    "set_extern_logger",
    "set_log_level",
]

for _kind in (TransDataOpType, TransferOpcode):
    setattr(TransferEngine, _kind.__name__, _kind)  # the bindings put them there

for _name in _settings.lacks():
    for _owner in (TransferEngine, TransDataOpType):
        if hasattr(_owner, _name):
            delattr(_owner, _name)
