"""What Prometheus, OpenTelemetry and logs are told of real rooms, and that nobody is called where nobody asked."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import itertools
import json
import logging
import re
import socket
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.openmetrics import exposition
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from pythonjsonlogger.json import JsonFormatter

import statelink
from statelink import state
from statelink.backend import DIRECT, ReceiveHook, SendHook, Strategy
from statelink.errors import ConfigError
from statelink.registry import load_backend, plugin_manager

if TYPE_CHECKING:
    from tests.registry.sites import Site

ROOT = Path(__file__).parents[2]
_rooms = itertools.count(5000)
_memory = {name: np.zeros((2, 16, 4, 2, 8), np.float32) for name in ("p", "d")}


def inventory(name: str) -> Any:
    kv = _memory[name]  # it outlives every link
    return state.describe(name, [state.kv_pages({0: (kv[0], kv[1])}, heads=2)], model="m")


class Two:
    """Two links of this process, and rooms between them."""

    def __init__(self, **telemetry: dict[str, Any]) -> None:
        usual = {"backend": "tcp", "telemetry": telemetry, "inspect": False}
        self.prefill = statelink.open({"role": "prefill", **usual}, inventory("p"))
        self.decode = statelink.open({"role": "decode", **usual}, inventory("d"))

    def run(self, room: int | None = None) -> int:
        room = next(_rooms) if room is None else room
        sending, receiving = self.prefill.send(room, 16), self.decode.receive(room, self.prefill.address, 16)
        receiving.accept({"kv": [0, 1, 2, 3]})
        sending.push({"kv": [0, 1, 2, 3]})
        for each in (sending, receiving):
            each.wait(20, quiesced=True)
            each.check()
        return room

    def fail(self) -> int:
        room = next(_rooms)
        sending, receiving = self.prefill.send(room, 16), self.decode.receive(room, self.prefill.address, 16)
        receiving.accept({"kv": [0, 1, 2, 3]})
        receiving.abort("the user left")
        for each in (sending, receiving):
            each.wait(20, quiesced=True)
        return room

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()


@contextlib.contextmanager
def two(**telemetry: dict[str, Any]) -> Iterator[Two]:
    made = Two(**telemetry)
    try:
        yield made
    finally:
        made.close()


def scraped(text: str) -> dict[str, Any]:
    """The families of Statelink in an exposition, as OpenMetrics' own parser reads them."""
    read: Any = text_string_to_metric_families  # it has no types
    found = {each.name: each for each in read(text)}
    return {name: family for name, family in found.items() if name.startswith("statelink_")}


def exposed() -> dict[str, Any]:
    write: Any = exposition.generate_latest  # it has no types
    return scraped(write(REGISTRY).decode())


def value(family: Any, **labels: str) -> float:
    """The sum of the samples that have these labels, of the one that has a value."""
    found = [s.value for s in family.samples if labels.items() <= s.labels.items() and not s.name.endswith("_created")]
    assert found, labels
    return float(sum(found))


def test_prometheus_exports_what_the_link_counts() -> None:
    with two(prometheus={}) as links:
        for _ in range(3):
            links.run()
        links.fail()
        found = exposed()
        for link, role in ((links.prefill, "prefill"), (links.decode, "decode")):
            seen, own = link.snapshot(), {"link": link.name, "instance_name": role[0], "rank": "0"}
            totals = seen["totals"]
            assert value(found["statelink_rooms"], **own, outcome="succeeded", reason="") == 3
            assert value(found["statelink_rooms"], **own, outcome="failed", reason="room.aborted") == 1
            moved = totals["bytes"][role]["kv"]
            assert moved
            for transport, nbytes in moved.items():
                family = found["statelink_moved_bytes"]
                assert value(family, **own, role=role, component="kv", transport=transport) == nbytes
            for stage in ("waited", "transferred"):
                samples = found[f"statelink_room_{stage}_seconds"].samples
                mine = [each for each in samples if own.items() <= each.labels.items()]
                counted = {each.name.rpartition("_")[2]: each.value for each in mine}
                assert counted["count"] == 3
                assert counted["sum"] == pytest.approx(totals["seconds"][role][stage]["sum"])
                heights = [each.value for each in mine if each.name.endswith("_bucket")]
                assert heights == sorted(heights)
                assert heights[-1] == 3
            assert value(found["statelink_peers"], **own) == 1
            assert value(found["statelink_link_info"], **own, role=role, backend="tcp") == 1
        plain = generate_latest(REGISTRY).decode()
        assert plain.count("# TYPE statelink_rooms_total counter") == 1, "two links of a process are one family"
    assert exposed() == {}


