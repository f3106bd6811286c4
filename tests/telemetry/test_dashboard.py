"""The dashboard is one that Grafana reads, and asks only for metrics and labels that a link exports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

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
            labels = set(re.findall(r"(\w+)=", query)) | set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            for group in re.findall(r"by \(([^)]*)\)", query):
                labels |= {label.strip() for label in group.split(",")}
            assert labels <= known[name], (query, labels - known[name])
            assert query.count("(") == query.count(")")
            assert ("rate(" in query) == name.endswith(("_total", "_bucket")), "rates are of counters only"
    assert asked == {name for name in known if not name.endswith("_bucket")} - {"statelink_strategy_bytes"}
    assert len({panel["id"] for panel in panels}) == len(panels)
