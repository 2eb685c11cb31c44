"""`ModelConfig`: the sizes of a DeepSeek-V3-style model, under Hugging Face's field names.

Reads and writes `config.json` and owns every check of it. A config that the model would compute
differently from what its author meant cannot be constructed.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Self, get_type_hints

from equipoise_kernels.formats import weight_scale_shape
from equipoise_model.config_parts import (
    Fp8Config,
    RopeConfig,
    UnsupportedConfigError,
    check_type,
    fp8_to_dict,
    read_fp8,
    read_rope,
    require,
    rope_to_dict,
    yarn_mscale,
)

__all__ = ["Fp8Config", "ModelConfig", "RopeConfig", "UnsupportedConfigError", "yarn_mscale"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and constants of one model; a size that is not given has DeepSeek-V3's value.

    Raises:
        UnsupportedConfigError: a value is out of range, or sizes contradict each other.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    first_k_dense_replace: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float = 2.5
    norm_topk_prob: bool = True
    num_nextn_predict_layers: int = 0
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    bos_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 1
    rope: RopeConfig = field(default_factory=RopeConfig)
    quantization_config: Fp8Config | None = None
    shared_as_routed: bool = False
    """Whether the shared expert is in slots like the routed ones, and numbered after them; every
    token goes to it with weight 1. Chosen by who serves the model: no config.json has it."""

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            require(self, name, getattr(self, name) >= 1, "at least 1")
        q_rank, dense = self.q_lora_rank, self.first_k_dense_replace
        require(self, "q_lora_rank", q_rank is None or q_rank >= 1, "null or at least 1")
        wanted = (
            f"within [0, num_hidden_layers = {self.num_hidden_layers}): one MoE layer is needed"
        )
        require(self, "first_k_dense_replace", 0 <= dense < self.num_hidden_layers, wanted)
        num_mtp = self.num_nextn_predict_layers
        require(self, "num_nextn_predict_layers", num_mtp >= 0, "0 or more")
        require(self, "qk_rope_head_dim", self.qk_rope_head_dim % 2 == 0, "even")
        fits = self.n_shared_experts == 1 or not self.shared_as_routed
        require(self, "n_shared_experts", fits, "1 with --shared-as-routed: remove that option")
        self._check_routing()

    @property
    def num_moe_layers(self) -> int:
        """Layers with routed experts, without multi-token-prediction modules."""
        return self.num_hidden_layers - self.first_k_dense_replace

    @property
    def num_expert_layers(self) -> int:
        """Layers with routed experts, with the modules, which come last: those of a layout."""
        return self.num_moe_layers + self.num_nextn_predict_layers

    @property
    def num_placed_experts(self) -> int:
        """Experts per layer that a layout places: the routed ones, and the shared one if routed."""
        return self.n_routed_experts + self.shared_as_routed

    @property
    def slots_per_token(self) -> int:
        """Slots that a token goes to in a layer."""
        return self.num_experts_per_tok + self.shared_as_routed

    @property
    def expert_bytes(self) -> int:
        """Bytes of a placed expert's payload: gate, up and down, in BF16 or FP8 with scales."""
        weights = 3 * self.moe_intermediate_size * self.hidden_size
        if self.quantization_config is None:
            return weights * 2
        _, *scale_shape = weight_scale_shape((3, self.moe_intermediate_size, self.hidden_size))
        return weights + 3 * math.prod(scale_shape) * 4

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query: the unrotated part and the rotated part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Values cached per token and layer: compressed key-value and shared rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def attention_parity_tokens(self) -> int:
        """Context length at which half of the operations that read a token are core attention.

        Of the decoder's layers, with keys and values rebuilt from the latents, without
        the output head: 14,245 for DeepSeek-V3.
        """
        heads, hidden = self.num_attention_heads, self.hidden_size
        queries = heads * self.qk_head_dim
        q_rank = self.q_lora_rank
        linear = hidden * queries if q_rank is None else q_rank * (hidden + queries)
        linear += hidden * self.latent_dim
        linear += self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
        linear += heads * self.v_head_dim * hidden
        linear *= self.num_hidden_layers
        linear += self.first_k_dense_replace * 3 * hidden * self.intermediate_size
        active = self.num_experts_per_tok + self.n_shared_experts
        linear += self.num_moe_layers * active * 3 * hidden * self.moe_intermediate_size
        pair = self.num_hidden_layers * heads * (self.qk_head_dim + self.v_head_dim)
        return max(1, round(linear / pair))

    @property
    def softmax_scale(self) -> float:
        """Factor of attention scores; YaRN multiplies it by mscale squared."""
        scale = 1 / math.sqrt(self.qk_head_dim)
        if self.rope.factor is None or not self.rope.mscale_all_dim:
            return scale
        return scale * yarn_mscale(self.rope.factor, self.rope.mscale_all_dim) ** 2

    @classmethod
    def from_json(cls, path: Path) -> Self:
        """Read a `config.json`.

        Raises:
            UnsupportedConfigError: the file is not a JSON object, or `from_dict` rejects it.
            OSError: the file cannot be read.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UnsupportedConfigError(f"{path} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise UnsupportedConfigError(f"{path} is not a JSON object")
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from Hugging Face's fields, with `rope_scaling` (old) or `rope_parameters` (new).

        Raises:
            UnsupportedConfigError: a field is missing, unknown, or requires something the model
                does not compute; the message names it.
        """
        rest = dict(values)
        if "num_mtp_layers" in rest:
            rest["num_nextn_predict_layers"] = rest.pop("num_mtp_layers")
        for name, allowed in _FIXED.items():
            if name in rest and rest.pop(name) not in allowed:
                raise UnsupportedConfigError(
                    f"{name} = {values[name]!r} is not supported: only {allowed[0]!r} is"
                )
        _check_kv_heads(rest)
        if isinstance(ends := rest.get("eos_token_id"), list):
            rest["eos_token_id"] = tuple(ends)
        parts: dict[str, Any] = {
            "rope": read_rope(rest),
            "quantization_config": read_fp8(rest.pop("quantization_config", None)),
        }
        hints = {name: hint for name, hint in get_type_hints(cls).items() if name not in _APART}
        unknown = sorted(rest.keys() - hints.keys() - _IGNORED)
        if unknown:
            raise UnsupportedConfigError(
                f"unknown field {unknown[0]!r}: it may change what the model computes; remove it "
                "if it does not"
            )
        known = {name: rest[name] for name in hints if name in rest}
        missing = [name for name in _REQUIRED if name not in known]
        if missing:
            raise UnsupportedConfigError(f"{missing[0]} is missing")
        for name, value in known.items():
            check_type(name, value, hints[name])
        return cls(**known, **parts)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of a `config.json` that both transformers 5 and `from_dict` load."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _APART}
        values = {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "num_key_value_heads": self.num_attention_heads,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "tie_word_embeddings": False,
            **own,
            "rope_parameters": rope_to_dict(self.rope),
        }
        if self.quantization_config is not None:
            values["quantization_config"] = fp8_to_dict(self.quantization_config)
        return values

    def _check_routing(self) -> None:
        experts, groups = self.n_routed_experts, self.n_group
        divides, wanted = experts % groups == 0, f"a divisor of n_routed_experts ({experts})"
        require(self, "n_group", divides, wanted)
        wanted = "such that a group has two experts: its score is the sum of its best two"
        require(self, "n_group", groups == 1 or experts // groups >= 2, wanted)
        require(self, "topk_group", 1 <= self.topk_group <= groups, f"1 to {groups}")
        reachable = experts // groups * self.topk_group
        wanted = f"at most {reachable}, the experts in topk_group groups"
        require(self, "num_experts_per_tok", self.num_experts_per_tok <= reachable, wanted)


# Fields that config.json has in another form, or not at all.
_APART = {"rope", "quantization_config", "shared_as_routed"}

_REQUIRED = (
    *(f.name for f in fields(ModelConfig) if f.default is f.default_factory is MISSING),
    "max_position_embeddings",
)
_POSITIVE = tuple(n for n in _REQUIRED if n not in ("first_k_dense_replace", "q_lora_rank"))

# Fields with one supported value; the first is the one written.
_FIXED: dict[str, tuple[object, ...]] = {
    "model_type": ("deepseek_v3",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0.0,),
    "tie_word_embeddings": (False,),
    "rope_interleave": (True,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
    "mlp_bias": (False,),
}

# Fields that do not change the forward pass.
_IGNORED = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",
        "aux_loss_alpha",
        "chunk_size_feed_forward",
        "dtype",
        "ep_size",
        "head_dim",
        "id2label",
        "is_encoder_decoder",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "qk_head_dim",
        "return_dict",
        "seq_aux",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


def _check_kv_heads(rest: dict[str, Any]) -> None:
    heads = rest.get("num_attention_heads")
    kv_heads = rest.pop("num_key_value_heads", None)
    if kv_heads not in (None, heads):
        raise UnsupportedConfigError(
            f"num_key_value_heads = {kv_heads!r} is not supported: latent attention has as many "
            f"as num_attention_heads ({heads!r})"
        )
