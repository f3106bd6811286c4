"""What SGLang calls first: makes ``statelink`` a name that `--disaggregation-transfer-backend` accepts."""

from __future__ import annotations

import enum
import logging
from typing import Any

from statelink.errors import StatelinkError

from . import _arguments, _routing, _samples
from ._options import allows
from ._seam import CONTROLLER, DETOKENIZER, SCHEDULER, SEAM, TOKENIZER, loaded

__all__ = ["NAME", "register"]

log = logging.getLogger("statelink.sglang")

NAME = "statelink"
UTILS = "sglang.srt.disaggregation.utils"


def register() -> None:
    """Register the backend, unless the adapter does not work with the installed SGLang. Never raises.

    SGLang logs what a plugin raises, and goes on. It would then refuse the name ``statelink`` without a word about the
    reason. So the reasons are logged here as an error, and the name stays unknown.
    """
    try:
        for each in SEAM.check(allowed=allows("version")):
            log.warning("this SGLang was not tested with Statelink, and 'allow' has 'version': %s", each)
        _register()
    except StatelinkError as error:
        log.error("statelink is not registered as a transfer backend of SGLang: %s", error)
    except Exception:
        log.exception("statelink is not registered as a transfer backend of SGLang")


def _register() -> None:
    from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES, add_disagg_transfer_backend_choices
    from sglang.srt.disaggregation import utils
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{UTILS}.TransferBackend", _with_statelink(utils.TransferBackend), HookType.REPLACE)
    HookRegistry.register(f"{UTILS}.get_kv_class", around_get_kv_class, HookType.AROUND)
    hooks: dict[str, Any] = dict(_arguments.AROUND)
    if loaded(SCHEDULER):  # naming a scheduler's module would import it; the other processes need none of this
        from . import _admission, _deferred, _hooks, _layers, _offering, _stages

        hooks.update(_hooks.AROUND)
        hooks.update(_admission.AROUND)
        hooks.update(_stages.AROUND)
        hooks.update(_deferred.AROUND)
        hooks.update(_layers.AROUND)
        hooks.update(_offering.AROUND)
    if loaded(CONTROLLER):
        hooks.update(_routing.AROUND)
    if loaded(TOKENIZER) or not any(map(loaded, (SCHEDULER, CONTROLLER, DETOKENIZER))):
        # The main process has not imported what takes requests yet, and will.
        hooks.update(_samples.AROUND)
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    if NAME not in DISAGG_TRANSFER_BACKEND_CHOICES:
        add_disagg_transfer_backend_choices([NAME])


def _with_statelink(members: type[enum.Enum]) -> type[enum.Enum]:
    """The same enumeration with one more member. An enumeration with members cannot be extended."""
    names = {member.name: member.value for member in members}
    larger = enum.Enum(members.__name__, {**names, NAME.upper(): NAME}, module=members.__module__)  # type: ignore[misc]
    larger.__qualname__ = members.__qualname__
    return larger


def around_get_kv_class(original: Any, transfer_backend: Any, class_type: Any) -> Any:
    """Answer for the backend ``statelink``; every backend shares one `KVArgs`, which SGLang itself hands out."""
    if transfer_backend.value != NAME or class_type.name == "KVARGS":
        return original(transfer_backend, class_type)
    if class_type.name == "BOOTSTRAP_SERVER":  # a process without a scheduler asks for it
        from ._server import BootstrapServer

        return BootstrapServer
    from . import backend

    return {"MANAGER": backend.Manager, "SENDER": backend.Sender, "RECEIVER": backend.Receiver}[class_type.name]
