"""`Fp8Transformer`: the whole model in FP8, for serving."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from equipoise_model.config import ModelConfig
from equipoise_model.dispatch import ExpertParallel
from equipoise_model.expert_step import ExpertStep
from equipoise_model.fp8.block import Fp8Block
from equipoise_model.fp8.graphs import DecodeGraphs
from equipoise_model.fp8.mtp import Fp8MultiTokenPrediction
from equipoise_model.fp8.prefill import ExpandedRows, expanded_rows
from equipoise_model.fp8.rows import MicroBatch, StepRows
from equipoise_model.latent_cache import LatentCache
from equipoise_model.overlap import Stages, run_in_turns
from equipoise_model.plain.layers import Embedding, Linear, RMSNorm
from equipoise_model.ranges import named_stages
from equipoise_model.rope import Rope
from equipoise_model.serving_model import ServingModel
from equipoise_model.step import StepBatch, StepOutput


class Fp8Transformer(ServingModel):
    """A decoder of a config with `quantization_config`; weights are loaded, never trained.

    Args:
        config: sizes, for which `obstacle` returns None.
        num_slots: physical slots per MoE layer on this rank.
        num_spare: places beyond the slots, for staged experts.
        mtp: whether to build the multi-token-prediction modules, for drafting.
        graphs: captures decode steps, without drafting; None to launch every kernel in every step.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_slots: int,
        num_spare: int,
        mtp: bool = False,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        super().__init__()
        assert obstacle(config) is None
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(
            Fp8Block(
                config,
                sparse=layer >= config.first_k_dense_replace,
                num_slots=num_slots,
                num_spare=num_spare,
            )
            for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=torch.bfloat16)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype=torch.bfloat16)
        self.rope = Rope(config)
        self.mtp_layers = nn.ModuleList(
            Fp8MultiTokenPrediction(config, num_slots=num_slots, num_spare=num_spare)
            for _ in range(config.num_nextn_predict_layers if mtp else 0)
        )
        self._graphs = graphs
        self.requires_grad_(requires_grad=False)

    @torch.no_grad()
    def step(self, batch: StepBatch, cache: LatentCache, experts: ExpertParallel) -> StepOutput:
        """See `ServingModel`."""
        step = experts.begin_step(num_tokens=batch.num_tokens)
        steps = step.micro_batches() if len(step.tokens_by_batch) > 1 else [step]
        parts = batch.split([one.num_tokens for one in steps])
        batches = [
            MicroBatch(rows=_rows_of(part, cache), experts=one)
            for part, one in zip(parts, steps, strict=True)
        ]
        device = self.embed_tokens.weight.device
        if self._graphs is not None and self._graphs.fits(step):
            hidden_TD = self._graphs.run(self.forward, batches, cache, step)
        else:
            placed = [
                replace(one, rows=one.rows.to(device), expanded=self._expanded(part, cache))
                for part, one in zip(parts, batches, strict=True)
            ]
            hidden_TD = self.forward(placed, cache)
        return StepOutput(
            logits_SV=self.lm_head(hidden_TD[batch.sample_rows_S.to(device)]),
            hidden_TD=hidden_TD,
            draft=partial(self._draft, batch=batch, cache=cache, step=step),
        )

    def forward(self, batches: Sequence[MicroBatch], cache: LatentCache) -> Tensor:
        """Return hidden states [T, D] of a step's micro-batches, in order, after the final norm."""
        outputs = run_in_turns(
            [self._stages(batch, cache) for batch in batches],
            order=batches[0].experts.order,
            num_layers=self.config.num_moe_layers,
        )
        hidden_TD: Tensor = self.norm(torch.cat(outputs))
        return hidden_TD

    def _stages(self, batch: MicroBatch, cache: LatentCache) -> Stages[Tensor]:
        """Run rows through all layers, up to the final norm."""
        rows = batch.rows
        rotary = self.rope.at(rows.positions_T)
        x_TD: Tensor = self.embed_tokens(rows.tokens_T)
        delta_TD = torch.zeros_like(x_TD)
        for layer, block in enumerate(self._blocks()):
            stages = block.stages(
                x_TD,
                delta_TD,
                rows,
                rotary=rotary,
                latents=cache.latents(layer),
                experts=batch.experts,
                num_valid=batch.num_valid,
                expanded=batch.expanded,
            )
            delta_TD = yield from named_stages(
                stages, layer=layer, num_dense=self.config.first_k_dense_replace
            )
        return x_TD + delta_TD

    def _expanded(self, batch: StepBatch, cache: LatentCache) -> ExpandedRows | None:
        """The rows of a batch that attend in the expanded form, if any, on the device."""
        rows = expanded_rows(batch, config=self.config, block_tokens=cache.block_tokens)
        return None if rows is None else rows.to(self.embed_tokens.weight.device)

    def forward_draft(
        self,
        hidden_TD: Tensor,
        following_T: Tensor,
        *,
        depth: int,
        rows: StepRows,
        cache: LatentCache,
        experts: ExpertStep,
    ) -> Tensor:
        """Return hidden states [T, D] of module `depth`, from 1; see `DraftPass`."""
        module = self.mtp_layers[depth - 1]
        assert isinstance(module, Fp8MultiTokenPrediction)
        return module.forward_draft(
            hidden_TD,
            next_embedding_TD=self.embed_tokens(following_T),
            rows=rows,
            rotary=self.rope.at(rows.positions_T),
            latents=cache.latents(self.config.num_hidden_layers + depth - 1),
            experts=experts,
        )

    def _draft(
        self,
        hidden_TD: Tensor,
        following_T: Tensor,
        *,
        depth: int,
        tokens_by_rank: Sequence[int],
        batch: StepBatch,
        cache: LatentCache,
        step: ExpertStep,
    ) -> Tensor:
        """See `DraftPass`; the other arguments are the step's own."""
        num_rows = following_T.shape[0]
        return self.forward_draft(
            hidden_TD[:num_rows],
            following_T,
            depth=depth,
            rows=_rows_of(batch, cache).first(num_rows).to(hidden_TD.device),
            cache=cache,
            experts=step.resumed(
                layer=self.config.num_moe_layers + depth - 1, tokens_by_rank=tokens_by_rank
            ),
        )

    def _blocks(self) -> Iterator[Fp8Block]:
        for block in self.layers:
            assert isinstance(block, Fp8Block)
            yield block


def _rows_of(batch: StepBatch, cache: LatentCache) -> StepRows:
    return StepRows.of(
        tokens_T=batch.tokens_T,
        positions_T=batch.positions_T,
        sequences_T=batch.sequences_T,
        block_tables=batch.block_tables,
        block_tokens=cache.block_tokens,
    )


def obstacle(config: ModelConfig) -> str | None:
    """Return why a model of these sizes cannot run in FP8, or None."""
    groups = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "moe_intermediate_size": config.moe_intermediate_size,
        "q_lora_rank": config.q_lora_rank or _GROUP,
        "num_attention_heads * v_head_dim": config.num_attention_heads * config.v_head_dim,
    }
    for name, size in groups.items():
        if size % _GROUP != 0:
            return f"{name} is {size}, not a multiple of {_GROUP}"
    for name, size in (
        ("kv_lora_rank", config.kv_lora_rank),
        ("qk_rope_head_dim", config.qk_rope_head_dim),
    ):
        if size < _LEAST_WIDTH or size & (size - 1):
            return f"{name} is {size}, not a power of two of at least {_LEAST_WIDTH}"
    return None


_GROUP = 128
_LEAST_WIDTH = 16
