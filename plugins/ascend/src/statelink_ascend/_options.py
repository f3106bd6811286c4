"""The options, with the library's own names."""

from __future__ import annotations

import re

import msgspec

__all__ = ["Options"]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the ``ascend`` backend.

    The library reads further settings from ``MF_*`` in the environment. With ``MF_LOG_LEVEL`` it logs to standard
    output.

    Attributes:
        data_op_type: A name in MemFabric's ``TransDataOpType``. ``HOST_RDMA`` moves host memory, the others an NPU's.
        device_id: The NPU, as it is numbered after ``ASCEND_RT_VISIBLE_DEVICES``.
        nic: For ``HOST_RDMA``, this host's RDMA address: ``tcp://ip:port``.
        connect_timeout: Seconds in which a peer has to answer when it is connected, and then to become visible. The
            library itself waits for two minutes.
    """

    data_op_type: str = "SDMA"
    device_id: int = 0
    nic: str = ""
    connect_timeout: float = 10.0

    def __post_init__(self) -> None:
        if not self.data_op_type.isidentifier():
            raise ValueError(f"`data_op_type` is SDMA, HOST_RDMA or another name of one, not {self.data_op_type!r}")
        if not 0 <= self.device_id < 1 << 16:
            raise ValueError(f"`device_id` is the number of an NPU, not {self.device_id}")
        if self.data_op_type == "HOST_RDMA" and not re.fullmatch(r"tcp://\S+:\d+", self.nic):
            raise ValueError(f"HOST_RDMA needs `nic`, as in tcp://192.0.2.1:10002, and got {self.nic!r}")
        if not self.connect_timeout > 0:
            raise ValueError(f"`connect_timeout` is above 0, not {self.connect_timeout}")

    @property
    def transport(self) -> str:
        """The transport, with the names that other backends use: HOST_RDMA and DEVICE_RDMA are both ``rdma``."""
        return self.data_op_type.rpartition("_")[2].lower()
