"""An engine on a device beside the host: proved on a pretended one, which a GPU would be stricter
about in nothing that these programs do."""

import numpy as np
import pytest
import torch
from pretended_device import CUDA, DeviceMixError, OnDevice, pretended_device

from equipoise.worker.applier import placement_of
from equipoise.worker.core import ModelCore
from equipoise.worker.engine import Engine
from equipoise.worker.errors import WorkerError
from equipoise.worker.group import RankGroup
from equipoise.worker.sequence import Request
from equipoise_model.device import DeviceError, choose_device
from equipoise_model.dispatch import ExpertParallel
from equipoise_model.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a true device: tests/model/test_suite_gpu.py has it"
)

PROMPTS = [
    tuple(int(t) for t in np.random.default_rng(n).integers(0, 64, 4 * n)) for n in (1, 3, 7)
]
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=5, top_p=0.9, top_k=20, logprobs=2),
    SamplingParams(temperature=1.1, seed=6, min_p=0.05, repetition_penalty=1.2),
)


@pytest.fixture
def served(rank_of_one, staged_from_checkpoint, random_layout, settings):
    """Tokens of three requests, with a switch of layouts among them, and the loads counted."""

    def serve(**changes):
        core, held = rank_of_one(**changes)
        staged = staged_from_checkpoint(core, held.contents.layout, random_layout(2))
        switches, tokens, finished = [], {}, []

        def publish(result):
            if result.step == 5:
                assert engine.offer(staged)
            if result.switch:
                switches.append(result.switch.generation)
            for emission in result.emissions:
                tokens.setdefault(emission.key, []).append(emission.sampled.token)
                finished.extend([emission.key] if emission.finish else [])
            if len(finished) == len(PROMPTS):
                engine.leave()

        layout = held.contents.layout
        engine = Engine(
            model=core.model,
            cache=core.cache,
            experts=ExpertParallel.local(
                core.checkpoint.config, placement_of(layout).to(core.device)
            ),
            held=held,
            group=RankGroup.alone(),
            scheduler=core.scheduler(settings()),
            epoch=1,
            names=("worker-0",),
            publish=publish,
        )
        for key, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
            engine.submit(Request(key=key, prompt=prompt, max_tokens=12, sampling=sampling))
        engine.run()
        assert switches == [2]
        loads = [(load.generation, load.rows_LS.tolist()) for load in engine.progress().loads]
        return tokens, loads

    return serve


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_a_rank_on_a_device_copies_at_the_edges_only_and_says_the_same(served, batch_invariant):
    expected = served(device="cpu", batch_invariant=batch_invariant)
    with pretended_device() as streams:
        assert served(device="cuda", batch_invariant=batch_invariant) == expected
    # Staged beside the computation, which waits for it at the switch and not before.
    assert streams.log[:2] == [
        ("stream 1", "waits for", "computing"),
        ("stream 1", "reaches", "its event"),
    ]
    assert set(streams.log[2:]) == {("computing", "waits for", "stream 1")}


def test_the_pretended_device_is_as_strict_as_a_true_one():
    with pretended_device():
        there, here = torch.ones(3, device=CUDA), torch.ones(3)
        assert isinstance(there + there, OnDevice)
        assert (there + 1).tolist() == [2, 2, 2]
        with pytest.raises(DeviceMixError):
            there + here
        assert (there.cpu() + here).tolist() == [2, 2, 2]


def test_a_device_is_chosen_by_name_by_number_or_by_what_there_is():
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    for wanted in ("cuda", "cuda:0"):
        with pytest.raises(DeviceError, match="this process sees 0 CUDA"):
            choose_device(wanted)
    for wanted in ("tpu", "cuda:", "cuda:x", "cpu:0", ""):
        with pytest.raises(DeviceError, match="choose auto, cpu, cuda or cuda:N"):
            choose_device(wanted)
    with pretended_device():
        assert choose_device("auto", environment={}) == CUDA
        assert choose_device("cuda", environment={"LOCAL_RANK": "0"}) == CUDA
        with pytest.raises(DeviceError, match=r"cuda:1: this process sees 1 CUDA"):
            choose_device("auto", environment={"LOCAL_RANK": "1"})
        with pytest.raises(DeviceError, match="LOCAL_RANK is 'x'"):
            choose_device("auto", environment={"LOCAL_RANK": "x"})


def test_a_worker_without_its_device_does_not_start(settings):
    with pytest.raises(WorkerError, match="device: there is no device cuda:3"):
        ModelCore.load(settings(device="cuda:3"))
