"""Every alert fires when it should and only then: promtool evaluates the rules of two releases."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from equipoise.telemetry.histogram import LONG_S
from tests.support.helm_chart import ROOT, RenderError, one_of, render

RULED = {"metrics": {"prometheusRule": {"enabled": True}}}
DAY_S = 86_400


@dataclass(frozen=True, kw_only=True)
class Case:
    """Series are in promtool's notation, without namespace and release."""

    fires: dict[str, str]
    """Series with which it fires."""
    quiet: dict[str, str]
    """Series with which it only just does not."""
    after: str
    """When it has fired."""
    every: str = "1m"
    """Time between samples, and between evaluations."""
    severity: str = "warning"
    labels: dict[str, str] = field(default_factory=dict)
    """Labels of the alert, other than those of every alert."""


TINY = {"pool": "tiny"}
_CERTIFICATE = 'equipoise_certificate_expiry_timestamp_seconds{pod="w-1",certificate="tls_cert"}'
CASES = {
    "EquipoiseNoLeader": Case(
        fires={'equipoise_leader{pod="b-0"}': "0x9", 'equipoise_leader{pod="b-1"}': "0x9"},
        quiet={'equipoise_leader{pod="b-0"}': "0x9", 'equipoise_leader{pod="b-1"}': "1x9"},
        after="2m",
        severity="critical",
    ),
    "EquipoiseTwoLeaders": Case(
        fires={'equipoise_leader{pod="b-0"}': "1x9", 'equipoise_leader{pod="b-1"}': "1x9"},
        quiet={'equipoise_leader{pod="b-0"}': "1x9", 'equipoise_leader{pod="b-1"}': "0x9"},
        after="2m",
    ),
    "EquipoiseLeadershipFlaps": Case(
        fires={'equipoise_leader_term{pod="b-0"}': "1+1x9"},
        quiet={'equipoise_leader_term{pod="b-0"}': "1 2 3 4 5 5x9"},
        after="9m",
    ),
    "EquipoisePoolDown": Case(
        fires={'equipoise_pool_health{pool="tiny",health="down",pod="b-0"}': "1x9"},
        quiet={'equipoise_pool_health{pool="tiny",health="down",pod="b-0"}': "0 1 0x9"},
        after="2m",
        severity="critical",
        labels=TINY,
    ),
    "EquipoisePoolNotServing": Case(
        # The leader changes, and with it the pod; the pool stays degraded.
        fires={
            'equipoise_pool_health{pool="tiny",health="serving",pod="b-0"}': "0x4 stale",
            'equipoise_pool_health{pool="tiny",health="serving",pod="b-1"}': "_x4 0x9",
        },
        quiet={'equipoise_pool_health{pool="tiny",health="serving",pod="b-0"}': "0x4 1 0x3"},
        after="8m",
        labels=TINY,
    ),
    "EquipoiseRanksMissing": Case(
        # One of four is dead, and the others have re-formed.
        fires={
            'equipoise_intended_ranks{pool="tiny",pod="b-0"}': "4x9",
            'equipoise_ranks{pool="tiny",state="serving",pod="b-0"}': "3x9",
            'equipoise_ranks{pool="tiny",state="loading",pod="b-0"}': "0x9",
            'equipoise_ranks{pool="tiny",state="gone",pod="b-0"}': "0x9",
        },
        quiet={
            'equipoise_intended_ranks{pool="tiny",pod="b-0"}': "4x9",
            'equipoise_ranks{pool="tiny",state="serving",pod="b-0"}': "3x9",
            'equipoise_ranks{pool="tiny",state="loading",pod="b-0"}': "1x9",
        },
        after="7m",
        labels=TINY,
    ),
    "EquipoiseWorkerQuarantined": Case(
        fires={'equipoise_quarantined_workers{pool="tiny"}': "0 1x9"},
        quiet={'equipoise_quarantined_workers{pool="tiny"}': "0x9"},
        after="1m",
        labels=TINY,
    ),
    "EquipoiseUnbalanced": Case(
        fires={
            'equipoise_balancedness{pool="tiny",phase="decode"}': "0.69x30",
            'equipoise_balancedness_by_chance{pool="tiny",phase="decode"}': "0.99x30",
        },
        # Two thousand assignments for each of 320 ranks, and as many for all of them.
        quiet={
            'equipoise_balancedness{pool="tiny",phase="decode"}': "0.7x30",
            'equipoise_balancedness_by_chance{pool="tiny",phase="decode"}': "0.93x30",
            'equipoise_balancedness{pool="light",phase="decode"}': "0.43x30",
            'equipoise_balancedness_by_chance{pool="light",phase="decode"}': "0.375x30",
        },
        after="16m",
        labels={**TINY, "phase": "decode"},
    ),
    "EquipoiseRankSilent": Case(
        fires={'equipoise_rank_silence_max_seconds{pool="tiny"}': "31x9"},
        quiet={'equipoise_rank_silence_max_seconds{pool="tiny"}': "30x9"},
        after="2m",
        labels=TINY,
    ),
    "EquipoiseStoreDown": Case(
        # With the lease in the store nothing leads: no pool has series.
        fires={
            'equipoise_store_readable{pod="b-0"}': "1 0x9",
            'equipoise_store_readable{pod="b-1"}': "0x9",
        },
        quiet={
            'equipoise_store_up{pool="tiny",pod="b-0"}': "1x9",
            'equipoise_store_readable{pod="b-0"}': "1x9",
            'equipoise_store_readable{pod="b-1"}': "0x9",
        },
        after="3m",
        severity="critical",
    ),
    "EquipoisePoolUnreadable": Case(
        # The leader read it before it was damaged.
        fires={
            'equipoise_pool_unreadable{pool="tiny",pod="b-0"}': "0x9",
            'equipoise_pool_unreadable{pool="tiny",pod="b-1"}': "0 1x9",
        },
        quiet={'equipoise_pool_unreadable{pool="tiny",pod="b-0"}': "0 1 0x9"},
        after="3m",
        severity="critical",
        labels=TINY,
    ),
    "EquipoiseRolloutsAborted": Case(
        fires={'equipoise_rollouts_total{pool="tiny",outcome="aborted"}': "0 1 2 3 4 5 5x30"},
        quiet={'equipoise_rollouts_total{pool="tiny",outcome="aborted"}': "0 1 2 2x30"},
        after="20m",
        labels=TINY,
    ),
    "EquipoiseRolloutsRolledBack": Case(
        fires={'equipoise_rollouts_total{pool="tiny",outcome="rolled_back"}': "0 1 2 3 4 4x60"},
        quiet={'equipoise_rollouts_total{pool="tiny",outcome="rolled_back"}': "0 1 1x60"},
        after="30m",
        labels=TINY,
    ),
    "EquipoiseRejections": Case(
        fires={'equipoise_rejections_total{pool="tiny",kind="hello_model"}': "0+12x30"},
        quiet={'equipoise_rejections_total{pool="tiny",kind="hello_model"}': "0+5x30"},
        after="20m",
        labels={**TINY, "kind": "hello_model"},
    ),
    "EquipoisePolicyRejected": Case(
        fires={'equipoise_policy_rejected{pod="b-0"}': "1x9"},
        quiet={'equipoise_policy_rejected{pod="b-0"}': "0x9"},
        after="2m",
    ),
    "EquipoisePoolHeld": Case(
        # The leader changes after half a day, and for five minutes none leads.
        fires={
            'equipoise_pool_paused{pool="tiny",pod="b-0"}': "1x143 stale",
            'equipoise_pool_pinned{pool="tiny",pod="b-0"}': "0x143 stale",
            'equipoise_pool_paused{pool="tiny",pod="b-1"}': "_x145 1x160",
            'equipoise_pool_pinned{pool="tiny",pod="b-1"}': "_x145 0x160",
        },
        # It was resumed for a quarter of an hour.
        quiet={
            'equipoise_pool_paused{pool="tiny",pod="b-0"}': "1x143 0x2 1x160",
            'equipoise_pool_pinned{pool="tiny",pod="b-0"}': "0x307",
        },
        after="25h",
        every="5m",
        labels=TINY,
    ),
    "EquipoiseChecksumFailures": Case(
        fires={'equipoise_worker_checksum_failures_total{pod="w-1"}': "0 0 1x9"},
        quiet={'equipoise_worker_checksum_failures_total{pod="w-1"}': "1x9"},
        after="5m",
        labels={"pod": "w-1"},
    ),
    "EquipoiseLatentFetchesFail": Case(
        fires={
            'equipoise_worker_latent_pulls_total{pod="w-0",outcome="whole"}': "0+80x30",
            'equipoise_worker_latent_pulls_total{pod="w-1",outcome="lost"}': "0+20x30",
        },
        quiet={
            'equipoise_worker_latent_pulls_total{pod="w-0",outcome="whole"}': "0+80x30",
            'equipoise_worker_latent_pulls_total{pod="w-1",outcome="lost"}': "0+5x30",
            'equipoise_worker_latent_pulls_total{pod="w-1",outcome="cancelled"}': "0+20x30",
        },
        after="15m",
    ),
    "EquipoiseGatewayNotReady": Case(
        fires={'equipoise_gateway_ready{pod="g-0"}': "0x9"},
        quiet={'equipoise_gateway_ready{pod="g-0"}': "0 1 0 0 1x9"},
        after="3m",
        severity="critical",
        labels={"pod": "g-0"},
    ),
    "EquipoiseNoGateway": Case(
        fires={},
        quiet={'equipoise_gateway_ready{pod="g-0"}': "0x20"},
        after="6m",
        severity="critical",
    ),
    "EquipoiseGatewayErrors": Case(
        fires={
            'equipoise_gateway_requests_total{pod="g-0",outcome="finished"}': "0+90x30",
            'equipoise_gateway_requests_total{pod="g-1",outcome="failed"}': "0+3x30",
            'equipoise_gateway_requests_total{pod="g-1",outcome="not_admitted"}': "0+7x30",
        },
        quiet={
            'equipoise_gateway_requests_total{pod="g-0",outcome="finished"}': "0+90x30",
            'equipoise_gateway_requests_total{pod="g-0",outcome="ended"}': "0+90x30",
            'equipoise_gateway_requests_total{pod="g-1",outcome="failed"}': "0+4x30",
        },
        after="15m",
        severity="critical",
    ),
    "EquipoiseGatewaySlow": Case(
        fires={
            'equipoise_gateway_ttft_seconds_bucket{pod="g-0",le="10"}': "0+90x30",
            'equipoise_gateway_ttft_seconds_bucket{pod="g-0",le="30"}': "0+100x30",
            'equipoise_gateway_ttft_seconds_bucket{pod="g-0",le="+Inf"}': "0+100x30",
        },
        quiet={
            'equipoise_gateway_ttft_seconds_bucket{pod="g-0",le="5"}': "0+90x30",
            'equipoise_gateway_ttft_seconds_bucket{pod="g-0",le="10"}': "0+100x30",
            'equipoise_gateway_ttft_seconds_bucket{pod="g-0",le="+Inf"}': "0+100x30",
        },
        after="20m",
    ),
    "EquipoisePoisonRequests": Case(
        fires={
            'equipoise_gateway_poison_requests_total{pod="g-0"}': "0x30",
            'equipoise_gateway_poison_requests_total{pod="g-1"}': "0 0 1x30",
        },
        quiet={
            'equipoise_gateway_poison_requests_total{pod="g-0"}': "0x30",
            'equipoise_gateway_poison_requests_total{pod="g-1"}': "3x30",
        },
        after="9m",
    ),
    "EquipoisePromptsNotHandedOver": Case(
        fires={
            'equipoise_gateway_handovers_total{pod="g-0"}': "0+90x30",
            'equipoise_gateway_direct_total{pod="g-0",reason="form"}': "0+4x30",
            'equipoise_gateway_direct_total{pod="g-1",reason="no_prefill"}': "0+6x30",
        },
        quiet={
            'equipoise_gateway_handovers_total{pod="g-0"}': "0+90x30",
            'equipoise_gateway_direct_total{pod="g-0",reason="form"}': "0+4x30",
            'equipoise_gateway_direct_total{pod="g-1",reason="short"}': "0+90x30",
        },
        after="15m",
    ),
    "EquipoiseCertificateExpires": Case(
        fires={_CERTIFICATE: f"{6 * DAY_S}x9"},
        quiet={_CERTIFICATE: f"{8 * DAY_S}x9"},
        after="2m",
        severity="critical",
        labels={"pod": "w-1", "certificate": "tls_cert"},
    ),
}


