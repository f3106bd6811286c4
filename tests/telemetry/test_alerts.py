"""The alerting rules are YAML that Prometheus reads, ask only for what a link exports, and lead to pages that exist."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from pygments.lexers.promql import PromQLLexer
from pygments.token import Token
from tests.helpers.links import Rank
from tests.telemetry.test_dashboard import ROOT, metrics

FUNCTIONS = {"by", "on", "and", "unless", "sum", "increase", "rate", "histogram_quantile"}
OF_PROMETHEUS = {"up": {"job", "instance"}}
"""What Prometheus itself writes of each target."""


def rules() -> list[dict[str, Any]]:
    found = yaml.safe_load((ROOT / "docs" / "alerts.yaml").read_text())
    assert set(found) == {"groups"}
    assert all(set(group) == {"name", "rules"} for group in found["groups"])
    return [rule for group in found["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: str(rule["alert"]))
def test_every_rule_asks_for_what_a_link_exports(rule: dict[str, Any]) -> None:
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"Statelink\w+", rule["alert"])
    assert re.fullmatch(r"\d+m", rule.get("for", "0m"))
    query = rule["expr"]
    assert not [text for kind, text in PromQLLexer().get_tokens(query) if kind in Token.Error]
    assert query.count("(") == query.count(")")
    assert re.search(r" (>|==) [\d.]+$", query), "it is true or false"
    known = metrics() | OF_PROMETHEUS
    bare = re.sub(r'"[^"]*"|\[\w+\]|\{[^}]*\}', "", query)
    grouped = re.findall(r"(?:by|on) \(([^)]*)\)", bare)
    names = set(re.findall(r"[a-z]\w+", re.sub(r"(?:by|on) \([^)]*\)", "", bare))) - FUNCTIONS
    assert names
    assert names <= set(known), names - set(known)
    labels = {label.strip() for group in grouped for label in group.split(",")}
    labels |= set(re.findall(r"(\w+)=", query))
    assert labels <= set().union(*(known[name] for name in names)), query
    for name in names:
        rated = re.search(rf"(rate|increase)\({name}\b", query) is not None
        assert rated is name.endswith(("_total", "_bucket")), "rates are of counters only"


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: str(rule["alert"]))
def test_every_rule_leads_to_what_to_do(rule: dict[str, Any]) -> None:
    """And its text has only labels that are left in the result."""
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert rule["labels"]["severity"] in {"warning", "critical"}
    shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    kept = re.findall(r"sum by \(([^)]*)\)", rule["expr"])
    if kept and "statelink_link_info" not in rule["expr"]:
        assert shown <= {label.strip() for label in kept[0].split(",")}
    assert shown <= {"instance", "instance_name", "rank"}


def test_the_states_of_a_peer_that_is_ready_are_states() -> None:
    (query,) = [rule["expr"] for rule in rules() if "statelink_peers" in rule["expr"]]
    (states,) = re.findall(r'state=~"([^"]*)"', query)
    page = (ROOT / "docs" / "operate.md").read_text().partition("### States of peers")[2].partition("\n###")[0]
    assert set(states.split("|")) <= set(re.findall(r"`(\w+)`", page))


def test_the_thresholds_of_times_are_within_the_buckets() -> None:
    with Rank("p").open({"backend": "tcp"}, role="prefill") as link:
        bounds = link.snapshot()["totals"]["bounds"]
    for query in (rule["expr"] for rule in rules() if "histogram_quantile" in rule["expr"]):
        assert float(query.rpartition(" ")[2]) in bounds
