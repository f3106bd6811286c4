"""Backends that are wrong, each in one way, and otherwise the embedded one."""

from __future__ import annotations

from ._answers import (
    CannotStartAlone,
    ClosesOnce,
    Crashes,
    ForgetsLine,
    ForgetsPeers,
    HidesFence,
    NeedsAnObject,
    RaisesInDiagnosis,
    RaisesInProbe,
    TakesAnyKind,
    TakesGarbage,
)
from ._base import Ungranted
from ._bytes import DropsLast, Early, ForgetsOffset, OneRoom, ReturnsNothing, Sends, TakesReads, TooFar, Unchecked
from ._ends import EndsPolled, Hangs, SettledByDisconnect, SettledByTimeout, Silent, Swallows, Unsettled, Waiting
from ._grants import AnyRoom, GrantsAll, KeepsGrants, Late, LateWhenStopped, ReplacesGrants, RevokesLast
from ._leaks import LeaksFiles, LeaksMemory, LeaksShared, LeaksThreads

__all__ = [
    "AnyRoom",
    "CannotStartAlone",
    "ClosesOnce",
    "Crashes",
    "DropsLast",
    "Early",
    "EndsPolled",
    "ForgetsLine",
    "ForgetsOffset",
    "ForgetsPeers",
    "GrantsAll",
    "Hangs",
    "HidesFence",
    "KeepsGrants",
    "Late",
    "LateWhenStopped",
    "LeaksFiles",
    "LeaksMemory",
    "LeaksShared",
    "LeaksThreads",
    "NeedsAnObject",
    "OneRoom",
    "RaisesInDiagnosis",
    "RaisesInProbe",
    "ReplacesGrants",
    "ReturnsNothing",
    "RevokesLast",
    "Sends",
    "SettledByDisconnect",
    "SettledByTimeout",
    "Silent",
    "Swallows",
    "TakesAnyKind",
    "TakesGarbage",
    "TakesReads",
    "TooFar",
    "Unchecked",
    "Ungranted",
    "Unsettled",
    "Waiting",
]