class Held(Strategy):
    """Moves directly, and says that it has memory of its own."""

    name = "held"

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def snapshot(self) -> dict[str, int]:
        return {"bytes": self.nbytes, "waiting": 1}

    def sender(self) -> SendHook:
        return DIRECT.sender()

    def receiver(self) -> ReceiveHook:
        return DIRECT.receiver()


def test_the_memory_of_strategies_with_one_name_is_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are equal, and yet each has memory of its own."""
    monkeypatch.setattr(load_backend("tcp"), "strategies", {"kv": Held(1000), "aux": Held(234), "*": Held(1)})
    kv, rows = _memory["p"], np.zeros((4, 64), np.uint8)
    made = state.describe("p", [state.kv_pages({0: (kv[0], kv[1])}, heads=2), state.aux_rows({"rows": rows})])
    config = {"role": "prefill", "backend": "tcp", "telemetry": {"prometheus": {}}, "inspect": False}
    with statelink.open(config, made) as link:
        assert link.snapshot()["strategies"] == {"held": {"bytes": 1234, "waiting": 2}}
        assert value(exposed()["statelink_strategy_bytes"], link=link.name, strategy="held", kind="bytes") == 1234


def test_counters_begin_at_zero_where_their_labels_are_known() -> None:
    """Prometheus sees no increase in the first sample of a series. Codes of failures are not known beforehand."""
    with two(prometheus={}):
        found = exposed()
    for name, labels in (("rooms", ("role", "outcome", "reason")), ("taken_back_rooms", ("role", "by"))):
        samples = [each for each in found[f"statelink_{name}"].samples if each.name.endswith("_total")]
        assert {each.value for each in samples} == {0}
        shown = {tuple(each.labels[label] for label in labels) for each in samples}
        assert (
            shown
            == {
                "rooms": {("prefill", "succeeded", ""), ("decode", "succeeded", "")},
                "taken_back_rooms": {("prefill", "engine"), ("decode", "engine"), ("decode", "take_back_after")},
            }[name]
        )


def test_names_and_units_are_prometheus_own_and_documented() -> None:
    """Counters end in ``_total``, units are base units, and the page has every metric with its labels."""
    with two(prometheus={}) as links:
        links.run()
        links.fail()
        found = exposed()
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = dict(re.findall(r"^\| `(statelink_\w+)` \| (\w+) \|", page, re.MULTILINE))
    kinds = {f"{name}_total" if each.type == "counter" else name: each.type for name, each in found.items()}
    assert rows == kinds
    for name, family in found.items():
        assert family.documentation
        assert not re.search(r"milli|micro|kilo|mega|_ms\b|_kb\b|_count$", name)
        if "seconds" in name or "bytes" in name:
            assert re.search(r"_(seconds|bytes)$", name)
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}"))
        labels = {label for sample in family.samples for label in sample.labels} - {
            "le",
            "link",
            "instance_name",
            "rank",
        }
        assert all(f"`{label}`" in row for label in labels), (name, labels)


def test_metrics_are_served_if_nobody_else_does() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="metrics cannot be served at") as refused:
            Two(prometheus={"port": port})
        assert refused.value.code == "config.telemetry"
        assert "choose another 'port'" in refused.value.hint
    with two(prometheus={"port": port}) as links:
        links.run()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
            assert "statelink_rooms_total" in answer.read().decode()
    with socket.create_server(("127.0.0.1", port)):
        pass  # it is free again


def test_nothing_is_left_of_metrics_that_the_registry_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the server, which is there by then, nor a link that is never looked at and keeps later ones out."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    def refuse(collector: object) -> None:
        raise ValueError("no more names")

    with monkeypatch.context() as patch:
        patch.setattr(REGISTRY, "register", refuse)
        with pytest.raises(ValueError, match="no more names"):
            Two(prometheus={"port": port})
    with socket.create_server(("127.0.0.1", port)):
        pass  # nobody listens there
    with two(prometheus={"port": port}) as links:
        links.run()
        assert b"statelink_rooms_total" in generate_latest(REGISTRY)
    assert b"statelink_rooms_total" not in generate_latest(REGISTRY)


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    made = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(made))
    trace.set_tracer_provider(provider)
    return made


def test_the_spans_of_a_room_are_one_trace(exporter: InMemorySpanExporter) -> None:
    exporter.clear()
    with two(opentelemetry={}) as links:
        good, bad = links.run(), links.fail()
    spans: dict[tuple[str, str], Any] = {
        (str(span.attributes["statelink.room"]), str(span.attributes["statelink.role"])): span
        for span in exporter.get_finished_spans()
        if span.attributes
    }
    assert set(spans) == {(str(room), role) for room in (good, bad) for role in ("prefill", "decode")}
    traces = {key: span.get_span_context().trace_id for key, span in spans.items()}
    parents = {key: span.parent.span_id for key, span in spans.items()}
    for room in (good, bad):
        assert traces[str(room), "prefill"] == traces[str(room), "decode"]
        assert parents[str(room), "prefill"] == parents[str(room), "decode"]
    assert traces[str(good), "decode"] != traces[str(bad), "decode"]
    assert parents[str(good), "decode"] != parents[str(bad), "decode"]
    for (number, role), span in spans.items():
        assert span.name == f"statelink room {role}"
        assert span.start_time <= span.end_time
        if number == str(good):
            assert span.status.is_ok
            assert span.attributes["statelink.bytes.kv"] == 2 * 4 * 4 * 2 * 8 * 4
            assert [event.name for event in span.events] == ["met"]
        else:
            assert not span.status.is_ok
            assert span.attributes["error.type"] == "room.aborted"
            assert "the user left" in str(span.status.description)


def test_both_sides_trace_the_same_share_of_the_rooms(exporter: InMemorySpanExporter) -> None:
    """The share that OpenTelemetry's own sampler takes. The trace of a room is always the same one."""
    found: list[list[tuple[str, str, int]]] = []
    rooms: list[int | None] = [None] * 24
    for ratio in (1.0, 0.5):
        exporter.clear()
        with two(opentelemetry={"ratio": ratio}) as links:
            rooms = [links.run(room) for room in rooms]
        spans: list[Any] = list(exporter.get_finished_spans())
        found.append(
            sorted((s.name, str(s.attributes["statelink.room"]), s.get_span_context().trace_id) for s in spans)
        )
    every, some = found
    assert len(every) == 48
    sampler = TraceIdRatioBased(0.5)
    assert some == [
        each for each in every if sampler.should_sample(None, each[2], "").decision is Decision.RECORD_AND_SAMPLE
    ]
    assert 0 < len(some) < 48


