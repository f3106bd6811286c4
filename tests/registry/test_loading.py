"""What a package with hooks may do while it is loaded, and what other threads see meanwhile."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from .sites import Site

if TYPE_CHECKING:
    from pathlib import Path

KIND = """
from statelink import hookimpl
from statelink.state import Coverage, IndexSpace, StateType

@hookimpl
def statelink_state_types():
    return [StateType(name="{name}", index=IndexSpace.SLOT, coverage=Coverage.REQUEST)]
"""

ASK = """
from statelink import state
from statelink.errors import StateError

def known(name):
    try:
        return state.state_type(name).name
    except StateError as error:
        return error.code

seen = [known("first_kind"), known("third_kind"), known("no_kind")]
"""

SEEN = """
import json
from statelink.registry import plugin_failures, plugin_manager
from statelink.state import state_type
names = sorted(name for name, _ in plugin_manager().list_name_plugin())
print(json.dumps([names, [state_type(f"{each}_kind").name for each in ("first", "second", "third")]]))
"""
ALL = [["first", "second", "third"], ["first_kind", "second_kind", "third_kind"]]


@pytest.fixture(name="site")
def site_fixture(tmp_path: Path) -> Site:
    return Site(tmp_path / "site")


def plugin(site: Site, name: str, source: str, *, point: str = "") -> None:
    site.package(f"vendor-{name}", statelink_plugins={point or name: f"vendor_{name}"})
    site.module(f"vendor_{name}", source)


def three(site: Site, second: str) -> None:
    """Three packages; the source of the second one begins with this."""
    for name in ("first", "second", "third"):
        plugin(site, name, (second if name == "second" else "") + KIND.format(name=f"{name}_kind"))


def said(site: Site, code: str, **environment: str) -> Any:
    return json.loads(site.python(code, environment=environment).splitlines()[-1])


def test_a_package_that_asks_for_a_type_at_its_import_sees_those_that_were_loaded_before(site: Site) -> None:
    three(site, ASK)
    code = SEEN + "import vendor_second\nprint(json.dumps(vendor_second.seen))"
    assert said(site, SEEN) == ALL
    assert said(site, code) == ["first_kind", "state.unknown_type", "state.unknown_type"]


def test_a_package_may_ask_for_the_plugin_manager_at_its_import(site: Site) -> None:
    three(
        site,
        "from statelink.registry import load_backend, plugin_manager\n"
        "load_backend('tcp')\n"
        "seen = sorted(name for name, _ in plugin_manager().list_name_plugin())\n",
    )
    code = SEEN + "import vendor_second\nprint(json.dumps(vendor_second.seen))"
    assert said(site, SEEN) == ALL
    assert said(site, code) == ["first"]


def test_a_package_may_ask_while_its_state_types_are_asked_for(site: Site) -> None:
    asking = KIND.format(name="second_kind").replace("    return", "    seen.append(known('first_kind'))\n    return")
    three(site, "")
    site.module("vendor_second", ASK + asking)
    code = SEEN + "import vendor_second\nprint(json.dumps(vendor_second.seen[3:]))"
    assert said(site, SEEN) == ALL
    assert said(site, code) == ["first_kind"]


def test_a_package_may_open_a_link_at_its_import(site: Site) -> None:
    three(
        site,
        """
import numpy as np
import statelink
from statelink import state

rows = np.zeros((4, 16), np.uint8)
inventory = state.describe("p", [state.aux_rows({"row": rows})])
with statelink.open({"role": "prefill", "backend": "tcp"}, inventory) as link:
    seen = link.backend
""",
    )
    assert said(site, SEEN) == ALL


@pytest.mark.parametrize("module", ["vendor_second", "vendor_second.hooks"])
def test_a_package_that_is_imported_by_its_own_name_keeps_its_hooks(site: Site, module: str) -> None:
    three(site, ASK)
    if module != "vendor_second":  # the package around the module asks, before the module is imported
        folder = site.folder / "vendor_second"
        folder.mkdir()
        (folder / "__init__.py").write_text(ASK)
        (site.folder / "vendor_second.py").rename(folder / "hooks.py")
        points = site.folder / "vendor_second-0.1.dist-info" / "entry_points.txt"
        points.write_text(points.read_text().replace("vendor_second", module))
    assert said(site, "import vendor_second\n" + SEEN) == ALL


TWO_THREADS = """
import threading
import vendor_gate
from statelink.registry import plugin_manager

