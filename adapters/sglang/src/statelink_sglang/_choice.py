"""Lets a program that parses SGLang's options before it loads SGLang's plugins take the name ``statelink``.

SGLang's own launcher loads plugins first. NVIDIA Dynamo parses first, and would refuse the name. Still earlier, when
its first modules are imported, SGLang asks for plugins that bring a platform. `offer` is one of them, through the entry
point ``statelink`` in the group ``sglang.srt.platforms``, and brings none.

So early, nobody can find out whether the adapter works with the installed SGLang, because most of SGLang's modules are
not imported yet. So the name is not added then, but when somebody asks whether it is a choice.
"""

from __future__ import annotations

import logging
from collections import UserList

from ._register import NAME

__all__ = ["offer"]

log = logging.getLogger("statelink.sglang")


def offer() -> None:
    """Have SGLang load its plugins when its options are parsed and name ``statelink``. Never raises.

    Returns nothing, by which SGLang knows that this is no platform.
    """
    try:
        from sglang.srt.arg_groups import choices

        choices.DISAGG_TRANSFER_BACKEND_CHOICES = Choices(choices.DISAGG_TRANSFER_BACKEND_CHOICES)
    except Exception as error:
        log.warning(
            "only a program that loads SGLang's plugins before it parses options will take the transfer backend "
            "statelink: %s: %s\nhint: install the SGLang that statelink-sglang was tested with",
            type(error).__name__,
            error,
        )


class Choices(UserList[str]):
    """The names of SGLang's transfer backends. To be asked for ``statelink`` makes it load SGLang's plugins.

    One of them is `statelink_sglang.register`, which adds the name, or logs why it does not.

    Args:
        names: SGLang's own list, which others may extend.
    """

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.data = names

    def __contains__(self, name: object) -> bool:
        if name == NAME and NAME not in self.data:
            from sglang.srt.plugins import load_plugins

            load_plugins()  # what is loaded already is not loaded again
        return name in self.data
