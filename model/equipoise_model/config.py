"""`ModelConfig`: the sizes of a DeepSeek-V3-style model, under Hugging Face's field names.

Reads and writes `config.json`. Owns every check of it: a config that the model would compute
differently from what its author meant cannot be constructed.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, Self, get_args, get_type_hints


class UnsupportedConfigError(ValueError):
    """A config this model cannot run faithfully; the message names the field and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: plain (`factor` is None) or YaRN (arXiv 2309.00071).

    Names are those of Hugging Face's `rope_parameters`. `original_max_position_embeddings` is the
    context length, in tokens, before YaRN stretched it by `factor`.
    """

    rope_theta: float = 10_000.0
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        _require(self.rope_theta > 1, "rope_theta", self.rope_theta, "a number above 1")
        if self.factor is None:
            return
        _require(self.factor >= 1, "rope factor", self.factor, "at least 1")
        _require(
            self.original_max_position_embeddings is not None
            and self.original_max_position_embeddings >= 1,
            "rope original_max_position_embeddings",
            self.original_max_position_embeddings,
            "the context length before YaRN",
        )
        _require(
            self.beta_fast >= self.beta_slow > 0,
            "rope beta_fast",
            self.beta_fast,
            f"at least beta_slow ({self.beta_slow})",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and constants of one model; defaults are DeepSeek-V3's where a size is not given.

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
    eos_token_id: int | None = 1
    rope: RopeConfig = field(default_factory=RopeConfig)

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        if self.q_lora_rank is not None:
            _require(self.q_lora_rank >= 1, "q_lora_rank", self.q_lora_rank, "null or at least 1")
        _require(
            0 <= self.first_k_dense_replace < self.num_hidden_layers,
            "first_k_dense_replace",
            self.first_k_dense_replace,
            f"within [0, num_hidden_layers = {self.num_hidden_layers}): one MoE layer is needed",
        )
        _require(
            self.num_nextn_predict_layers >= 0,
            "num_nextn_predict_layers",
            self.num_nextn_predict_layers,
            "0 or more",
        )
        _require(self.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim", self.qk_rope_head_dim, "even")
        self._check_routing()

    @property
    def num_moe_layers(self) -> int:
        """Layers with routed experts, the MTP layers left out: the `layers` of a layout."""
        return self.num_hidden_layers - self.first_k_dense_replace

    @property
    def expert_bytes(self) -> int:
        """Bytes of one routed expert as transferred and stored: gate, up and down in BF16."""
        return 3 * self.moe_intermediate_size * self.hidden_size * 2

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query: the part without position and the rotated part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Values cached per token and layer: compressed key-value and the shared rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Factor of attention scores; YaRN sharpens it by mscale squared."""
        scale = 1 / math.sqrt(self.qk_head_dim)
        if self.rope.factor is None or not self.rope.mscale_all_dim:
            return scale
        return scale * yarn_mscale(self.rope.factor, self.rope.mscale_all_dim) ** 2

    @classmethod
    def from_json(cls, path: Path) -> Self:
        """Read a `config.json`.

        Raises:
            UnsupportedConfigError: the file is no JSON object, or `from_dict` refuses it.
            OSError: the file cannot be read.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UnsupportedConfigError(f"{path} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise UnsupportedConfigError(f"{path} holds no JSON object")
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from Hugging Face's fields, with `rope_scaling` (old) or `rope_parameters` (new).

        Raises:
            UnsupportedConfigError: a field is missing, unknown, or asks for something the model
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
        rope = _read_rope(rest)
        hints = get_type_hints(cls)
        unknown = sorted(rest.keys() - (hints.keys() - {"rope"}) - _IGNORED)
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
            _check_type(name, value, hints[name])
        return cls(**known, rope=rope)

    def to_dict(self) -> dict[str, Any]:
        """Fields of a `config.json` that transformers 5 and `from_dict` both load."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "rope"}
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "num_key_value_heads": self.num_attention_heads,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "tie_word_embeddings": False,
            **own,
            "rope_parameters": _rope_to_dict(self.rope),
        }

    def _check_routing(self) -> None:
        experts, groups = self.n_routed_experts, self.n_group
        _require(
            experts % groups == 0, "n_group", groups, f"a divisor of n_routed_experts ({experts})"
        )
        _require(
            groups == 1 or experts // groups >= 2,
            "n_group",
            groups,
            "such that a group has two experts: its score is the sum of its best two",
        )
        _require(1 <= self.topk_group <= groups, "topk_group", self.topk_group, f"1 to {groups}")
        reachable = experts // groups * self.topk_group
        _require(
            self.num_experts_per_tok <= reachable,
            "num_experts_per_tok",
            self.num_experts_per_tok,
            f"at most {reachable}, the experts in topk_group groups",
        )


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's magnitude correction for a context stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


