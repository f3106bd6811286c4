"""Every pool class of the installed SGLang is made by the tests, or is named with the reason why not."""

from __future__ import annotations

import pytest
from support.newest import OLDER, WHY
from support.pool_classes import NOT_MADE, existing, made
from support.pools import KINDS, listed, make_mha

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("sglang_context")]


@pytest.mark.skipif(OLDER, reason=WHY)
def test_every_pool_class_is_made_or_named_with_a_reason() -> None:
    makes = set[str]().union(*map(made, KINDS))
    exist = existing()
    assert exist - makes - NOT_MADE.keys() == set(), "SGLang has these classes, which are not known"
    assert NOT_MADE.keys() - exist == set(), "SGLang does not have these classes"
    assert makes & NOT_MADE.keys() == set(), "these classes are made"
    assert makes <= exist


def test_a_class_is_found_by_its_name_and_by_what_it_inherits() -> None:
    assert {"MambaCheckpointPool", "MHATokenToKVPoolFP4", "QSATokenToKVPool", "MambaPool"} <= existing()


@pytest.mark.parametrize("name", ["NoOpMHATokenToKVPool", "MHATokenToKVPoolFP4"])
def test_sglang_cannot_list_the_buffers_of_some_classes(name: str) -> None:
    with pytest.raises(AttributeError, match="_kv_buffer_descs"):
        listed(_make(name), None, 2, heads=4)


def test_sglang_cannot_make_one_class() -> None:
    with pytest.raises(NotImplementedError, match="views were removed"):
        _make("PageMajorMHATokenToKVPool")


def _make(name: str) -> object:
    return make_mha(name, 4, 16, "bfloat16", head=32)
