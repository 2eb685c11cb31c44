"""GPU values: FP8 by name, a memory plan that equals the worker's, and the ready values files."""

import importlib.util
import json

import pytest
import yaml

from equipoise.cli.explain import run
from equipoise.planning.phase import Phase
from equipoise.planning.policy import Policy
from equipoise.planning.units import UNITS, UnitName
from equipoise.policy.book import PolicyBook
from equipoise.worker.settings import WorkerSettings
from equipoise_model.presets import DEEPSEEK_V3
from tests.support.helm_chart import CHART, ROOT, RenderError, containers, render

READY = sorted(CHART.glob("values-*.yaml"))
GIB = 2**30


def merged(values, changes):
    return {
        **values,
        **{
            key: merged(values.get(key, {}), change) if isinstance(change, dict) else change
            for key, change in changes.items()
        },
    }


def flags_of(values):
    (worker,) = [
        one for name, one in containers(render(values)).items() if name.endswith("/worker")
    ]
    return dict(one.lstrip("-").partition("=")[::2] for one in worker["args"][1:])


@pytest.fixture
def explained(tmp_path, capsys):
    """The worker's own plan for the flags of a release."""
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3.to_dict()))

    def plan(values):
        flags = flags_of(values)
        settings = WorkerSettings(
            checkpoint=tmp_path,
            explain=True,
            json=True,
            device=flags["device"],
            weights=flags["weights"],
            latents=flags["latents"],
            batch_invariant="batch-invariant" in flags,
            shared_as_routed="shared-as-routed" in flags,
            device_memory_gib=values["worker"]["gpu"]["memoryGiB"],
            **{
                name: int(flags[name.replace("_", "-")])
                for name in (
                    "num_ranks",
                    "slots_per_rank",
                    "places",
                    "spare_slots",
                    "cache_tokens",
                    "context_length",
                    "max_requests",
                    "max_step_tokens",
                    "max_graph_rows",
                    "speculate",
                )
            },
        )
        status = run(settings)
        return status, json.loads(capsys.readouterr().out)

    return plan


@pytest.mark.parametrize("file", READY, ids=[file.stem for file in READY])
def test_ready_values_render_and_fit(file, explained):
    values = yaml.safe_load(file.read_text())
    flags = flags_of(values)
    assert (flags["device"], flags["weights"]) == ("cuda", "fp8")
    assert "no-batch-invariant" in flags
    status, plan = explained(values)
    assert status == 0, plan["obstacle"]
    comment = file.read_text().splitlines()[0]
    needed, offered = plan["needed_bytes"] / GIB, plan["capacity_bytes"] / GIB
    assert f"shows {needed:.0f} of {offered:.0f} GiB per GPU" in comment
    limit = int(values["worker"]["resources"]["limits"]["memory"].removesuffix("Gi"))
    assert limit * GIB > plan["host_needed_bytes"] * values["worker"].get("localRanks", 1)


