"""The dashboard is one that Grafana reads, and asks only for metrics and labels that a link exports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client import REGISTRY
from tests.helpers.links import Rank, hand_over

from statelink import Status

ROOT = Path(__file__).parents[2]
OF_ALL = {"link", "instance_name", "rank", "le"}


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "docs" / "grafana.json").read_text())
    return found


def metrics() -> dict[str, set[str]]:
    """Metrics of the page to their labels; of histograms, the series of buckets."""
    rows = re.findall(
        r"^\| `(statelink_\w+)` \| (\w+) \| (.*?) \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE
    )
    named = {name: set(re.findall(r"`(\w+)`", labels)) | OF_ALL for name, _, labels in rows}
    return named | {f"{name}_bucket": labels for name, labels in named.items() if name.endswith("_seconds")}


def labels_of(target: dict[str, Any]) -> set[str]:
    """The labels that a query selects and groups by, and those that its legend shows."""
    labels = set(re.findall(r"(\w+)=", target["expr"])) | set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
    for group in re.findall(r"by \(([^)]*)\)", target["expr"]):
        labels |= {label.strip() for label in group.split(",")}
    return labels


def test_grafanas_own_model_of_a_dashboard_reads_it_and_loses_nothing() -> None:
    given = dashboard()
    read = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(given)))

    def lost(given: Any, read: Any, path: str) -> list[str]:
        if isinstance(given, dict):
            return [each for key in given for each in lost(given[key], (read or {}).get(key), f"{path}.{key}")]
        if isinstance(given, list):
            if len(given) != len(read or []):
                return [path]
            return [each for at, value in enumerate(given) for each in lost(value, read[at], f"{path}[{at}]")]
        return [] if given == read else [path]

    assert lost(given, read, "") == []


def test_every_query_names_what_a_link_exports() -> None:
    known = metrics()
    panels = dashboard()["panels"]
    asked = set()
    for panel in panels:
        assert panel["title"]
        for target in panel["targets"]:
            query = target["expr"]
            (name,) = set(re.findall(r"statelink_\w+", query))
            asked.add(name.removesuffix("_bucket"))
            labels = labels_of(target)
            assert labels <= known[name], (query, labels - known[name])
            assert query.count("(") == query.count(")")
            assert ("rate(" in query) == name.endswith(("_total", "_bucket")), "rates are of counters only"
    assert asked == {name for name in known if not name.endswith("_bucket")}


def test_every_label_that_is_asked_for_is_one_that_links_export() -> None:
    """The table of the page could name too many."""
    config = {"backend": "tcp", "telemetry": {"prometheus": {}}}
    source, target = Rank("p", 1), Rank("d")
    with source.open(config, role="prefill") as prefill, target.open(config, role="decode") as decode:
        hand_over(prefill, decode, source, target, room=1)
        aborted = decode.receive(2, prefill.address, 16, {"kv": [1]})
        aborted.abort()
        assert aborted.wait(20) is Status.FAILED
        decode.receive(3, prefill.address, 16, {"kv": [2]})
        exported: dict[str, set[str]] = {}
        for family in REGISTRY.collect():
            for sample in family.samples:
                exported.setdefault(sample.name, set()).update(sample.labels)
    seen = set()
    for query in (target for panel in dashboard()["panels"] for target in panel["targets"]):
        (name,) = set(re.findall(r"statelink_\w+", query["expr"]))
        if name in exported:
            seen.add(name)
            assert labels_of(query) <= exported[name], query["expr"]
    for name in ("rooms_total", "moved_bytes_total", "held_bytes", "load", "room_waited_seconds_bucket"):
        assert f"statelink_{name}" in seen


def test_every_panel_says_what_it_shows() -> None:
    for panel in dashboard()["panels"]:
        assert len(panel["description"].split()) > 5, panel["title"]


def test_what_waits_has_only_what_waits() -> None:
    """A link's load has records of earlier rooms and bytes, too."""
    (panel,) = [each for each in dashboard()["panels"] if each["title"] == "What waits"]
    (left_out,) = re.findall(r'kind!~"([^"]*)"', panel["targets"][0]["expr"])
    page = (ROOT / "docs" / "operate.md").read_text().partition("\n### What waits: `load`\n")[2].partition("\n### ")[0]
    kinds = {kind for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for kind in re.findall(r"`(\w+)`", row)}
    with Rank("p", 1).open({"backend": "tcp"}, role="both") as link:
        assert set(link.snapshot()["load"]) == kinds, "the page explains each kind"
    waiting = {"pushes", "moves", "setups", "fences", "checks", "handshakes", "pending_requests", "changes"}
    assert kinds - set(left_out.split("|")) == waiting


def test_panels_have_numbers_of_their_own_and_do_not_overlap() -> None:
    """Grafana's grid has 24 columns."""
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + right, at["y"] + down) for right in range(at["w"]) for down in range(at["h"])}
        assert cells
        assert not cells & taken, panel["title"]
        assert all(0 <= column < 24 and row >= 0 for column, row in cells)
        taken |= cells
    rows = {row for _, row in taken}
    assert rows == set(range(max(rows) + 1)), "no row is empty"


def test_every_panel_asks_the_source_that_is_chosen() -> None:
    found = dashboard()
    variables = {each["name"]: each for each in found["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    asking = [*found["panels"], *(target for panel in found["panels"] for target in panel["targets"])]
    asking += [each for each in variables.values() if each["type"] == "query"]
    assert all(each["datasource"] == chosen for each in asking)
    for panel in found["panels"]:
        letters = [target["refId"] for target in panel["targets"]]
        assert letters == sorted(set(letters))
        for target in panel["targets"]:
            used = set(re.findall(r"\$(\w+)", target["expr"]))
            assert used - {"__rate_interval"} <= set(variables), target["expr"]
            assert "instance_name" in used, "the choice of an instance holds for every panel"


def test_units_are_those_of_what_is_shown() -> None:
    """The names are Grafana's: SI and IEC bytes have different ones, and links print IEC bytes."""
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            (name,) = set(re.findall(r"statelink_\w+", target["expr"]))
            rated = "rate(" in target["expr"] and not name.endswith("_bucket")
            unit = "short"
            if " / " in target["expr"]:
                unit = "percentunit"
            elif "_seconds" in name:
                unit = "s"
            elif "_bytes" in name:
                unit = "binBps" if rated else "bytes"
            elif rated:
                unit = "ops"
            assert panel["fieldConfig"]["defaults"]["unit"] == unit, panel["title"]


def test_a_table_has_one_row_for_each_link() -> None:
    """A table of a range of time has a row for each point of one series."""
    tables = [panel for panel in dashboard()["panels"] if panel["type"] == "table"]
    assert tables
    for target in (target for panel in tables for target in panel["targets"]):
        assert (target["format"], target["instant"], target["range"]) == ("table", True, False)
