"""Histograms tell apart all durations that the timeouts of their waits allow by default."""

from dataclasses import fields

from equipoise.gateway.settings import GatewaySettings
from equipoise.planning.policy import Policy
from equipoise.telemetry.histogram import LONG_S, SHORT_S
from equipoise.worker.settings import WorkerSettings


def default(settings, name):
    return next(field.default for field in fields(settings) if field.name == name)


def test_plans_waves_and_first_tokens_are_told_apart_up_to_their_timeouts():
    policy = Policy()
    # Once a rank has switched, the others get as long to confirm it.
    wave_s = policy.stage_timeout_s + 2 * policy.switch_timeout_s
    waits = ("queue_timeout_s", "first_token_timeout_s", "rank_queue_timeout_s")
    of_requests = [default(GatewaySettings, name) for name in waits]
    assert max(policy.plan_timeout_s, wave_s, *of_requests) <= LONG_S[-1]


def test_steps_and_tokens_are_told_apart_up_to_their_timeouts():
    of_ranks = [default(WorkerSettings, name) for name in ("step_timeout_s", "outage_timeout_s")]
    assert max(*of_ranks, default(GatewaySettings, "silence_timeout_s")) <= SHORT_S[-1]
