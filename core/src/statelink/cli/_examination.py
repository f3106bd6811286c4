"""The checks of `statelink doctor` about one backend, but for the transfer. Their process may end in its library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from statelink.backend import Backend, Check, Diagnosing, Verdict
from statelink.config import LinkConfig, read_options
from statelink.errors import StatelinkError, UnknownBackendError
from statelink.opening import AUTO, check_options, check_transport
from statelink.registry import list_backends, load_backend, probed

from ._loopback import Meant, Transfer, unsuited

if TYPE_CHECKING:
    from ._configured import Configured

__all__ = ["Asked", "examine", "failed"]


class Asked(NamedTuple):
    """What a link would ask of one backend.

    Attributes:
        options: Its options: those of the configuration, and over them those of the command.
        config: The configuration. ``None`` if it does not concern this backend.
    """

    options: dict[str, Any]
    config: LinkConfig | None = None

    @classmethod
    def of(cls, name: str, found: Configured, given: Mapping[str, Any]) -> Asked:
        """What is configured for backend ``name``, with the options of the command."""
        if found.given is None or found.given.config.backend not in (AUTO, name):
            return cls(dict(given))
        config = found.given.config
        options = config.options.get(name, {}) if config.backend == AUTO else config.options
        try:
            check_options(found.given)
        except StatelinkError:  # a problem of the configuration, or of another backend; here, the defaults are checked
            options = {}
        return cls({**options, **given}, config)


def examine(name: str, asked: Asked, moved: Meant | None, meant: Mapping[str, str]) -> Iterator[Check | Transfer]:
    """Check a backend, from its package to what a transfer needs. Stops at the first check on which the others depend.

    If nobody wants to use the backend, it is no problem that it cannot run, because hosts often have all packages.

    Args:
        name: The backend's name.
        asked: Its options, and the configuration.
        moved: The memory for a transfer. ``None``: no transfer.
        meant: The backend that somebody wants to use, and where its name stands if it is in no argument.
    """
    listed = [each for each in list_backends() if each.name == name]
    try:
        kind = load_backend(name, listed or None)
        parsed = read_options(kind.Options, asked.options, f"options of backend {name!r}")
    except StatelinkError as error:
        found = str(error).partition("\nhint:")[0]
        if isinstance(error, UnknownBackendError) and meant.get(name):
            found = f"backend {name!r} (from {meant[name]}) is not installed"
        yield failed("backend", found, error.hint, error.code)
        return
    priority = f"priority {kind.capabilities.priority}"
    yield Check(what="backend", verdict=Verdict.OK, found=f"{listed[0]}; {priority}")
    looked, defects = _diagnosed(kind, parsed)
    try:
        probe = probed(kind, parsed)
    except StatelinkError as error:
        yield from (*looked, *defects, failed("probe", error.reason.cause, error.hint, error.code))
        return
    lacks = Verdict.PROBLEM if name in meant else Verdict.NOT_APPLICABLE
    if not probe.ok:
        looked = [replace(each, verdict=lacks) if each.verdict is Verdict.PROBLEM else each for each in looked]
    yield from (*looked, *defects)
    if not probe.ok:
        said = f"not usable here: {probe.reason}"
        code = "backend.unavailable" if lacks is Verdict.PROBLEM else ""
        yield Check(what="probe", verdict=lacks, found=said, hint=probe.hint, code=code)
        found = "the backend cannot run here"
        yield Check(what="loopback transfer", verdict=Verdict.NOT_APPLICABLE, found=found)
        return
    yield Check(what="probe", verdict=Verdict.OK, found=probe.reason)
    yield Check(what="stopped peers", verdict=Verdict.OK, found=_stalled(kind))
    refused = list(_refused(kind, parsed, asked.config, lacks))
    yield from refused
    if any(each.verdict is not Verdict.OK for each in refused):
        found = "no link opens over it with this configuration"
        yield Check(what="loopback transfer", verdict=Verdict.NOT_APPLICABLE, found=found)
    elif moved is not None:
        require = tuple(asked.config.require) if asked.config else ()
        yield unsuited(kind, asked.options, moved) or Transfer(backend=name, options=asked.options, require=require)


def _refused(kind: type[Backend], options: Any, config: LinkConfig | None, lacks: Verdict) -> Iterator[Check]:
    """Check what the configuration asks of the backend. ``lacks`` is the verdict if the backend cannot do it."""
    if config is None:
        return
    try:
        check_transport(kind, options, config)
    except StatelinkError as error:
        what = "role" if error.code == "backend.roles" else "require"
        yield Check(what=what, verdict=lacks, found=error.reason.clause, hint=error.hint, code=error.code)
        return
    if config.require:
        found = f"it may use {' or '.join(config.require)}"
        yield Check(what="require", verdict=Verdict.OK, found=found)


def _diagnosed(kind: type[Backend], options: Any) -> tuple[list[Check], list[Check]]:
    """The backend's own checks of this machine, and its defects."""
    if not issubclass(kind, Diagnosing):
        return [], []
    try:
        return list(kind.diagnose(options)), []
    except (Exception, SystemExit) as error:  # it must not raise, either
        return [], [failed("diagnosis", f"it raised {type(error).__name__}: {error}", _author(kind))]


def _author(kind: type[Backend]) -> str:
    return f"tell the author of the package; `statelink conform {kind.name} -k Declaration` tests it"


def _stalled(kind: type[Backend]) -> str:
    """How stalled peers delay other peers, as the backend declares it. Nobody measures it here."""
    most = kind.capabilities.most_stalled
    if most is None:
        return "declared: any number of them delays nobody else"
    if most:
        said = f"up to {most} at once delay nobody else; beyond that, others wait until the library gives one up"
        return f"declared: {said}"
    return "declared: one may delay all others until the library gives it up"


def failed(what: str, found: str, hint: str, code: str = "") -> Check:
    """A check that found a problem."""
    return Check(what=what, verdict=Verdict.PROBLEM, found=found, hint=hint, code=code)
