"""Metrics for Prometheus, taken from the snapshots of links whenever somebody scrapes. Nothing is counted here."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from statelink.backend import close_in_children
from statelink.errors import ConfigError

from ._observer import Observer

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

    from statelink.link import Link

__all__ = ["PrometheusObserver", "families"]

OWN = ("link", "instance_name", "rank")
"""Labels of every metric. Prometheus sets ``instance`` itself, to the address that it scrapes."""


class PrometheusOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``telemetry.prometheus``.

    Attributes:
        host: Address at which ``/metrics`` is served.
        port: Port of rank 0; each rank adds its number. 0, the default, serves nothing: the process does, from
            ``prometheus_client.REGISTRY``.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0


class Collector:
    """Looks at the links of this process when it is asked. One for a registry, since a metric is described only once.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._links: dict[str, Link] = {}
        self._servers: dict[tuple[str, int], tuple[WSGIServer, threading.Thread, int]] = {}
        self._lock = threading.Lock()

    def describe(self) -> Iterable[Metric]:
        """Nothing: the names are known when somebody scrapes."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Every metric of every link. Called by the registry, on the thread that serves the scrape."""
        with self._lock:
            links = list(self._links.values())
        yield from families([link.snapshot() for link in links])

    def add(self, link: Link, registry: CollectorRegistry) -> None:
        """Look at a link from now on. If the registry refuses that, raises what it raises, and nothing has changed."""
        with self._lock:
            if not self._links:
                registry.register(self)
            self._links[link.name] = link

    def remove(self, link: Link, registry: CollectorRegistry) -> None:
        """Look at a link no more."""
        with self._lock:
            if self._links.pop(link.name, None) is not None and not self._links:
                registry.unregister(self)

    def serve(self, host: str, port: int, registry: CollectorRegistry) -> None:
        """Serve ``/metrics``, also for links that ask for the same port.

        Raises:
            ConfigError: The port cannot be used.
        """
        from prometheus_client import start_http_server

        with self._lock:
            known = self._servers.get((host, port))
            if known is not None:
                self._servers[host, port] = (*known[:2], known[2] + 1)
                return
            try:
                server, thread = start_http_server(port, host, registry)
            except OSError as error:
                raise ConfigError(
                    f"metrics cannot be served at {host}:{port}",
                    cause=error.strerror or str(error),
                    hint="choose another 'port'; each rank adds its number to it, so leave room for every rank",
                    code="config.telemetry",
                ) from error
            close_in_children(server.socket)
            self._servers[host, port] = server, thread, 1

    def unserve(self, host: str, port: int) -> None:
        """The counterpart of `serve`. Ends the server after the last."""
        with self._lock:
            server, thread, users = self._servers.pop((host, port))
            if users > 1:
                self._servers[host, port] = server, thread, users - 1
                return
        server.shutdown()
        server.server_close()
        thread.join()


_collector = Collector()


class PrometheusObserver(Observer):
    """Exports a link's counters through ``prometheus_client.REGISTRY``. Costs nothing between two scrapes."""

    Options = PrometheusOptions
    needs = "prometheus_client"
    extra = "prometheus"

    def __init__(self, options: PrometheusOptions, link: Link) -> None:
        super().__init__(options, link)
        from prometheus_client import REGISTRY

        self._registry = REGISTRY
        self._place = options.host, options.port + link.inventory.rank
        if options.port:
            _collector.serve(*self._place, REGISTRY)
        try:
            _collector.add(link, REGISTRY)
        except BaseException:
            if options.port:
                _collector.unserve(*self._place)
            raise

    def close(self) -> None:
        """See `Observer.close`."""
        _collector.remove(self.link, self._registry)
        if self.options.port:
            _collector.unserve(*self._place)


Rows = Iterable[tuple[Sequence[str], float]]