# What the repository trains and ships: 3.7 M parameters, every GEMM dimension a multiple of 16.


_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "max_position_embeddings",
)

_REQUIRED = (*_POSITIVE, "first_k_dense_replace", "q_lora_rank")

# Fields of which the model computes one value only; the first is the one to write.
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
    "quantization_config": (None,),
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

_ROPE_FIELDS = tuple(f.name for f in fields(RopeConfig))


def _require(condition: bool, name: str, value: object, wanted: str) -> None:
    if not condition:
        raise UnsupportedConfigError(f"{name} = {value!r} is not supported: it must be {wanted}")


def _check_type(name: str, value: object, hint: Any) -> None:
    """Refuse a JSON value that is not of its field's type; a whole number is a good float."""
    allowed = get_args(hint) or (hint,)
    good = type(value) in allowed or (type(value) is int and float in allowed)
    if isinstance(value, float) and not math.isfinite(value):
        good = False
    names = ["null" if kind is NoneType else kind.__name__ for kind in allowed]
    _require(good, name, value, f"of type {' or '.join(names)}")


def _check_kv_heads(rest: dict[str, Any]) -> None:
    heads = rest.get("num_attention_heads")
    kv_heads = rest.pop("num_key_value_heads", None)
    if kv_heads not in {None, heads}:
        raise UnsupportedConfigError(
            f"num_key_value_heads = {kv_heads!r} is not supported: latent attention has as many "
            f"as num_attention_heads ({heads!r})"
        )


def _read_rope(rest: dict[str, Any]) -> RopeConfig:
    """Take the rotary fields of either form out of `rest`."""
    old = rest.pop("rope_scaling", None)
    new = rest.pop("rope_parameters", None)
    theta = rest.pop("rope_theta", None)
    given = new or old or {}
    if not isinstance(given, Mapping):
        raise UnsupportedConfigError(f"rope_parameters = {given!r} is no JSON object")
    values = dict(given)
    kinds = {values.pop("rope_type", None), values.pop("type", None)} - {None}
    kind = kinds.pop() if kinds else "default"
    if kinds or kind not in {"default", "yarn"}:
        raise UnsupportedConfigError(
            f"rope type {kind!r} is not supported: only 'default' and 'yarn' are"
        )
    if theta is not None:
        values.setdefault("rope_theta", theta)
    unknown = sorted(values.keys() - set(_ROPE_FIELDS))
    if unknown:
        raise UnsupportedConfigError(
            f"rope field {unknown[0]!r} = {values[unknown[0]]!r} is unknown"
        )
    if kind == "yarn":
        if values.get("factor") is None:
            raise UnsupportedConfigError("rope factor is missing: yarn needs it")
        values.setdefault("original_max_position_embeddings", rest.get("max_position_embeddings"))
    else:
        values = {name: values[name] for name in ("rope_theta",) if name in values}
    present = {name: value for name, value in values.items() if value is not None}
    hints = get_type_hints(RopeConfig)
    for name, value in present.items():
        _check_type(f"rope {name}", value, hints[name])
    return RopeConfig(**present)


def _rope_to_dict(rope: RopeConfig) -> dict[str, Any]:
    if rope.factor is None:
        return {"rope_type": "default", "rope_theta": rope.rope_theta}
    values = {name: getattr(rope, name) for name in _ROPE_FIELDS}
    return {"rope_type": "yarn"} | {name: v for name, v in values.items() if v is not None}


# Tokens are bytes; 256 begins a text, 257 ends it, the rest of the vocabulary is spare.
TINY = ModelConfig(
    vocab_size=272,
    hidden_size=128,
    intermediate_size=384,
    moe_intermediate_size=48,
    num_hidden_layers=5,
    first_k_dense_replace=1,
    num_attention_heads=4,
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    n_routed_experts=32,
    n_shared_experts=1,
    num_experts_per_tok=4,
    n_group=8,
    topk_group=4,
    num_nextn_predict_layers=1,
    max_position_embeddings=1024,
    bos_token_id=256,
    eos_token_id=257,
)
