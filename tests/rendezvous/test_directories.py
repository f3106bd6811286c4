"""The class of a directory is found by the scheme of the address, and what cannot be it is refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.helpers.links import PREFILL, client, keys

from statelink import LinkConfig
from statelink.errors import ConfigError
from statelink.hints import install_hint
from statelink.rendezvous import list_instances

if TYPE_CHECKING:
    from tests.registry.sites import Site

GOOD = """
from statelink.rendezvous import Directory, Instance

class Made(Directory):
    takes_keys = {takes}

    def __init__(self, config, *, link): ...

    @classmethod
    def check(cls, config): ...

    @classmethod
    def instances(cls, config):
        return [Instance(str(config.keys is not None), 0, ())]

    def register(self, instance, rank, ranks, address): ...
    def resolve(self, instance): ...
    def explain(self, instance): return "", ""
    def close(self): ...
"""


def brings(site: Site, name: str, source: str, scheme: str = "acme") -> None:
    site.package(f"statelink-{name}", statelink_directories={scheme: f"statelink_{name}:Made"})
    site.module(f"statelink_{name}", source)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise OSError('no such device')", "does not load: OSError: no such device"),
        ("raise SystemExit(3)", "does not load: SystemExit: 3"),
        ("Made = 5", "cannot be used: 5 is no Directory"),
        ("class Made: ...", "is no Directory"),
        (GOOD.replace("def close", "def shut").format(takes=False), "cannot be used: it lacks close"),
    ],
)
def test_what_cannot_be_a_directory(site: Site, source: str, said: str) -> None:
    brings(site, "good", source)
    with pytest.raises(ConfigError) as refused:
        client("acme://host", "link")
    assert refused.value.code == "rendezvous.unknown"
    assert said in str(refused.value)


def test_two_packages_of_one_scheme(site: Site) -> None:
    for name in ("good", "twin"):
        brings(site, name, GOOD.format(takes=False))
    with pytest.raises(ConfigError, match="'acme' is ambiguous"):
        client("acme://host", "link")


def test_what_is_not_installed_says_which_package_to_install(site: Site, bare_path: str) -> None:
    code = """
    from statelink import LinkConfig
    from statelink.errors import ConfigError
    from statelink.rendezvous import connecting
    for scheme in ("etcd", "etcds", "etdc", "http"):
        try:
            connecting(LinkConfig(role="decode", backend="tcp", rendezvous=f"{scheme}://a:1"), link="x", keys=None)
        except ConfigError as error:
            print(error.code, error.hint)
    """
    said = site.python(code, path=bare_path, flags=("-S",)).splitlines()
    to_install = f"rendezvous.unknown {install_hint('statelink-etcd')}"
    assert said == [to_install, to_install, "rendezvous.unknown did you mean 'etcd'?", "rendezvous.unknown "]


@pytest.mark.parametrize("takes", [True, False])
def test_keys_are_for_a_directory_that_takes_them(site: Site, takes: bool) -> None:
    brings(site, "good", GOOD.format(takes=takes))
    config = LinkConfig(role="decode", backend="tcp", rendezvous="acme://host")
    (told,) = list_instances(config, keys=keys(PREFILL, PREFILL))
    assert told.name == str(takes)
