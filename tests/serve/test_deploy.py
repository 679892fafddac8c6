"""Dashboards and alerts ask only for what a server has, and ask it rightly."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from support.http_server import HttpServer
from support.metrics import Samples, loaded_server, samples

from trimaran.cli.serve import make_parser

DEPLOY = Path(__file__).parents[2] / "deploy"
OF_PROMETHEUS = {"job", "instance"}  # labels that it adds to what it scrapes
OWN = {"up": OF_PROMETHEUS}  # metrics that it makes itself


@pytest.fixture(scope="module")
def found(smollm2_path: Path) -> Iterator[Samples]:
    """What is on /metrics after a mixed load."""
    with loaded_server() as server:
        yield samples(server)


def dashboard() -> dict[str, Any]:
    return json.loads((DEPLOY / "grafana" / "trimaran.json").read_text())


def alerts() -> list[dict[str, Any]]:
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    return [rule for group in rules["groups"] for rule in group["rules"]]


def expressions() -> Iterator[tuple[str, str]]:
    """(where it stands, the expression) of each query there is."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield f"panel '{panel['title']}'", target["expr"]
    for rule in alerts():
        yield f"alert {rule['alert']}", rule["expr"]


EXPRESSIONS = list(expressions())


def nodes(expression: Any, inside: str = "") -> Iterator[tuple[Any, str]]:
    """(node, the function it is directly in) of a parsed expression."""
    yield expression, inside
    if isinstance(expression, promql_parser.Call):
        for each in expression.args:
            yield from nodes(each, expression.func.name)
    elif isinstance(expression, promql_parser.MatrixSelector):
        yield from nodes(expression.vector_selector, inside)
    elif isinstance(expression, promql_parser.BinaryExpr):
        yield from nodes(expression.lhs)
        yield from nodes(expression.rhs)
    elif hasattr(expression, "expr"):
        yield from nodes(expression.expr)


def parsed(expression: str) -> Any:
    """With Grafana's own variables filled in."""
    return promql_parser.parse(re.sub(r"\$__(rate_interval|interval|range)", "5m", expression))


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS)
def test_a_query_asks_for_what_is_there(found: Samples, where: str, expression: str) -> None:
    selectors = 0
    labels: set[str] = set(OF_PROMETHEUS)
    asked: set[str] = set()
    for node, function in nodes(parsed(expression)):
        if isinstance(node, promql_parser.VectorSelector):
            selectors += 1
            name = node.name
            assert name in found or name in OWN, f"{where} asks for {name}, which isn't there"
            own = OWN.get(name) or OF_PROMETHEUS.union(*found[name])
            labels |= own
            for matcher in node.matchers.matchers:
                assert matcher.name in own, f"{where}: {name} has no label {matcher.name}"
                _check_value(found, name, matcher)
            counts = name.endswith(("_total", "_bucket", "_sum", "_count"))
            assert (function in ("rate", "increase")) == counts, f"{where}: {name} in {function}"
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            asked |= set(node.modifier.labels)
        if isinstance(node, promql_parser.BinaryExpr) and node.modifier is not None:
            matching = node.modifier.matching
            asked |= set(matching.labels) if matching is not None else set()
    assert selectors, f"{where} asks for nothing"
    assert asked <= labels, f"{where}: no label {asked - labels}"


def _check_value(found: Samples, name: str, matcher: Any) -> None:
    """A value that is compared for equality is one that the label has."""
    if matcher.op == promql_parser.MatchOp.Equal and matcher.name not in OF_PROMETHEUS:
        values = {labels.get(matcher.name) for labels in found[name]}
        assert matcher.value in values, f"{name} has no {matcher.name}={matcher.value}"


def test_the_dashboard_shows_each_group_of_metrics_that_a_server_has(found: Samples) -> None:
    shown = " ".join(expression for _, expression in EXPRESSIONS)
    skipped = {"sglang", "python", "promhttp"}
    left = {
        name
        for name in found
        if name.split(":")[0] == "trimaran" and name.split(":")[0] not in skipped
    }
    bases = {re.sub(r"_(bucket|sum|count|total|created)$", "", name) for name in left}
    unseen = {base for base in bases if base not in shown}
    assert unseen == {"trimaran:kv_live_tokens", "trimaran:slo_cost"}  # in the docs alone


def test_the_variables_of_the_dashboard_can_be_filled(found: Samples) -> None:
    variables = {each["name"]: each for each in dashboard()["templating"]["list"]}
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            for name in re.findall(r"\$(?!__)(\w+)", target["expr"]):
                asked = re.fullmatch(r"label_values\((\S+), (\w+)\)", variables[name]["definition"])
                assert asked is not None
                assert asked[2] in OF_PROMETHEUS.union(*found[asked[1]])


def test_panels_dont_overlap_and_say_what_they_show() -> None:
    taken: set[tuple[int, int]] = set()
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 20
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24 and not cells & taken
        taken |= cells
        assert panel["type"] == "row" or len(panel["description"]) > 8


def test_alerts_are_complete_and_advise_options_that_exist() -> None:
    known = set(make_parser()._option_string_actions)
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names) >= 10
    for rule in alerts():
        assert rule["labels"]["severity"] in ("warning", "critical")
        text = rule["annotations"]["summary"] + rule["annotations"]["description"]
        for option in re.findall(r"--[a-z][a-z-]+", text):
            assert option in known, f"{rule['alert']} advises {option}"


def test_the_example_scrapes_the_job_that_the_alerts_ask_for(server: HttpServer) -> None:
    example = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    (job,) = example["scrape_configs"]
    asked = set(re.findall(r'job="(\w+)"', " ".join(rule["expr"] for rule in alerts())))
    assert {job["job_name"]} == asked
    assert example["rule_files"] == ["alerts.yml"]
    assert server.metric("vllm:num_requests_running") == 0  # at the default path
    assert job["metrics_path"] == "/metrics"
