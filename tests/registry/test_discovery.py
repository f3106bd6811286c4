"""Listing, picking one by name, and each way in which that can fail."""

from __future__ import annotations

import logging
import re
import sys

import pytest

import statelink
from statelink.backend import Backend
from statelink.errors import (
    BackendError,
    BackendIncompatibleError,
    BackendLoadError,
    StatelinkError,
    UnknownBackendError,
)
from statelink.registry import Listed, list_backends, load_backend

from .sites import BACKEND, Site


def names() -> list[str]:
    return [each.name for each in list_backends()]


def failure(name: str, kind: type[StatelinkError]) -> StatelinkError:
    with pytest.raises(BackendError) as caught:
        load_backend(name)
    assert type(caught.value) is kind
    return caught.value


def test_a_good_backend_is_listed_and_loaded(site: Site) -> None:
    site.backend("good")
    listed = {each.name: each for each in list_backends()}
    assert listed["good"] == Listed("good", "statelink_good:Made", "statelink-good", "0.1")
    assert str(listed["good"]) == "statelink-good 0.1, statelink_good:Made"
    assert "statelink_good" not in sys.modules
    loaded = load_backend("good")
    assert issubclass(loaded, Backend)
    assert loaded.__module__ == "statelink_good"
    assert load_backend("good") is loaded
    assert statelink.list_backends is list_backends


def test_the_embedded_backend_is_found_like_any_other(site: Site) -> None:
    (tcp,) = [each for each in list_backends() if each.name == "tcp"]
    assert (tcp.value, tcp.distribution) == ("statelink.tcp:TcpBackend", "statelink")
    assert load_backend("tcp").name == "tcp"


def test_the_list_is_sorted_and_comes_anew_each_time(site: Site) -> None:
    assert names() == ["tcp"]
    for name in ("other", "good", "mem"):
        site.backend(name)
    assert names() == ["good", "mem", "other", "tcp"]


def test_an_unknown_name_lists_what_is_installed_and_guesses(site: Site) -> None:
    for name in ("broken", "mem", "old"):
        site.backend(name, source="raise AssertionError('a listed backend was imported')")
    error = failure("mme", UnknownBackendError)
    assert str(error) == (
        "no backend named 'mme' in group 'statelink.backends' (installed: broken, mem, old, tcp)\n"
        "hint: did you mean 'mem'?"
    )
    assert error.code == "backend.unknown"
    assert isinstance(error, LookupError)


def test_a_name_like_no_other_gets_no_guess(site: Site) -> None:
    error = failure("zzzzzz", UnknownBackendError)
    assert error.hint == "see 'statelink backends'"
    assert "pip install" not in str(error)


def test_a_typo_of_a_known_name_is_guessed_although_it_is_not_installed(site: Site) -> None:
    assert failure("moooncake", UnknownBackendError).hint == "did you mean 'mooncake'?"


@pytest.mark.parametrize("name", ["nixl", "mooncake", "mori", "ascend"])
def test_a_known_backend_that_is_not_installed_says_what_to_install(site: Site, bare_path: str, name: str) -> None:
    site.backend("mem")
    code = f"""
    from statelink.errors import UnknownBackendError
    from statelink.registry import load_backend
    try:
        load_backend({name!r})
    except UnknownBackendError as error:
        print(error.code)
        print(error)
    """
    code, said, hint = site.python(code, path=bare_path, flags=("-S",)).splitlines()
    assert code == "backend.not_installed"
    assert said == f"no backend named {name!r} in group 'statelink.backends' (installed: mem, tcp)"
    command, note, said = hint.partition("; ")
    assert re.fullmatch(rf"hint: pip install (statelink-{name}|-e \S+/plugins/{name})", command)
    assert bool(note) is (name == "nixl"), said


def test_a_package_that_is_installed_but_not_allowed_is_not_to_be_installed_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.package("statelink-nixl", "99", statelink_backends={"nixl": "statelink_absent:Nixl"})
    monkeypatch.setenv("STATELINK_PLUGINS", "statelink-mem")
    error = failure("nixl", UnknownBackendError)
    assert error.hint == "add statelink-nixl to the environment variable STATELINK_PLUGINS"


def test_a_package_without_the_entry_point_that_its_name_promises_is_named(site: Site) -> None:
    site.package("statelink-ghost", statelink_backends={"goast": "statelink_absent:Ghost"})
    site.package("statelink-mute")
    said = "the package statelink-{} is installed, and has no entry point '{}' in that group"
    for name in ("ghost", "mute"):
        assert failure(name, UnknownBackendError).hint == said.format(name, name)