def families(snapshots: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    """Metrics of several links, from their snapshots. Names and units follow Prometheus' conventions."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    who = [(seen, (str(seen["link"]), str(seen["instance"]), str(seen["rank"]))) for seen in snapshots]

    def fill(metric: Any, of: Any) -> Metric:
        for seen, own in who:
            for labels, value in of(seen):
                metric.add_metric([*own, *labels], value)
        return metric  # type: ignore[no-any-return]

    def counter(name: str, words: str, labels: Sequence[str], of: Any) -> Metric:
        return fill(CounterMetricFamily(f"statelink_{name}", words, labels=[*OWN, *labels]), of)

    def gauge(name: str, words: str, labels: Sequence[str], of: Any) -> Metric:
        return fill(GaugeMetricFamily(f"statelink_{name}", words, labels=[*OWN, *labels]), of)

    yield gauge("link_info", "Always 1: what the link is.", ("role", "backend", "address"), _info)
    yield counter("rooms", "Rooms that ended.", ("role", "outcome", "reason"), _rooms)
    yield gauge("open_rooms", "Rooms that are open or hold memory.", ("status",), lambda seen: _flat(seen["rooms"]))
    yield counter("moved_bytes", "Bytes of rooms that ended.", ("role", "component", "transport"), _moved)
    yield gauge("held_bytes", "Bytes that open rooms named.", ("status",), lambda seen: _flat(seen["held_bytes"]))
    waits = ("waits_for",)
    quarantined = "Bytes of failed rooms that must not be used again yet."
    yield gauge("quarantined_bytes", quarantined, waits, lambda seen: _flat(seen["quarantined_bytes"]))
    taken_back = "Rooms whose memory was taken back without proof."
    yield counter("taken_back_rooms", taken_back, ("role", "by"), _taken_back)
    yield gauge("peers", "Peers by state.", ("state",), _peers)
    yield gauge("load", "What waits, and records of earlier rooms.", ("kind",), lambda seen: _flat(seen["load"]))
    dropped = "Frames that were dropped."
    yield counter("dropped_frames", dropped, ("code",), lambda seen: _flat(seen["dropped_frames"]))
    refused = "Connections with keys that are not allowed."
    yield counter("refused_keys", refused, (), lambda seen: [((), seen["refused_keys"])])
    yield gauge("strategy_bytes", "Memory of strategies' own.", ("strategy", "kind"), _strategies)
    for stage, words in (
        ("waited", "From the opening of a room that succeeded until both sides had met."),
        ("transferred", "From then until it had succeeded."),
    ):
        histogram = HistogramMetricFamily(f"statelink_room_{stage}_seconds", words, labels=[*OWN, "role"])
        for seen, own in who:
            bounds = [*map(str, seen["totals"]["bounds"]), "+Inf"]
            for role, stages in seen["totals"]["seconds"].items():
                if stage in stages:
                    counts, total = stages[stage]["counts"], stages[stage]["sum"]
                    sums = [sum(counts[: at + 1]) for at in range(len(counts))]
                    histogram.add_metric([*own, role], list(zip(bounds, sums, strict=True)), total)
        yield histogram


def _info(seen: Mapping[str, Any]) -> Rows:
    yield (seen["role"], seen["backend"], seen["address"].partition("@")[0]), 1


def _roles(seen: Mapping[str, Any]) -> tuple[str, ...]:
    return ("prefill", "decode") if seen["role"] == "both" else (seen["role"],)


def _rooms(seen: Mapping[str, Any]) -> Rows:
    """Succeeded rooms also while there are none: Prometheus sees no increase in the first sample of a series."""
    for role in _roles(seen):
        for outcome, count in {"succeeded": 0, **seen["totals"]["rooms"].get(role, {})}.items():
            good = outcome == "succeeded"
            yield (role, "succeeded" if good else "failed", "" if good else outcome), count


def _taken_back(seen: Mapping[str, Any]) -> Rows:
    """Also while there are none, for the same reason as `_rooms`. ``take_back_after`` is a setting of decode."""
    for role in _roles(seen):
        known = {"engine": 0, **({"take_back_after": 0} if role == "decode" else {})}
        for by, count in {**known, **seen["totals"]["taken_back"].get(role, {})}.items():
            yield (role, by), count


def _moved(seen: Mapping[str, Any]) -> Rows:
    for role, components in seen["totals"]["bytes"].items():
        for component, transports in components.items():
            for transport, nbytes in transports.items():
                yield (role, component, transport), nbytes


def _peers(seen: Mapping[str, Any]) -> Rows:
    """A peer of a link of the role ``both`` may have a state in each of its roles, and counts in both."""
    return _flat(Counter(state for states in seen["peers"].values() for state in states.split(", ")))


def _strategies(seen: Mapping[str, Any]) -> Rows:
    for strategy, numbers in seen["strategies"].items():
        for kind in ("bytes", "in_use", "quarantined"):
            if isinstance(numbers.get(kind), int):
                yield (strategy, kind), numbers[kind]


def _flat(numbers: Mapping[str, float]) -> Rows:
    for name, value in numbers.items():
        yield (name,), value
