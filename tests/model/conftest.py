"""Small random models of three shapes, and the same weights in transformers' own implementation."""

import dataclasses

import pytest
import torch

from equipoise_model.config import RopeConfig
from equipoise_model.plain.transformer import Transformer
from tests.support.small_models import SMALL

PLAIN = dataclasses.replace(SMALL, n_group=1, topk_group=1, num_nextn_predict_layers=1)
YARN = dataclasses.replace(
    PLAIN,
    rope=RopeConfig(
        factor=8.0, original_max_position_embeddings=32, mscale=0.707, mscale_all_dim=1.0
    ),
)
GROUPED = dataclasses.replace(
    PLAIN,
    q_lora_rank=None,
    v_head_dim=32,
    n_routed_experts=16,
    n_shared_experts=2,
    num_experts_per_tok=3,
    n_group=4,
    topk_group=2,
)
CONFIGS = {"plain": PLAIN, "yarn": YARN, "grouped": GROUPED}


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS)
def config(request):
    """Each of the three shapes in turn."""
    return request.param


@pytest.fixture(scope="session")
def random_model():
    """Builds a model with random norms and with router biases of both signs, mostly negative."""

    def build(config, *, seed=0, **options):
        torch.manual_seed(seed)
        model = Transformer(config, **options).requires_grad_(requires_grad=False)
        for name, tensor in model.state_dict().items():
            if name.endswith("e_score_correction_bias"):
                tensor.normal_(mean=-1.0, std=0.3)
            elif tensor.ndim == 1:
                tensor.uniform_(0.5, 1.5)
            else:
                tensor.normal_(std=0.1)
        return model

    return build


@pytest.fixture
def hugging_face():
    """Turns a model into transformers' `DeepseekV3ForCausalLM` with the same weights."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    def convert(model):
        theirs = DeepseekV3ForCausalLM(DeepseekV3Config(**model.config.to_dict())).eval()
        state = {
            _their_name(name): tensor
            for name, tensor in model.state_dict().items()
            if not name.startswith("mtp_layers.")
        }
        theirs.load_state_dict(state)
        return theirs.float()

    return convert


def _their_name(name):
    if name.endswith(("experts.gate_up", "experts.down")):
        name += "_proj"
    return name if name.startswith("lm_head.") else f"model.{name}"