def test_an_import_that_fails_shows_the_real_cause(site: Site) -> None:
    site.backend("broken", source="import does_not_exist", value="statelink_broken:Nope")
    error = failure("broken", BackendLoadError)
    assert str(error) == (
        "backend 'broken' (statelink-broken 0.1, statelink_broken:Nope) failed to load: "
        "ModuleNotFoundError: No module named 'does_not_exist'"
    )
    assert error.code == "backend.load"
    assert isinstance(error.__cause__, ModuleNotFoundError)
    assert "pip install" not in str(error)


@pytest.mark.parametrize(
    ("source", "value", "cause"),
    [
        ("raise ImportError('libibverbs.so.1: cannot open')", "", "ImportError: libibverbs.so.1: cannot open"),
        ("raise OSError('[/dev/infiniband] is gone')", "", "OSError: [/dev/infiniband] is gone"),
        ("1 +", "", "SyntaxError: invalid syntax"),
        ("import sys; sys.exit(3)", "", "SystemExit: 3"),
        ("x = 1", "statelink_broken:Nope", "AttributeError: module 'statelink_broken' has no attribute 'Nope'"),
        ("x = 1", "no_such_module_at_all:X", "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
    ],
)
def test_whatever_an_import_does_is_one_kind_of_error(site: Site, source: str, value: str, cause: str) -> None:
    site.backend("broken", source=source, value=value)
    error = failure("broken", BackendLoadError)
    assert f"failed to load: {cause}" in str(error)


def test_an_entry_point_that_names_nothing_is_an_error_of_that_backend_alone(site: Site) -> None:
    site.backend("broken", value="not a module!")
    site.backend("good")
    failure("broken", BackendLoadError)
    assert load_backend("good").name == "good"


@pytest.mark.parametrize(
    ("name", "api", "text", "hint"),
    [
        ("old", 0, "was built for plugin API 0, this core speaks 1", "-U statelink-old"),
        (
            "new",
            2,
            "was built for plugin API 2, this core speaks 1",
            r"(-U statelink|-e \S+/core); if .* api_version = 1, .*",
        ),
    ],
)
def test_a_backend_of_another_plugin_api_says_which_side_is_older(
    site: Site, name: str, api: int, text: str, hint: str
) -> None:
    site.backend(name, api=api)
    error = failure(name, BackendIncompatibleError)
    said, given = str(error).splitlines()
    assert said == f"backend {name!r} (statelink-{name} 0.1, statelink_{name}:Made) {text}"
    assert re.fullmatch(f"hint: pip install {hint}", given)
    assert error.code == "backend.incompatible"


GOOD = BACKEND.format(cls="Made", api=1, name="odd")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("Made = 5", "is not a backend: it is 5, not a subclass of Backend"),
        ("def Made(context): ...", "is not a backend: it is <function Made at "),
        ("class Made: ...", "is not a backend: it is <class 'statelink_odd.Made'>, not a subclass of Backend"),
        (f"{GOOD}\nMade = Made(None)", "is not a backend: it is <statelink_odd.Made object at "),
        (
            GOOD.replace("api_version = 1", ""),
            "does not state its plugin API\nhint: add the class attribute api_version = 1",
        ),
        (GOOD.replace("api_version = 1", "api_version = '1'"), "does not state its plugin API"),
        (GOOD.replace("    def close(self): ...", ""), "is incomplete: it lacks close"),
        (
            GOOD.replace("depth: int = 1", "depth: int"),
            "has options without a default: depth\nhint: give each field of Options a default",
        ),
        (
            GOOD.replace("state_types=ANY", "max_transfers=0"),
            "failed to load: ValueError: max_transfers is at least 1, and not 0",
        ),
        (
            GOOD.replace("source=Fence.MOVER", "source=Fence.OWNER"),
            "failed to load: ValueError: source is Fence.OWNER: only a target has that fence",
        ),
        (
            GOOD.replace("    Options = Options", "").replace(
                "    def connect(self, peer, descriptor, regions): ...", ""
            ),
            "is incomplete: it lacks Options, connect",
        ),
        (GOOD.replace('    strategies = {"*": DIRECT}', ""), "is incomplete: it lacks strategies"),
        (GOOD.replace('{"*": DIRECT}', "DIRECT"), "has no table of strategies: strategies is <strategy direct>"),
        (GOOD.replace('{"*": DIRECT}', '{"*": "direct"}'), "has no table of strategies: strategies is {'*': 'direct'}"),
        (
            GOOD.replace('{"*": DIRECT}', '{"kv": DIRECT}'),
            "declares state types without a strategy: every type; strategies has kv",
        ),
        (GOOD.replace("Options = Options", "Options = dict"), "has no typed options\nhint: Options is a subclass of"),
        (
            GOOD.replace('name = "odd"', 'name = "even"'),
            "calls itself 'even'\nhint: entry-point name and Backend.name are one and the same",
        ),
    ],
)
def test_what_is_no_whole_backend_is_refused_when_it_is_picked(site: Site, source: str, text: str) -> None:
    site.backend("odd", source=source)
    error = failure("odd", BackendLoadError)
    assert str(error).startswith(f"backend 'odd' (statelink-odd 0.1, statelink_odd:Made) {text}")


