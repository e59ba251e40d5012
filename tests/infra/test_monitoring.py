"""Prometheus' configuration, the alerts and the Grafana dashboard: well formed, and about metrics that exist.

Where `promtool` (Debian: prometheus) is on PATH it judges them too; without it these structural checks stand alone.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from eaglenest import metrics
from eaglenest.services.access import token_path
from eaglenest.settings import Settings

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "infra/prometheus"
DASHBOARD = json.loads((ROOT / "infra/grafana/eaglenest.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"] for rule in group["rules"]
]
PROMTOOL = shutil.which("promtool")

GRAFANA_BUILT_IN = {"__rate_interval": "1m"}
PROMQL_WORDS = {
    *("by", "without", "on", "ignoring", "group_left", "group_right", "bool", "offset", "and", "or", "unless"),
    *("sum", "max", "min", "avg", "count", "rate", "increase", "histogram_quantile", "scalar"),
}


def dashboard_variables() -> list[dict[str, str]]:
    """Every choice a reader of the dashboard can make, as {variable: value}."""
    (source,) = (v for v in DASHBOARD["templating"]["list"] if v["type"] == "custom")
    return [{source["name"]: option["value"], **GRAFANA_BUILT_IN} for option in source["options"]]


def fill(expression: str, variables: dict[str, str]) -> str:
    filled = re.sub(r"\$\{?(\w+)(?::raw)?\}?", lambda found: variables[found.group(1)], expression)
    assert "$" not in filled
    return filled


def dashboard_expressions() -> list[str]:
    return [
        fill(target["expr"], variables)
        for variables in dashboard_variables()
        for panel in PANELS
        for target in panel["targets"]
    ]


def alert_expressions() -> list[str]:
    return [rule["expr"] for rule in RULES]


def names_in(expression: str) -> set[str]:
    """The metric names of a PromQL expression: its identifiers less label matchers, groupings, ranges and words."""
    bare = re.sub(r'"(\\.|[^"\\])*"', "", expression)
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]", " ", bare)
    bare = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", bare)
    return set(re.findall(r"(?<![\w:.])[A-Za-z_:][\w:]*", bare)) - PROMQL_WORDS


def balanced(expression: str) -> bool:
    pairs, open_ = {")": "(", "]": "[", "}": "{"}, []
    for character in re.sub(r'"(\\.|[^"\\])*"', "", expression):
        if character in pairs.values():
            open_.append(character)
        elif character in pairs and (not open_ or open_.pop() != pairs[character]):
            return False
    return not open_


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ('sum by (le) (rate(a_bucket{x="y{"}[5m])) / 2', {"a_bucket"}),
        ("vllm:a - on (replica) group_left () b offset 1d > 1e3", {"vllm:a", "b"}),
    ],
)
def test_names_are_found_in_promql(expression: str, names: set[str]) -> None:
    assert names_in(expression) == names


@pytest.mark.parametrize("expression", alert_expressions() + dashboard_expressions())
def test_expressions_are_balanced_and_use_declared_metrics_only(expression: str) -> None:
    assert balanced(expression), expression
    assert names_in(expression), "no metric at all"
    assert names_in(expression) <= metrics.known_series()


@pytest.mark.parametrize("broken", ["sum(rate(a[1m])", "a{b='c'", "(a]"])
def test_an_unbalanced_expression_is_noticed(broken: str) -> None:
    assert not balanced(broken)


def test_every_metric_of_ours_is_shown() -> None:
    shown = set().union(*map(names_in, dashboard_expressions()))
    for metric in metrics.EAGLENEST_METRICS:
        assert shown & set(metric.series(metric.ray_name)), f"{metric.name} is on no panel"


# --- Prometheus


def test_prometheus_scrapes_rays_nodes_and_vllm_on_the_default_ports() -> None:
    settings = Settings.model_fields
    dashboard, serve = settings["ray_dashboard_port"].default, settings["serve_port"].default
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    assert set(config) == {"global", "rule_files", "scrape_configs"}
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    assert set(jobs) == {"ray", "vllm"}
    assert jobs["ray"]["http_sd_configs"][0]["url"] == f"http://127.0.0.1:{dashboard}/api/prometheus/sd"
    token = PROMETHEUS / jobs["ray"]["http_sd_configs"][0]["authorization"]["credentials_file"]
    assert token.resolve() == token_path(Settings(runs_dir=ROOT / "runs"))
    assert jobs["ray"]["file_sd_configs"][0]["files"] == ["/tmp/ray/prom_metrics_service_discovery.json"]
    assert jobs["vllm"]["metrics_path"] == "/metrics"
    assert jobs["vllm"]["static_configs"] == [{"targets": [f"127.0.0.1:{serve}"]}]
    for rule_file in config["rule_files"]:
        assert (PROMETHEUS / rule_file).is_file()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_each_alert_says_what_is_wrong_and_what_to_do(rule: dict[str, Any]) -> None:
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in {"warning", "critical"}
    assert rule["annotations"]["summary"].strip()
    assert rule["annotations"]["action"].strip()
    assert re.fullmatch(r"\d+[smhd]", rule.get("for", "0s"))


def test_each_alert_has_a_test_of_its_own() -> None:
    cases = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]
    raised = {case["alertname"] for test in cases for case in test["alert_rule_test"] if case.get("exp_alerts")}
    assert raised == {rule["alert"] for rule in RULES}


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not on PATH (Debian: apt-get install prometheus)")
@pytest.mark.parametrize("arguments", ["check config prometheus.yml", "test rules alerts_test.yml"])
def test_promtool_agrees(arguments: str) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments.split()], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not on PATH (Debian: apt-get install prometheus)")
def test_promtool_parses_the_dashboard(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    rules = [{"record": f"panel:{i}", "expr": expression} for i, expression in enumerate(dashboard_expressions())]
    (tmp_path / "panels.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run([PROMTOOL, "check", "rules", "panels.yml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# --- Grafana


def test_the_dashboard_keeps_its_address() -> None:
    assert DASHBOARD["uid"] == "eaglenest"
    assert "id" not in DASHBOARD, "an id belongs to one Grafana; leave it out of a file to import"
    assert DASHBOARD["title"]


def test_panels_have_ids_places_and_words_of_their_own() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    cells = [
        (x, y)
        for panel in PANELS
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert max(x for x, _ in cells) < 24
    for panel in PANELS:
        assert panel["title"]
        assert panel["description"].endswith(".")


def test_every_panel_asks_the_chosen_data_source_for_something() -> None:
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    for panel in PANELS:
        assert panel["datasource"] == chosen
        assert panel["targets"]
        for target in panel["targets"]:
            assert target["datasource"] == chosen
            assert target["expr"].strip()
            assert target["legendFormat"].strip()
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)


def test_variables_used_are_declared() -> None:
    declared = {variable["name"] for variable in DASHBOARD["templating"]["list"]} | set(GRAFANA_BUILT_IN)
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(PANELS)))
    assert used <= declared
