"""Reads a model's config.json (Hugging Face): the facts that planning needs.

Knows the names that DeepSeek, Qwen, Kimi, GLM and Mixtral use.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.formats.errors import FormatError
from equipoise.formats.tables import shown, whole

_NUM_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_EXPERT_SIZE = ("moe_intermediate_size", "intermediate_size")
_BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}
_MATRICES = 3  # gate, up and down
_CACHE_BYTES = 2  # bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """The experts of a model."""

    num_experts: int
    """Routed experts per layer."""
    num_groups: int
    """Expert groups; 1 if there are none."""
    first_moe_layer: int
    """Number of leading dense layers."""
    expert_bytes: int
    """Bytes of one expert's weights and scales in one layer."""
    top_k: int | None
    """Experts per token, if known."""
    token_bytes: int | None
    """Bytes of a token's latents, or of its keys and values, over all layers in bfloat16, if
    known."""


def read_model_config(path: Path) -> ModelDescription:
    """Read a config.json.

    Raises:
        FormatError: it cannot be read, is not an MoE model, or has weights in an unknown format.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise FormatError(f"a model's config must be an object, not {shown(document)}")  # noqa: TRY301
        return _model_config(document)
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror}") from None
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: it is not valid JSON: {error}") from None


def _model_config(document: dict[str, Any]) -> ModelDescription:
    hidden = _first_of(document, ("hidden_size",))
    inner = _first_of(document, _EXPERT_SIZE)
    top_k = document.get("num_experts_per_tok")
    return ModelDescription(
        num_experts=_first_of(document, _NUM_EXPERTS),
        num_groups=whole(document.get("n_group") or 1, "n_group", least=1),
        first_moe_layer=whole(document.get("first_k_dense_replace", 0), "first_k_dense_replace"),
        expert_bytes=_MATRICES * _matrix_bytes(document, hidden, inner),
        top_k=None if top_k is None else whole(top_k, "num_experts_per_tok", least=1),
        token_bytes=_token_bytes(document),
    )


def _token_bytes(document: dict[str, Any]) -> int | None:
    def number(name: str) -> int | None:
        value = document.get(name)
        return None if value is None else whole(value, name, least=1)

    match number("num_hidden_layers"), number("kv_lora_rank"), number("qk_rope_head_dim"):
        case int(layers), int(rank), int(rotary):
            return layers * (rank + rotary) * _CACHE_BYTES
    heads = number("num_attention_heads")
    head_dim = number("head_dim")
    if head_dim is None and heads is not None:
        head_dim = _first_of(document, ("hidden_size",)) // heads
    match number("num_hidden_layers"), number("num_key_value_heads") or heads, head_dim:
        case int(layers), int(kv_heads), int(width):
            return layers * 2 * kv_heads * width * _CACHE_BYTES
    return None


def _matrix_bytes(document: dict[str, Any], hidden: int, inner: int) -> int:
    quantization = document.get("quantization_config")
    if quantization is None:
        dtype = document.get("dtype", document.get("torch_dtype", "bfloat16"))
        if not isinstance(dtype, str) or dtype not in _BYTES_OF:
            raise FormatError(
                f"weights of type {shown(dtype)} are not supported: set --expert-bytes"
            )
        return hidden * inner * _BYTES_OF[dtype]
    block = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    match quantization, block:
        case {"quant_method": "fp8"}, None:
            scales = 1
        case {"quant_method": "fp8"}, [int(rows), int(columns)] if rows > 0 and columns > 0:
            scales = -(-hidden // rows) * -(-inner // columns)
        case _:
            raise FormatError(
                "quantized weights other than fp8 are not supported: set --expert-bytes"
            )
    return hidden * inner + 4 * scales


def _first_of(document: dict[str, Any], names: tuple[str, ...]) -> int:
    for name in names:
        if document.get(name) is not None:
            return whole(document[name], name, least=1)
    raise FormatError(f"it has no {' or '.join(names)}: it is not an MoE model")
