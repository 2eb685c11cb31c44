"""An engine on a device other than the host, tested on a pretended device.

It is as strict as a GPU about everything that these programs do.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from equipoise.cli.main import main
from equipoise.planning.layout import Layout
from equipoise.rank.errors import WorkerError
from equipoise.rank.stager import Stager
from equipoise.rank.transfer import PullResult
from equipoise.worker.alone import engine_alone
from equipoise.worker.core import ModelCore
from equipoise.worker.group import RankGroup
from equipoise.worker.rank import _expert_parallel
from equipoise.worker.sequence import Request
from equipoise.worker.settings import WorkerSettings
from equipoise_model import operations
from equipoise_model.checkpoint import save
from equipoise_model.config import Fp8Config
from equipoise_model.device import DeviceError, choose_device, to_host
from equipoise_model.experts import checksum
from equipoise_model.fp8 import graphs
from equipoise_model.plain.transformer import Transformer
from equipoise_model.sampling_params import SamplingParams
from tests.support.fp8_models import NARROW
from tests.support.held_slots import held_by
from tests.support.kernel_backends import use_backends
from tests.support.lone_engine import lone_engine
from tests.support.pretended_device import CUDA, DeviceMixError, OnDevice, pretended_device

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a true device: tests/model/fp8/test_gpu.py has it"
)

PROMPTS = [
    tuple(int(t) for t in np.random.default_rng(n).integers(0, 64, 4 * n)) for n in (1, 3, 7)
]
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=5, top_p=0.9, top_k=20, logprobs=2),
    SamplingParams(temperature=1.1, seed=6, min_p=0.05, repetition_penalty=1.2),
)


def tokens_and_loads(core, held, staged, settings):
    """The tokens of three requests, with a switch among them, and the loads."""
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

    alone = RankGroup.alone("worker-0")
    join_epoch = SimpleNamespace(layout=held.contents.layout)
    engine = lone_engine(
        core,
        held,
        publish,
        experts=_expert_parallel(
            SimpleNamespace(join_epoch=join_epoch, group=alone), core, phase=settings.phase
        ),
        group=alone,
        scheduler=core.scheduler(settings),
    )
    for key, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        engine.submit(Request(key=key, prompt=prompt, max_tokens=12, sampling=sampling))
    engine.run()
    assert switches == [2]
    return tokens, [
        (load.generation, load.slot_load_LS.tolist()) for load in engine.progress().loads
    ]


def built(core, held, stage):
    """The generation that a stager builds from pulled experts."""
    stager = Stager(
        engine=None, held=held, puller=None, epoch=1, send=lambda message: None, spans=None
    )
    payloads = tuple(core.checkpoint.read_expert(move.layer, move.expert) for move in stage.moves)
    pulled = PullResult(payloads=payloads, peer_bytes=0, checkpoint_bytes=0)
    return stager._build(stage, pulled, held.contents)


@pytest.fixture
def served(rank_of_one, stage_to, random_layout, settings):
    """Tokens and loads of the small model; keyword arguments change settings."""

    def serve(**changes):
        core, held = rank_of_one(**changes)
        stage = stage_to(held.contents.layout, random_layout(2))
        return tokens_and_loads(core, held, built(core, held, stage), settings())

    return serve


@pytest.fixture
def served_in_fp8(tmp_path, settings, staged_from_checkpoint, monkeypatch):
    """The same of a model in FP8, by the suite's torch twins, with what its slots hold then."""
    torch.manual_seed(7)
    model = Transformer(NARROW).requires_grad_(requires_grad=False)
    for tensor in model.state_dict().values():
        if tensor.ndim > 1:
            tensor.normal_(std=0.2)
    save(model, tmp_path / "fp8", fp8=Fp8Config())
    use_backends(monkeypatch, "reference")
    # Without a GPU, a captured step repeats the same work on the same memory.
    monkeypatch.setattr(graphs, "CudaCapture", lambda: lambda work: work)

    def serve(device):
        chosen = settings(
            checkpoint=tmp_path / "fp8",
            device=device,
            weights="fp8",
            batch_invariant=False,
            slots_per_rank=5,
            context_length=64,
        )
        core = ModelCore.load(chosen)
        first, second = (
            Layout(
                generation=generation,
                num_experts=4,
                num_ranks=1,
                expert_of_slot=np.array([row], dtype=np.int32),
            )
            for generation, row in ((1, [0, 1, 2, 3, 0]), (2, [2, 1, 0, 3, 1]))
        )
        core.checkpoint.load_slots(core.model, first.expert_of_slot)
        held = held_by(core, first)
        staged = staged_from_checkpoint(core, first, second)
        result = tokens_and_loads(core, held, staged, chosen)
        return result, [checksum(core.slots[0].read(slot)) for slot in range(5)]

    return serve


@pytest.fixture
def in_bfloat16(monkeypatch):
    """Makes the plain plane compute on the CPU in what it computes in on a GPU."""
    monkeypatch.setattr(operations, "compute_dtype", lambda *, on_gpu: torch.bfloat16)