@pytest.fixture(scope="module")
def promtool():
    """The binary: that of `make promtool`, or PATH's."""
    for place in (ROOT / ".cache" / "tools" / "promtool", shutil.which("promtool")):
        if place and Path(place).exists():
            return str(place)
    missing = "promtool is not here: `make promtool` fetches it"
    if os.environ.get("EQUIPOISE_REQUIRE_PROMTOOL"):
        pytest.fail(missing)
    pytest.skip(missing)
    return None


def groups_of(release, namespace="moe", values=RULED):
    rule = one_of(
        render(values, release=release, namespace=namespace),
        "PrometheusRule",
        f"{release}-equipoise",
    )
    return rule["spec"]["groups"]


def check(promtool, *arguments):
    done = subprocess.run(
        [promtool, *arguments], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_every_rule_and_its_texts(promtool, tmp_path):
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups_of("eq")}))
    check(promtool, "check", "rules", tmp_path / "rules.yaml")


def test_every_alert_has_a_case():
    rules = [rule for group in groups_of("eq") for rule in group["rules"]]
    assert {rule["alert"] for rule in rules if "alert" in rule} == CASES.keys()


def test_the_texts_of_an_alert_name_labels_that_it_has():
    for group in groups_of("eq"):
        for rule in group["rules"]:
            texts = " ".join(rule.get("annotations", {}).values())
            named = set(re.findall(r"(?<!with )\$labels\.(\w+)", texts))
            if named:  # Labels that a rule adds are not among those of its texts.
                assert named <= CASES[rule["alert"]].labels.keys(), rule


