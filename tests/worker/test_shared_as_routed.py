"""A worker that has the shared expert in slots, like the routed experts."""

import dataclasses
import json

import pytest

from equipoise.cli.explain import run
from equipoise.planning.topology import ModelShape
from equipoise.rank.errors import WorkerError
from equipoise.worker.alone import engine_alone
from equipoise.worker.core import ModelCore
from equipoise.worker.sequence import Request
from equipoise_model.checkpoint import save
from equipoise_model.experts import checksum
from equipoise_model.plain.transformer import Transformer
from tests.support.small_models import SMALL

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)


def test_the_balancer_is_told_of_one_more_expert_and_no_groups(settings):
    dense, core = (ModelCore.load(settings(shared_as_routed=one)) for one in (False, True))
    num_bytes = SMALL.expert_bytes
    assert dense.shape == ModelShape(
        num_layers=2, num_experts=8, num_groups=2, expert_bytes=num_bytes
    )
    assert core.shape == ModelShape(
        num_layers=2,
        num_experts=9,
        num_groups=1,
        expert_bytes=num_bytes,
        has_shared_expert=True,
    )
    assert core.payload_checksums.shape == (2, 9, 16)
    for layer in range(2):
        payload = core.checkpoint.read_expert(layer, 8)
        assert core.payload_checksums[layer, 8].tobytes() == checksum(payload)
    assert not [name for name, _ in core.model.named_parameters() if "shared_experts" in name]


def test_pools_with_and_without_it_exchange_latents(settings):
    dense, routed = settings(), settings(shared_as_routed=True)
    assert ModelCore.load(dense).latent_form(dense) == ModelCore.load(routed).latent_form(routed)


def test_a_process_alone_has_a_slot_for_it_and_the_same_tokens(settings, solo):
    made = []

    def publish(result):
        made.extend(emission.token for emission in result.emissions)
        if any(emission.finish for emission in result.emissions):
            engine.leave()

    engine = engine_alone(settings(shared_as_routed=True), publish=publish)
    engine.submit(Request(key=0, prompt=PROMPT, max_tokens=20))
    engine.run()
    assert made == solo(PROMPT, 20)


def test_a_model_with_several_shared_experts_is_refused(settings, tmp_path):
    save(Transformer(dataclasses.replace(SMALL, n_shared_experts=2)), tmp_path)
    refused = settings(checkpoint=tmp_path, shared_as_routed=True)
    for start in (ModelCore.load, run):
        with pytest.raises(WorkerError, match=r"n_shared_experts = 2 .* with --shared-as-routed"):
            start(refused)


def test_only_ranks_with_a_slot_for_it_need_memory_for_it(settings, capsys):
    terms = {}
    for shared_as_routed in (False, True):
        run(settings(shared_as_routed=shared_as_routed, explain=True, json=True))
        found = json.loads(capsys.readouterr().out)
        terms[shared_as_routed] = {term["name"]: term for term in found["terms"]}
    freed = terms[False]["dense weights"]["num_bytes"] - terms[True]["dense weights"]["num_bytes"]
    per_slot = terms[True]["experts"]["num_bytes"] // 12
    assert freed == per_slot
    assert terms[True]["experts"]["least_bytes"] == 9 * per_slot
