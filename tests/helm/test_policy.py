"""The balancer can read the policy that the chart mounts, and edits reach it."""

from equipoise.policy.reading import read_policy
from tests.support.helm_chart import FULL, one_of, pod_specs, render

CHOSEN = {
    "policy": {
        "defaults": {"interval": "20s", "judging": {"minGain": 0.05}},
        "pools": {"decode": {"interval": "5s", "pause": True}},
    }
}


def mounted(values):
    (text,) = one_of(render(values), "ConfigMap", "eq-equipoise-policy")["data"].values()
    return read_policy(text, source="policy.yaml")


def test_the_balancer_can_read_the_policy_of_the_chart():
    assert mounted({}).pools == {}
    chosen = mounted(CHOSEN)
    assert (chosen.defaults.interval_s, chosen.defaults.min_gain) == (20.0, 0.05)
    decode = chosen.pools["decode"]
    assert (decode.interval_s, decode.min_gain, decode.pause) == (5.0, 0.05, True)


def test_edits_reach_the_balancer_because_the_folder_is_mounted_and_nothing_restarts():
    before, after = render({}), render(CHOSEN)
    assert pod_specs(before) == pod_specs(after)
    spec = pod_specs(before)["Deployment/eq-equipoise-balancer"]
    (container,) = spec["containers"]
    (mount,) = [one for one in container["volumeMounts"] if one["name"] == "policy"]
    assert "subPath" not in mount
    (flag,) = [one for one in container["args"] if one.startswith("--policy=")]
    assert flag == f"--policy={mount['mountPath']}/policy.yaml"


def test_an_existing_config_map_replaces_the_charts():
    objects = render({**FULL, "policy": {"existingConfigMap": "mine"}})
    assert not [
        one
        for one in objects
        if one["kind"] == "ConfigMap" and one["metadata"]["name"].endswith("-policy")
    ]
    spec = pod_specs(objects)["Deployment/eq-equipoise-balancer"]
    (volume,) = [one for one in spec["volumes"] if one["name"] == "policy"]
    assert volume["configMap"] == {"name": "mine"}
