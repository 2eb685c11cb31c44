"""Alerts and dashboard have valid expressions over existing metrics."""

import json
import re

import promql_parser
import pytest
import yaml

from tests.support.helm_chart import CHART, ROOT, one_of, render

MONITORED = {
    "metrics": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True},
        "dashboard": {"enabled": True},
    }
}
RULES = [
    rule
    for group in yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
DASHBOARD = json.loads((CHART / "files" / "dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = {
    **{rule["alert"]: rule["expr"] for rule in RULES},
    **{
        f"{panel['title']} {target['refId']}": target["expr"].replace("$pool", "decode")
        for panel in PANELS
        for target in panel["targets"]
    },
}
FROM_PROMETHEUS = {"job", "namespace", "pod", "le"}


@pytest.fixture(scope="module")
def documented():
    """Labels of each metric, as docs/metrics.md has them, which is held to what is scraped."""
    rows = re.findall(
        r"^\| `(equipoise_\w+)` \| (\w+) \| [^|]* \| ([^|]*) \|",
        (ROOT / "docs" / "metrics.md").read_text(),
        re.MULTILINE,
    )
    labels = {}
    for name, kind, names in rows:
        known = set(re.findall(r"`(\w+)`", names))
        labels[name] = known
        if kind == "histogram":
            labels.update({f"{name}_{part}": known for part in ("bucket", "sum", "count")})
    return labels


@pytest.mark.parametrize("expression", EXPRESSIONS.values(), ids=EXPRESSIONS)
def test_an_expression_parses_and_names_metrics_and_labels_that_exist(expression, documented):
    names = set(re.findall(r"\b(equipoise_\w+|process_\w+)", expression))
    promql_parser.parse(expression)
    of_ours = {name for name in names if name.startswith("equipoise_")}
    assert of_ours <= documented.keys()
    used = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)\s*\"", expression))
    for group in re.findall(r"by \(([^)]*)\)", expression):
        used |= {label.strip() for label in group.split(",")}
    known = set().union(*(documented[name] for name in of_ours)) if of_ours else set()
    assert used <= known | FROM_PROMETHEUS


def test_a_misspelt_expression_is_detected():
    with pytest.raises(ValueError, match=r".+"):
        promql_parser.parse("sum by pool (equipoise_ranks")


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_an_alert_has_a_summary_a_description_and_a_severity(rule, documented):
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert {"summary", "description"} == set(rule["annotations"])
    shown = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    names = re.findall(r"equipoise_\w+", rule["expr"])
    assert shown <= set().union(*(documented[name] for name in names)) | FROM_PROMETHEUS


def test_the_operations_guide_covers_every_alert_and_every_metric():
    operations = (ROOT / "docs" / "operations.md").read_text()
    metrics = (ROOT / "docs" / "metrics.md").read_text()
    alerts = re.findall(r"^\| `(Equipoise\w+)` \|", operations, re.MULTILINE)
    assert sorted(alerts) == sorted(rule["alert"] for rule in RULES)
    section = operations.partition("\n## Metrics\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| (`equipoise_.*?) \|", section, re.MULTILINE)
    named = [name for names in listed for name in re.findall(r"`(equipoise_\w+)`", names)]
    known = re.findall(r"^\| `(equipoise_\w+)` \|", metrics, re.MULTILINE)
    assert sorted(named) == sorted(known)


def test_panels_have_titles_and_units_and_do_not_overlap():
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for panel in PANELS:
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "${datasource}"


def test_alerts_and_dashboard_are_installed_unchanged_if_enabled():
    objects = render(MONITORED)
    rule = one_of(objects, "PrometheusRule", "eq-equipoise")
    assert [one for group in rule["spec"]["groups"] for one in group["rules"]] == RULES
    dashboard = one_of(objects, "ConfigMap", "eq-equipoise-dashboard")
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(dashboard["data"]["equipoise.json"]) == DASHBOARD
    kinds = {one["kind"] for one in render({})}
    assert not {"PrometheusRule", "ServiceMonitor"} & kinds


def test_a_monitor_selects_a_service_that_has_its_port():
    objects = render(MONITORED)
    monitors = [one for one in objects if one["kind"] == "ServiceMonitor"]
    assert monitors
    for monitor in monitors:
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        (service,) = [
            one
            for one in objects
            if one["kind"] == "Service" and wanted <= one["metadata"]["labels"].items()
        ]
        ports = {port["name"] for port in service["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= ports
