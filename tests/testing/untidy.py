"""Test classes for packages that break what the kit says of packages; not collected by itself."""

from __future__ import annotations

from statelink_conformance import PackageTests

BROKEN: dict[str, dict[str, str]] = {
    "Untidy": {
        "test_its_metadata_is_complete": "it does not require statelink",
        "test_its_module_lists_its_public_names": "__all__ is [], and the public names are ['Any', 'BackendContext', ",
        "test_it_is_typed": "there is no py.typed",
        "test_its_options_are_documented": "the README documents the options [], and there are ['congestion', ",
        "test_a_wrong_option_is_refused": "the options {'speed': -1} was not refused",
        "test_probing_it_prints_nothing": "the probe printed 'looking for the library",
        "test_it_names_its_library": "`library` names vendor, and the probe and the constructor imported no module",
        "test_without_its_library_it_says_so": "the probe says that the backend can run: all is well",
        "test_with_a_broken_library_it_says_why": "the probe says that the backend can run: all is well",
        "test_a_process_may_end_without_closing": "printed 'a thread of the library is still running",
    },
    "Eager": {
        "test_its_metadata_is_complete": "it does not require statelink",
        "test_its_module_lists_its_public_names": "the public names are ['Eager', 'TcpBackend', 'importlib', 'vendor']",
        "test_it_is_typed": "there is no py.typed",
        "test_its_options_are_documented": "the README documents the options [], and there are ['congestion', ",
        "test_importing_it_imports_no_library": "importing the plugin imported vendor",
        "test_probing_it_prints_nothing": "the probe imported vendor",
        "test_without_its_library_it_says_so": "import of vendor halted; None in sys.modules",
        "test_with_a_broken_library_it_says_why": "OSError: libstatelink-kit.so: cannot open shared object file",
    },
}
"""Name of the test class, to the clauses that its package breaks, each with a part of what the kit says."""


class TestUnnamed(PackageTests):
    """There is no such entry point."""

    backend = "unnamed"
    library = ("vendor",)


class TestUntidy(PackageTests):
    backend = "untidy"
    library = ("vendor",)
    refused_options = [{"speed": -1}]


class TestEager(PackageTests):
    backend = "eager"
    library = ("vendor",)
    probes_elsewhere = True
