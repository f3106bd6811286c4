"""What a backend says of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from statelink.backend import ANY, Fence, Fencing, Op, Side, Strategy
from statelink.config import read_options
from statelink.errors import BackendUnavailableError, ConfigError

from .. import _inside
from .._lab import FOR_LINKS, Lab, Suite, needs
from .._rooms import LinkEnd

if TYPE_CHECKING:
    from .._bench import Subject

__all__ = ["Declaration"]


class Declaration(Suite):
    """A backend's class, without a device."""

    def test_its_class_is_complete(self) -> None:
        """It loads by its entry point's name, states its plugin API, and has typed options that all have defaults."""
        kind = _inside.kind_of(self.backend)
        assert kind.name == self.backend
        assert isinstance(kind.api_version, int)
        assert issubclass(kind.Options, msgspec.Struct)
        kind.Options()

    def test_an_unknown_option_is_refused(self) -> None:
        """An option that is misspelt is an error."""
        with pytest.raises(ConfigError, match="unknown key"):
            read_options(_inside.kind_of(self.backend).Options, {"no_such_option_": 1}, "options")

    def test_every_state_type_has_a_strategy(self) -> None:
        """What it declares to move has a strategy, stated in its table."""
        kind = _inside.kind_of(self.backend)
        assert all(isinstance(strategy, Strategy) for strategy in kind.strategies.values())
        if kind.capabilities.state_types == ANY:
            assert "*" in kind.strategies
        else:
            assert "*" in kind.strategies or set(kind.strategies) >= kind.capabilities.state_types

    def test_its_probe_answers(self, subject: Subject, lab: Lab) -> None:
        """A probe says in words what it found."""
        ok, reason, _ = lab.workers[0](_inside.probe, subject.name, dict(subject.options))
        assert ok
        assert reason

    def test_its_fence_is_implemented(self, subject: Subject, lab: Lab) -> None:
        """It has `grant` and `revoke` if, and only if, it declares an owner's fence for the target of a WRITE."""
        end = lab.end(0).open()
        declared = subject.fence(Op.WRITE, Side.TARGET) is Fence.OWNER
        assert end.call(_inside.is_fencing) is declared
        assert issubclass(subject.kind, Fencing) is declared

    def test_a_process_has_no_more_links_than_declared(self, subject: Subject, lab: Lab) -> None:
        """One link more than is declared for a process is refused by the names of both; closing one makes room."""
        most = subject.capabilities.links_per_process
        needs(most is not None, "it declares no limit")
        assert most is not None
        worker = lab.borrow()
        links = [LinkEnd(subject, worker, "prefill", f"link-{number}", FOR_LINKS) for number in range(most)]
        with pytest.raises(
            BackendUnavailableError, match=r"one-more\.0-.* cannot be opened .* has link-0\.0-"
        ) as caught:
            LinkEnd(subject, worker, "prefill", "one-more", FOR_LINKS)
        assert caught.value.code == "backend.links"
        assert links[0].close()
        LinkEnd(subject, worker, "prefill", "one-more", FOR_LINKS)

    def test_deviations_name_clauses(self) -> None:
        """Every deviation that the test class states is one from a clause that exists."""
        unknown = [name for name in self.deviations if not hasattr(self, name.partition("[")[0])]
        assert not unknown, f"no clause is called {', '.join(unknown)}"