def test_logs_have_fields() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter("%(levelname)s %(message)s"))
    logger = logging.getLogger("statelink.rooms")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with two(log={}) as links:
            good, bad = links.run(), links.fail()
            names = {"prefill": links.prefill.name, "decode": links.decode.name}
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    lines = {(line["room"], line["role"]): line for line in map(json.loads, stream.getvalue().splitlines())}
    assert set(lines) == {(room, role) for room in (good, bad) for role in names}
    for (room, role), line in lines.items():
        assert line["link"] == names[role]
        assert (line["instance"], line["rank"], line["backend"]) == (role[0], 0, "tcp")
        if room == good:
            assert (line["levelname"], line["reason"]) == ("INFO", None)
            assert line["peers"] == [names["decode" if role == "prefill" else "prefill"]]
            assert line["bytes"] == {"kv": 2 * 4 * 4 * 2 * 8 * 4}
            assert line["waited_seconds"] >= 0
        else:
            assert (line["levelname"], line["reason"]) == ("WARNING", "room.aborted")
            assert "the user left" in line["error"]
            assert line["message"] == f"room {room} failed on {role}: room.aborted"


def calls_of_a_room(**telemetry: dict[str, Any]) -> int:
    """Functions that Python calls for the observers when a room ends on one link; -1 if the hook has nobody."""
    link = statelink.open(
        {"role": "prefill", "backend": "tcp", "telemetry": telemetry, "inspect": False}, inventory("p")
    )
    try:
        hook = plugin_manager().hook.statelink_room_ended
        if not hook.get_hookimpls():
            return -1
        room = link.send(next(_rooms), 16)
        room.abort("enough")
        room.wait(20, quiesced=True)
        report = room.report
        return calls(lambda: hook(report=report))
    finally:
        link.close()


