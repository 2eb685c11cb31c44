"""`tensor_specs`: every tensor of a checkpoint, derived from its config.

Knows which tensors exist, their shapes and storage types. Needs neither a model nor files.
"""

import math
from dataclasses import dataclass

from equipoise_kernels.formats import weight_scale_shape
from equipoise_model.config import ModelConfig

BF16, F32, FP8 = "BF16", "F32", "F8_E4M3"
SCALE_SUFFIX = "_scale_inv"

ITEM_BYTES = {BF16: 2, F32: 4, FP8: 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor's shape and storage type, by safetensors' name."""

    shape: tuple[int, ...]
    dtype: str
    """The type that is written."""
    also: tuple[str, ...] = ()
    """Further types that are read."""
    optional: bool = False
    """Whether it repeats another tensor, so that a checkpoint may omit it."""

    @property
    def num_bytes(self) -> int:
        """Size in bytes, as written."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def tensor_specs(config: ModelConfig, *, mtp: bool = True) -> dict[str, TensorSpec]:
    """List the tensors of a checkpoint by name, in layer order.

    Includes the multi-token-prediction modules of the config, or none. With `quantization_config`,
    each linear map of attention and of feed-forward networks is a pair, `weight` and
    `weight_scale_inv`.
    """
    dim, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, dim)}
    for layer in range(config.num_hidden_layers):
        sparse = layer >= config.first_k_dense_replace
        shapes |= _under(f"model.layers.{layer}", _block(config, sparse=sparse))
    shapes |= {"model.norm.weight": (dim,), "lm_head.weight": (vocab, dim)}
    copies = set()
    for depth in range(config.num_nextn_predict_layers if mtp else 0):
        prefix = f"model.layers.{config.num_hidden_layers + depth}"
        shapes |= _under(prefix, _mtp_module(config))
        copies |= {f"{prefix}.embed_tokens.weight", f"{prefix}.shared_head.head.weight"}
    specs: dict[str, TensorSpec] = {}
    for name, shape in shapes.items():
        if name.endswith(".e_score_correction_bias"):
            specs[name] = TensorSpec(shape=shape, dtype=F32, also=(BF16,))
        elif config.quantization_config is not None and name.endswith(_QUANTIZED):
            specs[name] = TensorSpec(shape=shape, dtype=FP8)
            specs[name + SCALE_SUFFIX] = TensorSpec(shape=weight_scale_shape(shape), dtype=F32)
        else:
            specs[name] = TensorSpec(shape=shape, dtype=BF16, optional=name in copies)
    return specs


# Every linear map except the router, the head, and `eh_proj`.
_QUANTIZED = (
    *(f".{name}_proj.weight" for name in ("q", "q_a", "q_b", "kv_b", "o", "gate", "up", "down")),
    ".kv_a_proj_with_mqa.weight",
)


def _under(prefix: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def _mtp_module(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """A sparse layer, the projection of its two inputs, and copies of the embedding and head."""
    dim, vocab = config.hidden_size, config.vocab_size
    return _block(config, sparse=True) | {
        "embed_tokens.weight": (vocab, dim),
        "enorm.weight": (dim,),
        "hnorm.weight": (dim,),
        "eh_proj.weight": (dim, 2 * dim),
        "shared_head.norm.weight": (dim,),
        "shared_head.head.weight": (vocab, dim),
    }


def _block(config: ModelConfig, *, sparse: bool) -> dict[str, tuple[int, ...]]:
    dim = config.hidden_size
    norms = {"input_layernorm.weight": (dim,), "post_attention_layernorm.weight": (dim,)}
    parts = norms | _under("self_attn", _attention(config))
    if not sparse:
        return parts | _under("mlp", _feed_forward(dim, config.intermediate_size))
    num_experts, expert_dim = config.n_routed_experts, config.moe_intermediate_size
    parts |= {
        "mlp.gate.weight": (num_experts, dim),
        "mlp.gate.e_score_correction_bias": (num_experts,),
    }
    shared = _feed_forward(dim, config.n_shared_experts * expert_dim)
    parts |= _under("mlp.shared_experts", shared)
    for expert in range(num_experts):
        parts |= _under(f"mlp.experts.{expert}", _feed_forward(dim, expert_dim))
    return parts


def _attention(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    dim, heads = config.hidden_size, config.num_attention_heads
    q_rank, kv_rank = config.q_lora_rank, config.kv_lora_rank
    queries: dict[str, tuple[int, ...]] = {"q_proj.weight": (heads * config.qk_head_dim, dim)}
    if q_rank is not None:
        queries = {
            "q_a_proj.weight": (q_rank, dim),
            "q_a_layernorm.weight": (q_rank,),
            "q_b_proj.weight": (heads * config.qk_head_dim, q_rank),
        }
    return queries | {
        "kv_a_proj_with_mqa.weight": (config.latent_dim, dim),
        "kv_a_layernorm.weight": (kv_rank,),
        "kv_b_proj.weight": (heads * (config.qk_nope_head_dim + config.v_head_dim), kv_rank),
        "o_proj.weight": (dim, heads * config.v_head_dim),
    }


def _feed_forward(dim: int, hidden_dim: int) -> dict[str, tuple[int, ...]]:
    return {
        "gate_proj.weight": (hidden_dim, dim),
        "up_proj.weight": (hidden_dim, dim),
        "down_proj.weight": (dim, hidden_dim),
    }
