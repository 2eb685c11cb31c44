"""A model's config.json (Hugging Face's form): what planning wants to know of a model.

Names differ between model families; these are those of DeepSeek, Qwen, Kimi, GLM and Mixtral.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Experts of a model. `expert_bytes` are one expert's weights and scales in one layer."""

    num_experts: int
    num_groups: int
    first_moe_layer: int
    expert_bytes: int
    top_k: int | None


def read_model_config(path: Path) -> ModelConfig:
    """Read a config.json.

    Raises:
        FormatError: it cannot be read, is of no MoE model, or of weights in an unknown format.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise FormatError(f"a model's config is an object, not {shown(document)}")  # noqa: TRY301
        return _model_config(document)
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror}") from None
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: it is no JSON: {error}") from None


def _model_config(document: dict[str, Any]) -> ModelConfig:
    hidden = _first_of(document, ("hidden_size",))
    inner = _first_of(document, _EXPERT_SIZE)
    top_k = document.get("num_experts_per_tok")
    return ModelConfig(
        num_experts=_first_of(document, _NUM_EXPERTS),
        num_groups=whole(document.get("n_group") or 1, "n_group", least=1),
        first_moe_layer=whole(document.get("first_k_dense_replace", 0), "first_k_dense_replace"),
        expert_bytes=_MATRICES * _matrix_bytes(document, hidden, inner),
        top_k=None if top_k is None else whole(top_k, "num_experts_per_tok", least=1),
    )


def _matrix_bytes(document: dict[str, Any], hidden: int, inner: int) -> int:
    quantization = document.get("quantization_config")
    if quantization is None:
        dtype = document.get("dtype", document.get("torch_dtype", "bfloat16"))
        if not isinstance(dtype, str) or dtype not in _BYTES_OF:
            raise FormatError(f"weights of type {shown(dtype)} are not known: say --expert-bytes")
        return hidden * inner * _BYTES_OF[dtype]
    block = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    match quantization, block:
        case {"quant_method": "fp8"}, None:
            scales = 1
        case {"quant_method": "fp8"}, [int(rows), int(columns)] if rows > 0 and columns > 0:
            scales = -(-hidden // rows) * -(-inner // columns)
        case _:
            raise FormatError("quantized weights other than fp8 are not known: say --expert-bytes")
    return hidden * inner + 4 * scales


def _first_of(document: dict[str, Any], names: tuple[str, ...]) -> int:
    for name in names:
        if document.get(name) is not None:
            return whole(document[name], name, least=1)
    raise FormatError(f"it names no {' or '.join(names)}: it is of no MoE model")