def test_one_name_from_two_packages_is_listed_twice_and_refused(site: Site) -> None:
    site.backend("same")
    site.package("statelink-twin", "0.2", statelink_backends={"same": "statelink_twin:Made"})
    site.backend("good")
    assert names() == ["good", "same", "same", "tcp"]
    error = failure("same", BackendLoadError)
    assert error.code == "backend.conflict"
    assert str(error) == (
        "backend 'same' is brought by 2 packages: statelink-same 0.1, statelink_same:Made; "
        "statelink-twin 0.2, statelink_twin:Made\nhint: uninstall all but one of them"
    )
    assert "statelink_same" not in sys.modules
    assert load_backend("good").name == "good"


def test_the_name_of_one_that_is_built_in_is_not_free(site: Site) -> None:
    site.package("statelink-twin", "0.2", statelink_backends={"tcp": "statelink_twin:Made"})
    error = failure("tcp", BackendLoadError)
    assert error.code == "backend.conflict"
    assert error.hint == "'tcp' is built in: rename yours in statelink-twin, or uninstall it"


def test_a_copy_further_down_the_path_does_not_count(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.backend("same")
    second = Site(site.folder.parent / "second")
    second.package("statelink.same", "0.0.1", statelink_backends={"same": "elsewhere:Made"})
    monkeypatch.setattr(sys, "path", [*sys.path, str(second.folder)])
    assert [each.version for each in list_backends() if each.name == "same"] == ["0.1"]
    assert load_backend("same").name == "same"
    site.package("statelink-gone")
    second.package("statelink.gone", "0.0.1", statelink_backends={"gone": "elsewhere:Made"})
    assert "gone" not in names(), "the first copy of its package has no backend"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", ["tcp"]),
        ("statelink-good", ["good", "tcp"]),
        (" statelink_good , Statelink.MEM,", ["good", "mem", "tcp"]),
        ("statelink-nothing", ["tcp"]),
    ],
)
def test_the_environment_names_the_packages_that_count(
    site: Site, monkeypatch: pytest.MonkeyPatch, value: str, expected: list[str]
) -> None:
    for name in ("good", "mem"):
        site.backend(name)
    monkeypatch.setenv("STATELINK_PLUGINS", value)
    assert names() == expected
    monkeypatch.delenv("STATELINK_PLUGINS")
    assert {"good", "mem", "tcp"} <= set(names())


@pytest.mark.parametrize("points", ["[statelink.backends]\nfoo\n", "[statelink.backends\nfoo = a:b", "\x00", "= = ="])
def test_a_package_whose_metadata_cannot_be_read_hides_no_other(
    site: Site, points: str, caplog: pytest.LogCaptureFixture
) -> None:
    site.backend("good")
    site.package("statelink-broken")
    (site.folder / "statelink_broken-0.1.dist-info" / "entry_points.txt").write_text(points)
    with caplog.at_level(logging.WARNING):
        assert names() == ["good", "tcp"]
    assert load_backend("good").name == "good"


def test_a_package_without_metadata_hides_no_other(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.backend("good")
    monkeypatch.delenv("STATELINK_PLUGINS")
    for number in range(2):
        nameless = site.folder / f"nameless{number}-0.1.dist-info"
        nameless.mkdir()
        (nameless / "entry_points.txt").write_text("[statelink.backends]\nnameless = nowhere:Made\n")
    assert {"good", "tcp"} <= set(names())
    assert load_backend("good").name == "good"
