"""`Transformer`: the whole model, for training and for serving."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from equipoise_model.config import ModelConfig
from equipoise_model.dispatch import ExpertParallel
from equipoise_model.expert_step import ExpertStep
from equipoise_model.latent_cache import CacheStep, LatentCache
from equipoise_model.overlap import Stages, run_in_turns
from equipoise_model.plain.block import Block
from equipoise_model.plain.layers import Embedding, Linear, RMSNorm
from equipoise_model.plain.mtp import MultiTokenPrediction
from equipoise_model.plain.router import Router, Routing
from equipoise_model.ranges import named_layer, named_stages
from equipoise_model.rope import Rope
from equipoise_model.serving_model import ServingModel
from equipoise_model.step import StepBatch, StepOutput


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rows:
    """The rows of a step, or of one of its micro-batches, on the device."""

    tokens_T: Tensor
    rotary: tuple[Tensor, Tensor]
    """Cosines and sines of the rows' positions."""
    cache: CacheStep
    experts: ExpertStep


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOutput:
    """Results for whole sequences [B, T]."""

    logits_BTV: Tensor
    hidden_BTD: Tensor
    """Hidden states after the final norm."""
    routings: tuple[Routing, ...]
    """One per MoE layer; rows are the sequences' tokens, sequence by sequence."""
    mtp_logits: tuple[Tensor, ...]
    """`mtp_logits[k]` is [B, T - k - 1, V]; its row t predicts token t + k + 2."""
    mtp_routings: tuple[Routing, ...]
    """One per MTP module."""


