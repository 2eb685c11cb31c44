"""Loading is streaming: whatever a checkpoint's size, an expert and some pieces are in memory."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from equipoise_model.checkpoint import Checkpoint
from equipoise_model.checkpoint_tensors import tensor_specs
from equipoise_model.checkpoint_writer import write
from equipoise_model.config import Fp8Config
from equipoise_model.presets import TINY

PROGRAM = Path(__file__).with_name("checkpoint_memory.py")
ROOMS = [Path(__file__).parents[2] / room for room in ("model", "kernels")]
TIMEOUT_S = 120
MOST_BYTES = 96 << 20

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="Linux alone tells a peak of memory"
)


@pytest.fixture(params=[None, Fp8Config()], ids=["bf16", "fp8"])
def large(request, tmp_path):
    """The folder of a checkpoint of some hundred MB, in shards, each weight 1/2."""
    config = dataclasses.replace(
        TINY,
        vocab_size=24_576,
        hidden_size=2048,
        moe_intermediate_size=1408,
        num_hidden_layers=2,
        n_routed_experts=16,
        num_nextn_predict_layers=0,
        quantization_config=request.param,
    )
    shapes = {name: spec.shape for name, spec in tensor_specs(config).items()}
    write(
        tmp_path / "large",
        config,
        read=lambda name: torch.full(shapes[name], 0.5, dtype=torch.bfloat16),
        mtp=False,
        max_shard_bytes=64 << 20,
    )
    return tmp_path / "large"


def test_no_part_of_loading_keeps_more_than_an_expert_and_some_pieces_in_memory(large):
    assert sum(file.stat().st_size for file in large.glob("*.safetensors")) > 300 << 20
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, ROOMS)),
        "OMP_NUM_THREADS": "1",
    }
    output = subprocess.run(
        [sys.executable, PROGRAM, large],
        env=environment,
        stdout=subprocess.PIPE,
        timeout=TIMEOUT_S,
        check=True,
    ).stdout
    bound = MOST_BYTES + Checkpoint.open(large).config.expert_bytes
    growth = json.loads(output)
    assert growth.keys() == {"dense", "slots", "experts"}
    assert all(grown <= bound for grown in growth.values()), growth
