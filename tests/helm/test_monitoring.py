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
GROUPS = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"] if "alert" in rule]
RECORDED = {rule["record"] for group in GROUPS for rule in group["rules"] if "record" in rule}
DASHBOARD = json.loads((CHART / "files" / "dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
SHOWN = {
    **{
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in PANELS
        for target in panel["targets"]
    },
    **{
        f"annotation {annotation['name']}": annotation["expr"]
        for annotation in DASHBOARD["annotations"]["list"]
    },
}
"""Expressions of the dashboard."""
EXPRESSIONS = {
    **{
        rule.get("alert", rule.get("record")): re.sub(
            r"<\w+>", "0", rule["expr"].replace("<fleet>", 'namespace="moe",release="eq"')
        )
        for group in GROUPS
        for rule in group["rules"]
    },
    **{title: expression.replace("$__rate_interval", "5m") for title, expression in SHOWN.items()},
}
FROM_PROMETHEUS = {"job", "namespace", "pod", "le"}
OF_RELEASES = {"release", "worker"}
"""Added by the ServiceMonitors."""


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
    assert used <= known | FROM_PROMETHEUS | OF_RELEASES
    assert set(re.findall(r"\bequipoise:[\w:]+", expression)) <= RECORDED


@pytest.mark.parametrize("expression", EXPRESSIONS.values(), ids=EXPRESSIONS)
def test_an_expression_selects_namespace_and_release_of_every_series(expression):
    series = re.findall(r"\b(?:equipoise[_:][\w:]+|process_\w+)(\{[^}]*\})?", expression)
    assert series
    for selector in series:
        assert {"namespace", "release"} <= set(re.findall(r"(\w+)=", selector)), expression


def test_a_misspelt_expression_is_detected():
    with pytest.raises(ValueError, match=r".+"):
        promql_parser.parse("sum by pool (equipoise_ranks")


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_an_alert_has_a_summary_a_description_and_a_severity(rule, documented):
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert {"summary", "description"} == set(rule["annotations"])
    shown = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    names = re.findall(r"equipoise_\w+", rule["expr"])
    known = set().union(*(documented[name] for name in names)) if names else {"pool"}
    assert shown <= known | FROM_PROMETHEUS | OF_RELEASES


def test_every_series_of_a_panel_has_a_legend_of_its_own(documented):
    for panel in PANELS:
        for target in panel["targets"]:
            expression, shown = target["expr"], re.findall(r"{{(\w+)}}", target["legendFormat"])
            if group := re.search(r"by \(([^)]*)\)", expression):
                differ = {label.strip() for label in group.group(1).split(",")}
            elif re.match(r"(sum|max|avg)\(", expression):
                differ = set()
            else:
                (name,) = re.findall(r"\b(?:equipoise|process)_\w+", expression)
                # Ranks of one pod differ in nothing but their names; balancers differ in pods.
                process = "worker" if name.startswith("equipoise_worker_") else "pod"
                labels = documented.get(name, set())
                differ = labels if "pool" in labels else labels | {process}
            # A dashboard shows one release; where it shows several, pools have a name in each.
            assert differ - {"le", "namespace", "release"} <= set(shown), target


def test_the_operations_guide_covers_every_alert_and_every_metric():
    operations = (ROOT / "docs" / "operations.md").read_text()
    metrics = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r'^\| <a id="(\w+)"></a>`(Equipoise\w+)` \|', operations, re.MULTILINE)
    assert all(anchor == alert.lower() for anchor, alert in rows)
    alerts = [alert for _, alert in rows]
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


def test_every_series_of_a_panel_has_its_own_unit():
    units = dict(
        re.findall(
            r"^\| `(equipoise_\w+)` \| \w+ \| ([^|]*) \|",
            (ROOT / "docs" / "metrics.md").read_text(),
            re.MULTILINE,
        )
    )
    units |= {"process_resident_memory_bytes": "bytes", "process_cpu_seconds_total": "cores"}
    for panel in PANELS:
        of_series = {
            one["matcher"]["options"]: one["properties"][0]["value"]
            for one in panel["fieldConfig"]["overrides"]
        }
        shown = {}
        for target in panel["targets"]:
            names = re.findall(r"\b(equipoise_\w+|process_\w+)\{", target["expr"])
            names = [name.removesuffix("_bucket") for name in names]
            unit = of_series.get(target["refId"], panel["fieldConfig"]["defaults"]["unit"])
            is_rate = "rate(" in target["expr"] and "histogram_quantile" not in target["expr"]
            shown.setdefault(unit, set()).add((units[names[0]], is_rate))
        mixed = {unit: kinds for unit, kinds in shown.items() if unit not in {"none", "reqps"}}
        assert all(len(kinds) == 1 for kinds in mixed.values()), (panel["title"], mixed)
        for unit, kinds in shown.items():
            if {"bytes", "seconds", "tokens", "cores"} & {kind for kind, _ in kinds}:
                assert unit != "none", panel["title"]


def test_rates_and_annotations_on_the_dashboard_follow_the_resolution():
    rates = re.findall(r"rate\([^[]*\[([^]]*)\]", str(SHOWN))
    assert set(rates) == {"$__rate_interval"}
    for annotation in DASHBOARD["annotations"]["list"]:
        assert re.findall(r"\[([^]]*)\]", annotation["expr"]) == ["$__rate_interval"]


def test_a_percentile_on_the_dashboard_is_of_one_release_that_its_legend_names():
    targets = [target for panel in PANELS for target in panel["targets"]]
    percentiles = [one for one in targets if "histogram_quantile" in one["expr"]]
    assert percentiles
    for target in percentiles:
        (group,) = re.findall(r"by \(([^)]*)\)", target["expr"])
        assert {"namespace", "release"} <= set(group.split(", ")), target
        shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert shown & {"release", "pool"}, target


def test_the_dashboard_selects_namespace_release_and_pool():
    names = [one["name"] for one in DASHBOARD["templating"]["list"]]
    assert names == ["datasource", "namespace", "release", "pool"]


def test_alerts_and_dashboard_are_installed_if_enabled():
    objects = render(MONITORED)
    rules = one_of(objects, "PrometheusRule", "eq-equipoise")["spec"]["groups"]
    for rule in [one for group in rules for one in group["rules"]]:
        assert rule["labels"].items() >= {"namespace": "moe", "release": "eq"}.items()
        assert not re.findall(r"<\w", f"{rule['expr']} {rule.get('for')}")
    monitors = [one for one in objects if one["kind"] == "ServiceMonitor"]
    for monitor in monitors:
        first, *others = monitor["spec"]["endpoints"][0]["relabelings"]
        assert first == {"targetLabel": "release", "replacement": "eq"}
        is_worker = monitor["metadata"]["name"].endswith("worker")
        assert [one["targetLabel"] for one in others] == ["worker"] * is_worker
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