@pytest.mark.parametrize("num_drafts", [0, 1])
def test_a_single_engine_makes_the_same_tokens_on_a_device(settings, num_drafts, in_bfloat16):
    def tokens(device):
        made = []

        def publish(result):
            made.extend(emission.token for emission in result.emissions)
            if any(emission.finish for emission in result.emissions):
                engine.leave()

        chosen = settings(device=device)
        if num_drafts:
            # The packaged tiny model has a module to draft with.
            chosen = WorkerSettings(device=device, batch_invariant=False, speculate=num_drafts)
        engine = engine_alone(chosen, publish=publish)
        engine.submit(Request(key=1, prompt=PROMPTS[1], max_tokens=6))
        engine.run()
        return made

    expected = tokens("cpu")
    with pretended_device():
        assert tokens("cuda") == expected


def test_an_fp8_rank_captures_its_steps_on_a_device_and_makes_the_same_tokens(served_in_fp8):
    expected, held = served_in_fp8("cpu")
    with pretended_device():
        assert served_in_fp8("cuda") == (expected, held)
    assert [held.index(one) for one in held] == [0, 1, 2, 3, 1]


def test_bf16_is_bfloat16_on_a_device_and_float32_by_name_on_the_cpu(rank_of_one):
    def held(device):
        core, _ = rank_of_one(device=device)
        weights = [
            tensor for name, tensor in core.model.state_dict().items() if ".gate." not in name
        ]
        dtypes = {tensor.dtype for tensor in [*weights, core.cache.latents(0).latents_BPC]}
        return dtypes, core.operations.backends

    assert held("cpu") == ({torch.float32}, ("model=torch",))
    with pretended_device():
        assert held("cuda") == ({torch.bfloat16}, ("model=torch-bf16",))
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction


def test_an_expert_is_read_beside_the_computation():
    with pretended_device() as device:
        parts = [torch.arange(6, dtype=torch.uint8, device="cuda"),
                 torch.full((3,), 9, dtype=torch.uint8, device="cuda")]  # fmt: skip
        payload = to_host(parts)
        assert payload.device.type == "cpu"
        assert payload.tolist() == [0, 1, 2, 3, 4, 5, 9, 9, 9]
        # Only the reading thread waits, and for its own stream.
        assert device.log == [
            ("stream 1", "waits for", "computing"),
            ("the host", "waits for", "stream 1"),
        ]
    assert to_host([torch.ones(2), torch.zeros(1)]).tolist() == [1, 1, 0]


def test_an_fp8_worker_warms_up_on_a_device_before_it_serves(served_in_fp8, monkeypatch):
    warmed = []

    def remember(model, cache, *, max_rows):
        assert torch.equal(model.norm.weight.cpu(), torch.ones(NARROW.hidden_size).bfloat16())
        warmed.append(max_rows)

    monkeypatch.setattr(operations, "warm_up", remember)
    served_in_fp8("cpu")
    assert warmed == []
    with pretended_device():
        served_in_fp8("cuda")
        assert warmed == [12]

        def too_large(*_, **__):
            raise torch.OutOfMemoryError("no memory")

        monkeypatch.setattr(operations, "warm_up", too_large)
        with pytest.raises(WorkerError, match="a step of 12 tokens does not fit"):
            served_in_fp8("cuda")


def test_a_worker_without_fp8_support_reports_the_reason(settings):
    with pytest.raises(WorkerError, match="weights: FP8 is not available: batch-invariant mode"):
        ModelCore.load(settings(weights="fp8"))
    with pytest.raises(WorkerError, match="FP8 is not available: hidden_size is 64,"):
        ModelCore.load(settings(weights="fp8", batch_invariant=False))


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_a_worker_that_is_to_use_a_gpu_exits_without_one(monkeypatch, capfd):
    monkeypatch.setattr("sys.argv", ["equipoise", "worker", "--device=cuda", "--weights=fp8"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    error = capfd.readouterr().err
    assert "device: there is no device cuda:0: this process sees 0 CUDA device(s)" in error
    is_cpu_build = torch.version.cuda is None
    assert is_cpu_build == ("this PyTorch is a build without CUDA: install" in error)


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_a_rank_on_a_device_copies_only_inputs_and_outputs_and_makes_the_same_tokens(
    served, batch_invariant, in_bfloat16
):
    expected = served(device="cpu", batch_invariant=batch_invariant)
    with pretended_device() as streams:
        assert served(device="cuda", batch_invariant=batch_invariant) == expected
    # Staged on a stream of its own, which the computation waits for only at the switch.
    assert streams.log[:2] == [
        ("stream 1", "waits for", "computing"),
        ("stream 1", "reaches", "its event"),
    ]
    assert set(streams.log[2:]) == {("computing", "waits for", "stream 1")}


def test_the_pretended_device_is_as_strict_as_a_real_one():
    with pretended_device():
        there, here = torch.ones(3, device=CUDA), torch.ones(3)
        assert isinstance(there + there, OnDevice)
        assert (there + 1).tolist() == [2, 2, 2]
        with pytest.raises(DeviceMixError):
            there + here
        assert (there.cpu() + here).tolist() == [2, 2, 2]


def test_a_device_is_chosen_by_name_by_number_or_by_availability():
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
