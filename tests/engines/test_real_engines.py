"""Ranks of vLLM's and SGLang's real code are balanced by a real balancer: `make test-engines`.

After every pass each rank compares its slots, byte for byte, with the experts that its table names;
afterwards the tables that all ranks had after every pass are compared, and reported loads with
routed tokens (`tests.engines.real.Run.records`).
"""

import json
import re

import pytest

from tests.engines.rank_main import WINDOW_PASSES

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]

SAME = {"weights": True, "tables": True, "counts": True}


def test_loads_even_out_twice_with_the_engines_own_bytes_and_tables(real_balancer, run_of):
    run = run_of(equal=True)
    run.until_balanced()
    before = len(real_balancer.decisions())
    run.control(traffic=1)
    run.until_balanced()

    def plans():
        return [one for one in real_balancer.decisions()[before:] if one.kind == "plan"]

    def is_balanced():
        return [one.balancedness_current > 1 / 1.1 for one in plans()]

    # The balancer sees it a window later.
    real_balancer.until(lambda _: False in is_balanced() and is_balanced()[-1])
    for one in run.records():
        assert len(one["switches"]) >= 2
        assert one["equal"] == [SAME] * len(one["switches"])
        assert (one["planner_runs"], one["stopped"]) == (0, "")
        assert one["imbalance"][0] > 1.5
    # Traffic shifts within a window, so that a plan may see both kinds; the next sees the new one.
    shifted = is_balanced().index(False)
    again = is_balanced().index(True, shifted)
    assert sum(one.accepted for one in plans()[shifted:again]) <= 2
    print(json.dumps(one))


def after_changes(imbalance):
    """The windows that begin 400 passes or more after the start and the shift half-way."""
    half, skipped = len(imbalance) // 2, 400 // WINDOW_PASSES
    return [*imbalance[skipped:half], *imbalance[half + skipped :]]


def test_five_thousand_passes_are_balanced_as_well_as_by_the_engine_itself(real_balancer, run_of):
    told = {}
    for planner in ("equipoise", "engine"):
        run = run_of(passes=5000, pass_ms=12.0, planner=planner)
        found = run.records()
        settled = after_changes(found[0]["imbalance"])
        told[planner] = {
            "mean": round(sum(settled) / len(settled), 3),
            "worst": max(settled),
            "moves in 1000 passes": round(found[0]["moves"] / 5),
            "switches": len(found[0]["switches"]),
            "switch_us": sorted(switch[2] for one in found for switch in one["switches"]),
            "hook_us": [one["hook_us"] for one in found],
            "hook_cpu_us": [one["hook_cpu_us"] for one in found],
        }
        print(run.options.engine, planner, json.dumps(told[planner]))
    assert told["equipoise"]["mean"] < 1.1
    assert told["equipoise"]["mean"] < told["engine"]["mean"] + 0.05


@pytest.mark.parametrize("update", ["updates", "hidden_updates"])
def test_updated_weights_are_hashed_again_and_balanced_on(real_balancer, run_of, update):
    """The pool is paused, as the guide says, while weights are updated behind the engine's back."""
    run = run_of(equal=True)
    run.until_balanced()
    epoch = real_balancer.status().epoch
    if update == "hidden_updates":
        real_balancer.pause()
    run.control(**{update: 1})
    run.until_said("all ranks have hashed the updated weights", times=4)
    if update == "hidden_updates":
        real_balancer.resume()
    run.control(traffic=1)
    run.until_balanced()
    real_balancer.until(lambda status: status.epoch > epoch and not status.health_reason)
    assert not real_balancer.status().quarantined
    for one in run.records():
        assert one["stopped"] == ""
        assert one["equal"] == [SAME] * len(one["switches"])


def test_an_observer_reports_loads_and_moves_nothing(real_balancer, run_of):
    run = run_of(environment={"EQUIPOISE_MODE": "observe"})
    real_balancer.until(lambda _: any(one.accepted for one in real_balancer.decisions()))
    real_balancer.until(lambda _: "EQUIPOISE_MODE is observe" in real_balancer.log)
    found = run.records()
    assert [one["switches"] for one in found] == [[]] * 4
    assert found[0]["moves"] == 0
    assert found[0]["reports"]
    (decision, *_) = [one for one in real_balancer.decisions() if one.accepted]
    assert decision.balancedness_proposed > decision.balancedness_current + 0.2


def test_pipeline_stages_are_pools_of_their_own(real_balancer, run_of):
    """Two stages of two ranks; the second waits in each pass for what the first has computed."""
    run = run_of(stages=2)
    run.until_balanced()
    for stage in run.records():
        for one in stage:
            assert one["switches"]
            assert (one["planner_runs"], one["stopped"]) == (0, "")
            assert one["imbalance"][0] > 1.2
    assert {"rank 0 of pool moe-stage0", "rank 1 of pool moe-stage1"} <= set(
        re.findall(r"rank \d of pool [\w-]+", run.log)
    )


def test_an_engine_whose_own_planner_is_active_is_left_alone(run_of):
    run = run_of(passes=150, planner="both", port=1)
    assert all(one["planner_runs"] >= 1 for one in run.records())
    assert "own planner is active" in run.log