def test_every_alert_fires_when_it_should_and_only_then(promtool, tmp_path):
    # The texts are left out, because promtool would compare them too.
    rules = {
        "groups": [
            {
                "name": f"{release}-{group['name']}",
                "rules": [
                    {key: value for key, value in rule.items() if key != "annotations"}
                    for rule in group["rules"]
                ],
            }
            for release in ("eq", "other")
            for group in groups_of(release)
        ]
    }
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    paths = []
    for every in {case.every for case in CASES.values()}:
        tests = [
            one
            for name, case in CASES.items()
            for one in _tests_of(name, case)
            if case.every == every
        ]
        suite = {"rule_files": ["rules.yaml"], "evaluation_interval": every, "tests": tests}
        paths.append(tmp_path / f"tests-{every}.yaml")
        paths[-1].write_text(yaml.safe_dump(suite))
    check(promtool, "test", "rules", *paths)


def _tests_of(name, case):
    """The same series in either release: one fires, and never for the other."""
    for release, other in (("eq", "other"), ("other", "eq")):
        series = [*_series(case.fires, release), *_series(case.quiet, other)]
        labels = {**case.labels, "severity": case.severity, "namespace": "moe", "release": release}
        yield {
            "name": f"{name} of {release}",
            "interval": case.every,
            "input_series": series,
            "alert_rule_test": [
                {
                    "eval_time": case.after,
                    "alertname": name,
                    "exp_alerts": [{"exp_labels": labels}],
                }
            ],
        }
    yield {
        "name": f"{name} does not fire",
        "interval": case.every,
        "input_series": [*_series(case.quiet, "eq"), *_series(case.quiet, "other")],
        "alert_rule_test": [{"eval_time": case.after, "alertname": name, "exp_alerts": []}],
    }


