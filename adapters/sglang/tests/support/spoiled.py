"""What can be wrong with `KVArgs`, SGLang's list of buffers."""

from __future__ import annotations

import enum
from typing import Any


class Fresh(str, enum.Enum):
    """A state type that SGLang may add one day."""

    STATE = "fresh_state"


def fresh_state(args: Any) -> None:
    """One more state type, with buffers and indices that are as good as any."""
    args.state_types.append(Fresh.STATE)
    for name in ("data_ptrs", "data_lens", "item_lens"):
        listed, pages = getattr(args, f"state_{name}"), getattr(args, f"kv_{name}")
        listed.append(list(pages[:2]))


def fewer_buffers(args: Any) -> None:
    """The second half of the pages' buffers is not listed."""
    for name in ("kv_data_ptrs", "kv_data_lens", "kv_item_lens"):
        listed = getattr(args, name)
        del listed[len(listed) // 2 :]


def wider_slots(args: Any) -> None:
    """Recurrent slots lie further apart than the pool says."""
    args.state_item_lens[0] = [each + 512 for each in args.state_item_lens[0]]