# How values differ from those of 32 H100 before a rank needs too much, and what is to be lowered.
TOO_LARGE = {
    "latents": ({"cacheTokens": 500_000}, "lower worker.cacheTokens, maxRequests or contextLength"),
    "requests": ({"cacheTokens": 0}, "lower worker.cacheTokens, maxRequests or contextLength"),
    "experts": ({"slotsPerRank": 20}, "lower worker.slotsPerRank (experts can shrink the most)"),
    "experts in shared places": (
        {"slotsPerRank": 20, "places": 900, "numMoeLayers": 58},
        "lower worker.places (experts can shrink the most)",
    ),
    "experts in shared places, with drafts": (
        {"slotsPerRank": 20, "places": 820, "numMoeLayers": 59, "speculate": 1, "spareSlots": 40},
        "lower worker.places (experts can shrink the most)",
    ),
    "staging": ({"spareSlots": 9}, "lower worker.spareSlots (staging slots can shrink the most)"),
    "steps": (
        {"maxStepTokens": 65_536, "cacheTokens": 32_768},
        "lower worker.maxStepTokens (activations can shrink the most)",
    ),
    "long contexts": (
        {"contextLength": 131_072, "cacheTokens": 131_072, "maxStepTokens": 32_768},
        "lower worker.maxStepTokens",
    ),
    "one rank": ({"replicas": 1, "slotsPerRank": 256, "cacheTokens": 40_000}, "add ranks, or use"),
    "latents in fp8": ({"latents": "fp8", "cacheTokens": 800_000}, "lower worker.cacheTokens"),
    "drafts": (
        {"speculate": 1, "slotsPerRank": 14},
        "lower worker.slotsPerRank (experts can shrink the most)",
    ),
    "shared expert in slots": (
        {"replicas": 320, "slotsPerRank": 1, "sharedAsRouted": True, "cacheTokens": 900_000},
        "lower worker.cache",
    ),
    "shared expert in slots, with drafts": (
        {"slotsPerRank": 15, "sharedAsRouted": True, "speculate": 1},
        "lower worker.slotsPerRank (experts can shrink the most)",
    ),
    "few slots": (
        {"replicas": 64, "slotsPerRank": 4, "cacheTokens": 900_000},
        "lower worker.cache",
    ),
}


@pytest.mark.parametrize(("changes", "remedy"), TOO_LARGE.values(), ids=TOO_LARGE)
def test_values_that_need_too_much_memory_are_rejected_as_the_worker_would(
    changes, remedy, explained
):
    values = yaml.safe_load((CHART / "values-deepseek-v3-32xh100.yaml").read_text())
    values = merged(values, {"worker": {"checkpoint": {"volume": None}, **changes}})
    values["worker"]["checkpoint"].pop("volume")
    with pytest.raises(RenderError, match="a rank needs ") as rejected:
        render(values)
    message = str(rejected.value)
    assert remedy in message
    # Without a size of the model nothing is checked, and the worker's own plan has the same terms.
    status, plan = explained(merged(values, {"worker": {"checkpoint": {"model": ""}}}))
    assert status == 1
    assert f"a rank needs {plan['needed_bytes'] / GIB:.1f} GiB, more than worker.gpu" in message
    for term in plan["terms"]:
        assert f"{term['name']} {term['num_bytes'] / GIB:.1f} GiB" in message