def _series(series, release):
    return [
        {"series": f'{name[:-1]},namespace="moe",release="{release}"}}', "values": values}
        for name, values in series.items()
    ]


def test_thresholds_are_values():
    changed = {
        "metrics": {
            "prometheusRule": {
                "enabled": True,
                "runbook": "https://wiki.example/eq",
                "thresholds": {"balancedness": 0.85, "unbalancedFor": "1h", "rolloutsAborted": 12},
            }
        }
    }
    rules = {
        rule.get("alert"): rule
        for group in groups_of("eq", values=changed)
        for rule in group["rules"]
    }
    unbalanced = rules["EquipoiseUnbalanced"]
    assert "< 0.85 * " in unbalanced["expr"]
    assert unbalanced["for"] == "1h"
    assert unbalanced["annotations"]["runbook_url"] == "https://wiki.example/eq#equipoiseunbalanced"
    assert rules["EquipoiseRolloutsAborted"]["expr"].endswith("> 12")


def test_the_time_to_the_first_token_has_a_limit_that_its_histogram_can_exceed():
    def limited(seconds):
        thresholds = {"gatewayTtftSeconds": seconds}
        return {"metrics": {"prometheusRule": {"enabled": True, "thresholds": thresholds}}}

    render(limited(LONG_S[-1] - 1))
    with pytest.raises(RenderError, match="gatewayTtftSeconds"):
        render(limited(LONG_S[-1]))  # No percentile is above the last finite bound.


def test_a_release_has_the_rules_of_its_own_processes_only():
    names = [group["name"] for group in groups_of("eq")]
    assert names == [f"equipoise-{one}" for one in ("balancer", "worker", "gateway", "process")]
    second = {
        **RULED,
        "balancer": {"enabled": False, "externalAddress": "eq-equipoise-balancer.moe.svc:7070"},
    }
    names = [group["name"] for group in groups_of("decode", values=second)]
    assert names == [f"equipoise-{one}" for one in ("worker", "gateway", "process")]
