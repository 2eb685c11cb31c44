"""Names: where each tensor of a checkpoint is in a model.

Knows Hugging Face's names for DeepSeek-V3. Module paths already follow them, except for a prefix,
for experts, which the model stacks and the checkpoint does not, and for multi-token-prediction
modules, which the checkpoint numbers after the last layer.
"""

import re

from torch import Tensor

from equipoise_model.config import ModelConfig
from equipoise_model.plain.transformer import Transformer
from equipoise_model.serving_model import ServingModel

_MTP = re.compile(r"mtp_layers\.(\d+)\.")
_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.(?:experts\.(\d+)|shared_experts)\.")
_STACKED = (".mlp.experts.gate_up", ".mlp.experts.down")


def dense_tensors(model: ServingModel) -> dict[str, Tensor]:
    """Return everything but the experts in slots, by checkpoint name.

    Tensors share the model's memory.
    """
    return {
        _checkpoint_name(name, model.config): tensor
        for name, tensor in model.state_dict().items()
        if not name.endswith(_STACKED)
    }


def expert_tensors(model: Transformer) -> dict[str, Tensor]:
    """Return the routed experts by checkpoint name; slot e must hold expert e.

    Tensors share the model's memory.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(_STACKED):
            tensors |= _unstacked(name, tensor, model.config)
    return tensors


def mtp_copies(model: Transformer) -> dict[str, Tensor]:
    """The embedding and the head again: published checkpoints repeat them in every MTP layer."""
    copies = {}
    for depth in range(model.num_mtp_layers):
        prefix = f"model.layers.{model.config.num_hidden_layers + depth}"
        copies[f"{prefix}.embed_tokens.weight"] = model.embed_tokens.weight.detach()
        copies[f"{prefix}.shared_head.head.weight"] = model.lm_head.weight.detach()
    return copies


def payload_names(config: ModelConfig, *, layer: int, expert: int) -> list[str]:
    """The tensors of one expert's payload, in order; MoE layers count from 0, modules last.

    The shared expert has the number after the routed ones.
    """
    part = "shared_experts" if expert == config.n_routed_experts else f"experts.{expert}"
    prefix = f"model.layers.{config.first_k_dense_replace + layer}.mlp.{part}"
    return [f"{prefix}.{name}_proj.weight" for name in ("gate", "up", "down")]


def placed_expert(name: str, config: ModelConfig) -> tuple[int, int] | None:
    """Return the MoE layer, from 0, and the number of the expert whose payload has the tensor.

    None for a tensor of no payload, such as those of several shared experts together.
    """
    match = _EXPERT.match(name)
    if match is None or (match[2] is None and config.n_shared_experts > 1):
        return None
    expert = config.n_routed_experts if match[2] is None else int(match[2])
    return int(match[1]) - config.first_k_dense_replace, expert


def is_mtp(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint's tensor belongs to a multi-token-prediction module."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return match is not None and int(match[1]) >= config.num_hidden_layers


def _checkpoint_name(name: str, config: ModelConfig) -> str:
    if name.startswith("lm_head."):
        return name
    return "model." + _MTP.sub(lambda m: f"layers.{config.num_hidden_layers + int(m[1])}.", name)


def _unstacked(name: str, stacked: Tensor, config: ModelConfig) -> dict[str, Tensor]:
    """Split `gate_up` or `down` of all experts into one tensor per expert and projection."""
    assert stacked.shape[0] == config.n_routed_experts
    prefix, kind = _checkpoint_name(name, config).rsplit(".", maxsplit=1)
    projections = ("down_proj",) if kind == "down" else ("gate_proj", "up_proj")
    return {
        f"{prefix}.{expert}.{projection}.weight": part
        for expert, weight in enumerate(stacked.unbind())
        for projection, part in zip(projections, weight.chunk(len(projections)), strict=True)
    }
