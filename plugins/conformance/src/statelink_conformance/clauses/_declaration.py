"""Clauses on what a backend declares."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from statelink.backend import ANY, Fence, Fencing, Strategy
from statelink.config import read_options
from statelink.errors import BackendUnavailableError, ConfigError, StateError
from statelink.registry import plugin_manager
from statelink.state import state_type

from .. import _inside
from .._lab import FOR_LINKS, Lab, Suite, needs
from .._rooms import LinkEnd
from .._saying import refused
from .._worker import Finding

if TYPE_CHECKING:
    from .._bench import Subject

__all__ = ["Declaration"]


class Declaration(Suite):
    """A backend's class, without a device."""

    def test_its_class_is_complete(self) -> None:
        """It loads by its entry point's name, states its plugin API, and has typed options that all have defaults.

        Compare the class with `statelink.backend.Backend`, whose docstring lists what there has to be.
        """
        kind = _inside.kind_of(self.backend)
        assert kind.name == self.backend, f"the class says name = {kind.name!r}, its entry point {self.backend!r}"
        assert isinstance(kind.api_version, int), f"api_version is {kind.api_version!r}"
        assert issubclass(kind.Options, msgspec.Struct), f"Options is {kind.Options!r}"
        kind.Options()

    def test_an_unknown_option_is_refused(self) -> None:
        """An option that is misspelt is an error.

        Make `Options` a `msgspec.Struct`, which has fields and no `**kwargs`.
        """
        with refused("the option 'no_such_option_'", ConfigError, match="unknown key"):
            read_options(_inside.kind_of(self.backend).Options, {"no_such_option_": 1}, "options")

    def test_every_state_type_has_a_strategy(self) -> None:
        """What it declares to move has a strategy, stated in its table.

        Write `strategies = {"*": DIRECT}` if one serves all.
        """
        kind = _inside.kind_of(self.backend)
        for name, strategy in kind.strategies.items():
            assert isinstance(strategy, Strategy), f"strategies[{name!r}] is {strategy!r}"
        types = kind.capabilities.state_types
        missing = sorted(["*"] if types == ANY else set(types) - set(kind.strategies))
        assert "*" in kind.strategies or not missing, f"strategies has no entry for {', '.join(missing)}"

    def test_its_probe_answers(self, subject: Subject, lab: Lab) -> None:
        """A probe says in words what it found.

        Return a `Probe` with a reason in both cases: what was found, or what is missing.
        """
        ok, reason, _ = lab.workers[0](_inside.probe, subject.name, dict(subject.options))
        assert ok, f"it said before that it can run here, and now that it cannot: {reason}"
        assert reason, "a probe that is ok says nothing of what it found"

    def test_its_optional_protocols_answer(self, subject: Subject, lab: Lab) -> None:
        """The optional protocols that it has answer: `transports`, `memory_kinds`, `diagnose` and `raw`.

        Make these class methods that return what docs/backend.md says. Only `raw` may raise, and only an `OSError`.
        """
        end = lab.end(0)
        wrong = end.worker(_inside.optional, subject.name, dict(subject.options), end.regions)
        assert not wrong, "; ".join(wrong)

    def test_its_state_types_exist(self) -> None:
        """Each state type that it declares by name is registered: a built-in one, or one that a plugin brings.

        Correct the name in `state_types`, or install the package whose hook `statelink_state_types` brings the type.
        """
        declared = _inside.kind_of(self.backend).capabilities.state_types
        plugin_manager()
        for name in () if declared == ANY else sorted(declared):
            try:
                state_type(name)
            except StateError as error:
                raise Finding(str(error)) from error

    def test_its_fence_is_implemented(self, subject: Subject, lab: Lab) -> None:
        """It has `grant` and `revoke` if, and only if, it declares an owner's fence for the target of a WRITE.

        Implement `grant` and `revoke`, or declare `Fence.MOVER` or `Fence.NONE`.
        """
        end = lab.end(0).open()
        declared = subject.capabilities.target is Fence.OWNER
        has = end.call(_inside.is_fencing) or issubclass(subject.kind, Fencing)
        said = "Fence.OWNER" if declared else "no Fence.OWNER"
        methods = "it has grant and revoke" if has else "it lacks grant or revoke"
        assert has == declared, f"it declares {said} for the target, and {methods}"

    def test_a_process_has_no_more_links_than_declared(self, subject: Subject, lab: Lab) -> None:
        """One link more than is declared for a process is refused by the names of both; closing one makes room.

        Let `close` free what makes the library serve so few, or declare more.
        """
        most = subject.capabilities.links_per_process
        if most is None:
            needs(False, "it declares no limit")
            return
        worker = lab.borrow()
        links = [LinkEnd(subject, worker, "prefill", f"link-{number}", FOR_LINKS) for number in range(most)]
        both = r"one-more\.0-.* cannot be opened .* has link-0\.0-"
        with refused(f"link {most + 1} of a process", BackendUnavailableError, match=both):
            LinkEnd(subject, worker, "prefill", "one-more", FOR_LINKS)
        assert links[0].close(), "a link did not come to rest when it was closed"
        LinkEnd(subject, worker, "prefill", "one-more", FOR_LINKS)

    def test_deviations_name_clauses(self) -> None:
        """Every deviation that the test class states is one from a clause that exists.

        Correct the key in `deviations`: it is the name of a test, with its parameters or without.
        """
        unknown = [name for name in self.deviations if not hasattr(self, name.partition("[")[0])]
        assert not unknown, f"no clause is called {', '.join(unknown)}"
