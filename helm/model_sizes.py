"""Writes helm/equipoise/files/models.yaml: models' sizes, by which the chart checks memory."""

from pathlib import Path

import torch

from equipoise_kernels.fp8.attention.libraries import FLASH_MLA_PROGRAMS
from equipoise_kernels.fp8.attention.mla_decode import split_sizes
from equipoise_model.config import ModelConfig
from equipoise_model.fp8.prefill import STRETCH, expands, stretch_bytes
from equipoise_model.memory import ALLOWANCE_BYTES, RankSizes, RowBytes, plan_memory
from equipoise_model.presets import DEEPSEEK_V3
from equipoise_model.sampling import rows_at_once, sampling_bytes
from equipoise_model.sampling_params import MAX_SCORED_ROWS

FILE = Path(__file__).parent / "equipoise" / "files" / "models.yaml"
MODELS = {"deepseek-v3": DEEPSEEK_V3}


def written() -> str:
    """The file's text."""
    lines = ["# Layers with experts, and bytes, of models in FP8. Written by helm/model_sizes.py."]
    for name, config in MODELS.items():
        lines += [f"{name}:", *(f"  {key}: {value}" for key, value in _sizes(config).items())]
    return "\n".join(lines) + "\n"


def _sizes(config: ModelConfig) -> dict[str, object]:
    row = RowBytes.of(config, is_fp8=True, dtype=torch.bfloat16)
    return {
        "layers": config.num_moe_layers,
        "draftLayers": config.num_expert_layers - config.num_moe_layers,
        "denseBytes": _term(config, "dense weights"),
        "slotBytes": _term(config, "experts"),
        "latentBytes": f"{{bf16: {_latents(config)}, fp8: {_latents(config, fp8_latents=True)}}}",
        "draftDenseBytes": _of_drafts(config, "dense weights"),
        "draftSlotBytes": _of_drafts(config, "experts"),
        "draftLatentBytes": f"{{bf16: {_of_drafts(config, 'latents') // 2}, "
        f"fp8: {_of_drafts(config, 'latents', fp8_latents=True) // 2}}}",
        "choices": config.num_experts_per_tok,
        "residualBytes": row.residual,
        "attentionBytes": row.attention,
        "partialBytes": row.partial,
        "splits": _splits(config),
        "libraryPrograms": FLASH_MLA_PROGRAMS,
        "expandedRows": _expanded_rows(config),
        "rebuiltBytes": stretch_bytes(config, num_queries=STRETCH, num_positions=STRETCH)
        // STRETCH,
        "logitBytes": row.logits,
        "scoredRows": MAX_SCORED_ROWS,
        "samplingBytes": sampling_bytes(1, config.vocab_size),
        "rowsAtOnce": rows_at_once(config.vocab_size),
        "expertRowBytes": row.expert,
        "messageBytes": row.message,
        "allowanceBytes": ALLOWANCE_BYTES,
    }


def _splits(config: ModelConfig) -> str:
    """Positions per split, each for up to so many rows; 0 for any number."""
    each = (
        f"{{rows: {size.max_queries or 0}, positions: {size.positions}}}"
        for size in split_sizes(config.num_attention_heads)
    )
    return f"[{', '.join(each)}]"


def _expanded_rows(config: ModelConfig) -> int:
    """Fewest rows of a prompt that attend in the expanded form, behind a long prefix."""
    rows = range(1, STRETCH)
    return next(n for n in rows if expands(config, num_queries=n, num_positions=8 * STRETCH))


def _latents(config: ModelConfig, *, fp8_latents: bool = False) -> int:
    """Bytes of one token: a cache of one position has that one and the zero block's."""
    return _term(config, "latents", fp8_latents=fp8_latents) // 2


def _of_drafts(config: ModelConfig, name: str, *, fp8_latents: bool = False) -> int:
    """What drafting adds to a term."""
    plain, drafting = (
        _term(config, name, fp8_latents=fp8_latents, speculate=speculate) for speculate in (0, 1)
    )
    return drafting - plain


def _term(config: ModelConfig, name: str, *, fp8_latents: bool = False, speculate: int = 0) -> int:
    """A term of a rank with one slot and one token."""
    sizes = RankSizes(
        is_fp8=True,
        on_gpu=True,
        num_ranks=1,
        slots_per_rank=1,
        spare_slots=0,
        num_blocks=1,
        block_tokens=1,
        fp8_latents=fp8_latents,
        context_length=1,
        max_requests=1,
        max_step_tokens=1,
        max_graph_rows=0,
        speculate=speculate,
    )
    plan = plan_memory(config, sizes)
    return {term.name: term.num_bytes for term in plan.terms}[name]


if __name__ == "__main__":
    FILE.write_text(written(), encoding="utf-8")