found = []

def load():
    found.append(sorted(name for name, _ in plugin_manager().list_name_plugin()))

def ask():
    from statelink.state import state_type
    found.append(state_type("third_kind").name)

first = threading.Thread(target=load)
first.start()
assert vendor_gate.inside.wait(30)
others = [threading.Thread(target=each) for each in (load, ask, load, ask)]
for each in others:
    each.start()
vendor_gate.go_on.set()
for each in (first, *others):
    each.join()
"""


def test_threads_that_load_at_once_all_see_every_package(site: Site) -> None:
    """The first thread is inside the second package's import when the others ask."""
    site.module("vendor_gate", "import threading\ninside, go_on = threading.Event(), threading.Event()\n")
    three(site, "import vendor_gate\nvendor_gate.inside.set()\nassert vendor_gate.go_on.wait(30)\n")
    code = TWO_THREADS + SEEN + "print(json.dumps(sorted(map(str, found))))"
    assert said(site, code) == sorted(map(str, [*[["first", "second", "third"]] * 3, "third_kind", "third_kind"]))


def test_an_import_in_one_thread_that_asks_does_not_wait_for_a_thread_that_loads(site: Site) -> None:
    """The module is imported by its own name, and its import asks for a type while another thread loads packages."""
    site.module("vendor_gate", "import threading\ninside, go_on = threading.Event(), threading.Event()\n")
    three(site, "import vendor_gate\nvendor_gate.inside.set()\nassert vendor_gate.go_on.wait(30)\n" + ASK)
    code = """
import threading
import vendor_gate
from statelink.registry import plugin_manager

importing = threading.Thread(target=__import__, args=("vendor_second",))
importing.start()
assert vendor_gate.inside.wait(30)
loading = threading.Thread(target=plugin_manager)
loading.start()
vendor_gate.go_on.set()
importing.join()
loading.join()
"""
    assert said(site, code + SEEN) == ALL


@pytest.mark.soak  # it takes the minute for which a thread waits
def test_a_package_that_waits_at_its_import_for_a_thread_that_asks_is_named(site: Site) -> None:
    three(
        site,
        ASK
        + """
import threading
import vendor_gate

def ask():
    try:
        known("third_kind")
    except BaseException as error:
        vendor_gate.caught.append(str(error))

thread = threading.Thread(target=ask)
thread.start()
thread.join()
""",
    )
    site.module("vendor_gate", "caught = []\n")
    code = SEEN + "import vendor_gate\nprint(json.dumps(vendor_gate.caught))"
    (error,) = json.loads(site.python(code).splitlines()[-1])
    assert error.startswith("the package vendor-second with hooks is not loaded: another thread has imported")


BOTH = """
import json, sys
import numpy as np
import statelink
from statelink import state
from statelink.registry import plugin_failures, plugin_manager

rows = np.zeros((4, 16), np.uint8)
with statelink.open({"role": "prefill", "backend": "tcp"}, state.describe("p", [state.aux_rows({"row": rows})])):
    called = [name for name in ("vendor_one", "vendor_two") if getattr(sys.modules[name], "opened", False)]
names = sorted(name for name, _ in plugin_manager().list_name_plugin())
print(json.dumps([called, names, [list(each) for each in plugin_failures()]]))
"""
OPENED = """
from statelink import hookimpl

@hookimpl
def statelink_link_opened(link):
    global opened
    opened = True
"""


def test_two_packages_with_one_name_are_both_called(site: Site) -> None:
    for name in ("one", "two"):
        plugin(site, name, OPENED, point="same")
    names = ["same of vendor-one", "same of vendor-two"]
    assert said(site, BOTH) == [["vendor_one", "vendor_two"], names, []]


def test_two_hooks_of_one_package_and_one_name_are_a_failure(site: Site) -> None:
    plugin(site, "one", OPENED, point="same")
    points = site.folder / "vendor_one-0.1.dist-info" / "entry_points.txt"
    points.write_text(points.read_text() + "same = vendor_two\nsame = vendor_one\n")
    site.module("vendor_two", OPENED)
    called, names, failures = said(site, BOTH)
    assert (called, names) == (["vendor_one"], ["same of vendor-one"])
    ((name, distribution, reason),) = failures
    assert (name, distribution) == ("same", "vendor-one")
    assert "Plugin name already registered" in reason