def calls(action: Callable[[], object]) -> int:
    """Functions that Python calls for an action on this thread."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def test_what_a_scrape_costs() -> None:
    """In calls of Python functions that each link adds, as docs/metrics.md states them at most."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    (stated,) = re.findall(
        r"^A scrape of `prometheus` runs at most ([\d,]+) functions for each link", page, re.MULTILINE
    )
    most = int(stated.replace(",", ""))
    write: Any = exposition.generate_latest  # it has no types
    alone = calls(lambda: write(REGISTRY))
    with two(prometheus={}) as links:
        links.run()
        found = (calls(lambda: write(REGISTRY)) - alone) / 2
    assert most / 2 <= found <= most, found


def test_what_each_costs_a_room(exporter: InMemorySpanExporter) -> None:
    """In calls of Python functions, as docs/metrics.md states them at most."""
    assert calls_of_a_room() == -1
    assert calls_of_a_room(prometheus={}) == -1
    page = (ROOT / "docs" / "metrics.md").read_text()
    stated = {name: int(most) for name, most in re.findall(r"^\| `(\w+)` \| at most (\d+) calls", page, re.MULTILINE)}
    assert set(stated) == {"log", "opentelemetry"}
    logger = logging.getLogger("statelink.rooms")
    logger.addHandler(handler := logging.StreamHandler(io.StringIO()))
    logger.propagate = False  # pytest listens, too
    try:
        for name, most in stated.items():
            found = calls_of_a_room(**{name: {}})
            assert most / 2 <= found <= most, (name, found)
    finally:
        logger.propagate = True
        logger.removeHandler(handler)
    assert plugin_manager().hook.statelink_room_ended.get_hookimpls() == [], "a closed link leaves nothing behind"


def test_what_cannot_be_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"promethius": {}},
            "'promethius': known: log, opentelemetry, prometheus\nhint: did you mean",
        ),
        ({"prometheus": {"prot": 1}}, "unknown key 'prot' in the options of telemetry 'prometheus'"),
        ({"prometheus": {"port": 70000}}, "bad value in the options of telemetry 'prometheus'"),
        ({"opentelemetry": {"ratio": 2.0}}, "bad value in the options of telemetry 'opentelemetry'"),
        ({"log": {"level": "info"}}, "unknown key 'level'"),
    ]
    for telemetry, text in cases:
        with pytest.raises(ConfigError) as refused:
            Two(**telemetry)
        assert text in str(refused.value)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"prometheus_client is not installed\nhint: pip install .*\[prometheus\]"):
        Two(prometheus={})
    with pytest.raises(ConfigError, match=r"hint: pip install .*\[opentelemetry\]"):
        Two(opentelemetry={})


OWN = """
from statelink.backend import hookimpl
from statelink.telemetry import Observer

told = []

class Own(Observer):
    @hookimpl
    def statelink_link_opened(self, link):
        if link is self.link:
            told.append(("opened", link.name))

    def close(self):
        told.append(("closed", self.link.name))
"""


def test_a_package_brings_telemetry_of_its_own(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.package("vendor-watch", statelink_telemetry={"own": "vendor_watch:Own"})
    site.module("vendor_watch", OWN)
    with pytest.raises(ConfigError, match="known: log, opentelemetry, prometheus"):
        Two(own={})
    monkeypatch.setenv("STATELINK_PLUGINS", "vendor-watch")
    with two(own={}) as both:
        names = [both.prefill.name, both.decode.name]
    told = importlib.import_module("vendor_watch").told
    assert [told.count((what, name)) for what in ("opened", "closed") for name in names] == [1, 1, 1, 1]
    site.package("vendor-other", statelink_telemetry={"own": "vendor_watch:Own"})
    monkeypatch.setenv("STATELINK_PLUGINS", "vendor-watch,vendor-other")
    with pytest.raises(ConfigError, match="vendor-other, vendor-watch bring one\nhint: uninstall all but one of them"):
        Two(own={})
