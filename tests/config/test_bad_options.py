"""What somebody configures by mistake is refused in Statelink's own words, whatever it is."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from tests.helpers.bad_values import escaped

from statelink import LinkConfig
from statelink.config import Staging
from statelink.errors import ConfigError

BASE: dict[str, Any] = {"role": "decode", "backend": "tcp"}
KEYS = [field.name for field in msgspec.structs.fields(LinkConfig)]
TABLES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "staging": ({}, ("ring_bytes", "parcel_bytes", "mode", "components")),
}


@pytest.mark.parametrize("key", KEYS)
def test_no_value_makes_a_configuration_fail_in_other_words_than_statelinks(key: str) -> None:
    assert not escaped(lambda value: LinkConfig.read({**BASE, key: value}))


@pytest.mark.parametrize("table", TABLES)
def test_no_value_in_a_table_does(table: str) -> None:
    beside, keys = TABLES[table]
    for key in keys:
        assert not escaped(lambda value, key=key: LinkConfig.read({**BASE, **beside, table: {key: value}}))  # type: ignore[misc]


@pytest.mark.parametrize("made", [LinkConfig, Staging])
def test_no_value_makes_a_constructor_fail_in_other_words(made: Any) -> None:
    base = BASE if made is LinkConfig else {}
    made(**base)
    for field in msgspec.structs.fields(made):
        assert not escaped(lambda value, key=field.name: made(**{**base, key: value}))  # type: ignore[misc]


def test_a_constructor_checks_and_converts_as_reading_does() -> None:
    given: dict[str, Any] = {**BASE, "threads": np.int64(3), "peers": {"p": ["tcp://127.0.0.1:1"]}, "staging": {}}
    assert LinkConfig(**given) == LinkConfig.read(given)
    said = "bad value in the configuration of a link: staging.ring_bytes: a whole number is expected, got 'x'"
    for make in (LinkConfig.read, lambda wrong: LinkConfig(**wrong)):
        with pytest.raises(ConfigError, match=said) as caught:
            make({**BASE, "staging": {"ring_bytes": "x"}})
        assert caught.value.code == "config.type"


def test_a_secret_that_cannot_be_sent_is_not_shown() -> None:
    with pytest.raises(ConfigError, match="'secret' has a character that cannot be sent") as caught:
        LinkConfig.read({**BASE, "keys": {"secret": "abc\udc80"}})
    assert "abc" not in str(caught.value)


def test_nothing_in_place_of_a_configuration_does() -> None:
    assert not escaped(LinkConfig.read)


def test_numbers_of_numpy_are_numbers() -> None:
    read = LinkConfig.read({**BASE, "threads": np.int64(3), "deadline": np.float32(2), "insecure": np.True_})
    assert (read.threads, read.deadline, read.insecure) == (3, 2.0, True)