class Transformer(ServingModel):
    """A DeepSeek-V3-style decoder with `num_slots` physical slots per MoE layer on this rank.

    Args:
        config: sizes.
        num_slots: physical slots per MoE layer; by default one for each placed expert.
        row_block: None for the fast form; a number of rows (16) for the batch-invariant form, in
            which a token's result does not depend on its batch, to the last bit.
        dtype: of weights and activations. Routers are in float32 in any case.
        mtp: whether to build the multi-token-prediction modules, for training and for drafting.
            They have only the fast form.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_slots: int | None = None,
        row_block: int | None = None,
        dtype: torch.dtype = torch.float32,
        mtp: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.row_block = row_block
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(
            Block(
                config,
                sparse=layer >= config.first_k_dense_replace,
                num_slots=num_slots,
                row_block=row_block,
                dtype=dtype,
            )
            for layer in range(config.num_hidden_layers)
        )
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.norm = RMSNorm(dim, eps=eps, row_block=row_block, dtype=dtype)
        self.lm_head = Linear(dim, config.vocab_size, row_block=row_block, dtype=dtype)
        self.rope = Rope(config)
        self.mtp_layers = nn.ModuleList(
            MultiTokenPrediction(config, num_slots=num_slots, dtype=dtype)
            for _ in range(config.num_nextn_predict_layers if mtp else 0)
        )
        self._initialize()

    def forward_train(self, tokens_BT: Tensor) -> TrainOutput:
        """Run whole sequences of int64 tokens with every expert local, differentiable."""
        batch, length = tokens_BT.shape
        experts = ExpertParallel.local(self.config, device=tokens_BT.device)
        cos_TF, sin_TF = self.rope.at(torch.arange(length, device=tokens_BT.device))
        with _recorded(self.layers) as routings:
            step = experts.begin_step(num_tokens=batch * length)
            x_BTD: Tensor = self.embed_tokens(tokens_BT)
            for block in self._blocks():
                x_BTD = block.forward_expanded(x_BTD, cos_TF, sin_TF, step=step)
        hidden_BTD = self._per_row(self.norm, x_BTD)
        mtp_logits, mtp_routings = self._train_mtp(tokens_BT, hidden_BTD)
        return TrainOutput(
            logits_BTV=self._per_row(self.lm_head, hidden_BTD),
            hidden_BTD=hidden_BTD,
            routings=tuple(routings),
            mtp_logits=mtp_logits,
            mtp_routings=mtp_routings,
        )

    @torch.no_grad()
    def step(self, batch: StepBatch, cache: LatentCache, experts: ExpertParallel) -> StepOutput:
        """See `ServingModel`."""
        whole = self._placed(batch, cache, experts.begin_step(num_tokens=batch.num_tokens))
        rows = [whole]
        if len(whole.experts.tokens_by_batch) > 1:
            steps = whole.experts.micro_batches()
            batches = batch.split([step.num_tokens for step in steps])
            rows = [
                self._placed(one, cache, step) for one, step in zip(batches, steps, strict=True)
            ]
        outputs = run_in_turns(
            list(map(self._stages, rows)),
            order=whole.experts.order,
            num_layers=self.config.num_moe_layers,
        )
        hidden_TD: Tensor = self.norm(torch.cat(outputs))
        return StepOutput(
            logits_SV=self.lm_head(hidden_TD[batch.sample_rows_S.to(hidden_TD.device)]),
            hidden_TD=hidden_TD,
            draft=partial(self._draft, rows=whole),
        )

    def _placed(self, batch: StepBatch, cache: LatentCache, experts: ExpertStep) -> "_Rows":
        """Place a batch's tokens in the cache."""
        return _Rows(
            tokens_T=batch.tokens_T.to(self.embed_tokens.weight.device),
            rotary=self.rope.at(batch.positions_T),
            cache=cache.begin_step(
                block_tables=batch.block_tables,
                sequences_T=batch.sequences_T,
                positions_T=batch.positions_T,
                row_block=self.row_block,
            ),
            experts=experts,
        )

    def _stages(self, rows: "_Rows") -> Stages[Tensor]:
        """Run rows through all layers, up to the final norm."""
        x_TD: Tensor = self.embed_tokens(rows.tokens_T)
        for layer, block in enumerate(self._blocks()):
            stages = block.stages(
                x_TD, *rows.rotary, layer=layer, cache_step=rows.cache, expert_step=rows.experts
            )
            x_TD = yield from named_stages(
                stages, layer=layer, num_dense=self.config.first_k_dense_replace
            )
        return x_TD

    @torch.no_grad()
    def _draft(
        self,
        hidden_TD: Tensor,
        following_T: Tensor,
        *,
        depth: int,
        tokens_by_rank: Sequence[int],
        rows: "_Rows",
    ) -> Tensor:
        """See `DraftPass`; `rows` are the step's own."""
        module = self.mtp_layers[depth - 1]
        assert isinstance(module, MultiTokenPrediction)
        num_rows = following_T.shape[0]
        cos_TF, sin_TF = rows.rotary
        layer = self.config.num_hidden_layers + depth - 1
        with named_layer(layer, num_dense=self.config.first_k_dense_replace):
            return module.forward_draft(
                hidden_TD[:num_rows],
                next_embedding_TD=self.embed_tokens(following_T),
                rotary=(cos_TF[:num_rows], sin_TF[:num_rows]),
                layer=layer,
                cache_step=rows.cache if num_rows else rows.cache.without_rows(),
                expert_step=rows.experts.resumed(
                    layer=self.config.num_moe_layers + depth - 1, tokens_by_rank=tokens_by_rank
                ),
            )

    def _train_mtp(
        self, tokens_BT: Tensor, hidden_BTD: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[Routing, ...]]:
        """Return logits and routings of the chain of MTP modules, each one token shorter."""
        logits: list[Tensor] = []
        with _recorded([module.mlp for module in self._mtp_modules()]) as routings:
            for depth, module in enumerate(self._mtp_modules(), start=1):
                next_BT = tokens_BT[:, depth:]
                batch, length = next_BT.shape
                cos_TF, sin_TF = self.rope.at(torch.arange(length, device=tokens_BT.device))
                # Every MTP module is the first MoE layer of a separate step.
                experts = ExpertParallel.local(self.config, device=tokens_BT.device)
                step = experts.begin_step(num_tokens=batch * length)
                hidden_BTD = module.forward_mtp(
                    hidden_BTD[:, :length],
                    next_embedding_BTD=self.embed_tokens(next_BT),
                    cos_TF=cos_TF,
                    sin_TF=sin_TF,
                    step=step,
                )
                logits.append(self._per_row(self.lm_head, hidden_BTD))
        return tuple(logits), tuple(routings)

    def _blocks(self) -> Iterator[Block]:
        for block in self.layers:
            assert isinstance(block, Block)
            yield block

    def _mtp_modules(self) -> Iterator[MultiTokenPrediction]:
        for module in self.mtp_layers:
            assert isinstance(module, MultiTokenPrediction)
            yield module

    @staticmethod
    def _per_row(module: nn.Module, x_BTD: Tensor) -> Tensor:
        rows: Tensor = module(x_BTD.flatten(0, 1))
        return rows.view(*x_BTD.shape[:2], -1)

    @torch.no_grad()
    def _initialize(self) -> None:
        """Draw normal weights from torch's generator; norms stay 1, meta tensors are skipped."""
        for parameter in self.parameters():
            if parameter.ndim > 1 and not parameter.is_meta:
                parameter.normal_(std=self.config.initializer_range)


@contextmanager
def _recorded(layers: Iterable[nn.Module]) -> Iterator[list[Routing]]:
    """Collect the routings that the layers' routers compute, in order."""
    routings: list[Routing] = []

    def keep(_module: nn.Module, _inputs: object, routing: Routing) -> None:
        routings.append(routing)

    routers = [m for layer in layers for m in layer.modules() if isinstance(m, Router)]
    handles = [router.register_forward_hook(keep) for router in routers]
    try:
        yield routings
    finally:
        for handle in handles:
            handle.remove()