def script(name):
    """A script of helm/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "helm" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_sizes_of_models_are_those_of_the_plan():
    sizes = script("model_sizes")
    assert sizes.FILE.read_text() == sizes.written(), "python helm/model_sizes.py"


def test_the_values_of_units_are_those_of_planning():
    units = script("unit_values")
    for file, text in units.written().items():
        assert file.read_text() == text, "python helm/unit_values.py"
        assert file in READY


@pytest.mark.parametrize("name", UnitName)
def test_a_release_of_a_unit_has_its_ranks_and_slots(name):
    values = yaml.safe_load((CHART / f"values-deepseek-v3-{name}.yaml").read_text())
    flags, unit = flags_of(values), UNITS[name]
    assert (int(flags["num-ranks"]), int(flags["slots-per-rank"])) == (
        unit.num_ranks,
        unit.slots_per_rank,
    )
    phase = name.partition("-")[0]
    assert flags["phase"] == phase
    assert ("shared-as-routed" in flags) is unit.routes_shared_expert


@pytest.mark.parametrize("decode", [UnitName.DECODE_EP144, UnitName.DECODE_EP320])
def test_the_releases_of_two_units_share_a_balancer_with_the_policy_of_both(decode):
    readers, writers = (
        yaml.safe_load((CHART / f"values-deepseek-v3-{name}.yaml").read_text())
        for name in (UnitName.PREFILL_EP32, decode)
    )
    (policy,) = [
        one["data"]["policy.yaml"]
        for one in render(readers)
        if one["kind"] == "ConfigMap" and "policy.yaml" in one["data"]
    ]
    book = PolicyBook(Policy())
    assert book.offer(policy, source="policy.yaml", now=0.0), book.latest_rejection
    for values, name in ((readers, UnitName.PREFILL_EP32), (writers, decode)):
        found = book.of(values["pool"], Phase(values["phase"])).values
        unit = UNITS[name]
        assert (found.algorithm, found.interval_s) == (unit.algorithm, unit.interval_s)
    assert not any(
        one["kind"] == "ConfigMap" and "policy.yaml" in one["data"] for one in render(writers)
    )
    assert (readers["peerPools"], writers["peerPools"]) == ([writers["pool"]], [readers["pool"]])
    assert writers["prefillPool"] == readers["pool"]


@pytest.mark.parametrize("name", UnitName)
def test_the_experts_of_a_unit_take_the_bytes_in_the_docs(name, explained):
    values = yaml.safe_load((CHART / f"values-deepseek-v3-{name}.yaml").read_text())
    _, plan = explained(values)
    (experts,) = [term["num_bytes"] for term in plan["terms"] if term["name"] == "experts"]
    (row,) = [
        line for line in (ROOT / "docs/planning.md").read_text().splitlines()
        if line.startswith(f"| `{name}`")
    ]  # fmt: skip
    assert f"| {experts / 1e9:.1f} GB" in row


def test_a_gpu_switches_to_fp8_and_nothing_else_does():
    assert flags_of({})["device"] == "cpu"
    assert flags_of({})["weights"] == "auto"
    assert "batch-invariant" in flags_of({})
    one = {"gpu": {"count": 1}}
    flags = flags_of({"worker": one})
    assert (flags["device"], flags["weights"]) == ("cuda", "fp8")
    assert "no-batch-invariant" in flags
    flags = flags_of({"worker": {**one, "weights": "bf16", "device": "cuda:1"}})
    assert (flags["device"], flags["weights"]) == ("cuda:1", "bf16")
    assert "batch-invariant" in flags
    assert "no-batch-invariant" in flags_of({"worker": {"batchInvariant": False}})
    assert "pull-mib-per-s" not in flags_of({})
    assert flags_of({"worker": {"pullMiBPerSecond": 512}})["pull-mib-per-s"] == "512"
    flags = flags_of({"worker": {**one, "microBatches": 2, "hops": "two", "sumsOnNodes": True}})
    assert (flags["micro-batches"], flags["cut-from-tokens"], flags["hops"]) == ("2", "2", "two")
    assert "sums-on-nodes" in flags
    assert "sums-on-nodes" not in flags_of({})
    assert flags_of({})["replica-choice"] == "hashed"
    assert flags_of({"worker": {"replicaChoice": "balanced"}})["replica-choice"] == "balanced"
    for value, flag in (("cacheTokens", "cache-tokens"), ("maxStepTokens", "max-step-tokens")):
        assert flags_of({"worker": {value: 2**21}})[flag] == "2097152"


CONTRADICTIONS = {
    "batch-invariant FP8": (
        {"gpu": {"count": 1}, "batchInvariant": True},
        "worker.batchInvariant is not available with FP8 weights: set it to auto or false",
    ),
    "sums that depend on the layout": (
        {"sumsOnNodes": True},
        "worker.sumsOnNodes makes results depend on the layout: set worker.batchInvariant to false",
    ),
    "FP8 latents of other weights": ({"latents": "fp8"}, "worker.latents fp8 needs FP8 weights"),
    "a GPU that is not used": (
        {"gpu": {"count": 1}, "device": "cpu"},
        "worker.gpu.count requests a GPU: set device to auto, or gpu.count to 0",
    ),
    "steps too small": ({"maxRequests": 65}, "worker.maxStepTokens (64) must be at least"),
    "a cache too small": ({"cacheTokens": 255}, "worker.cacheTokens (255) must be at least"),
}


@pytest.mark.parametrize(("changes", "words"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_contradicting_values_are_rejected_with_the_remedy(changes, words):
    with pytest.raises(RenderError) as rejected:
        render({"worker": changes})
    assert words in str(rejected.value)
