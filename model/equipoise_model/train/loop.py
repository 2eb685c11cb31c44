"""The training loop: settings in, one record per step out.

Owns the optimiser, its schedule and the order of a step: losses, gradients, weights, selection
bias. `__main__` writes files and shows progress. The same settings on the same machine with the
same number of threads give the same losses.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipoise_model.config import ModelConfig
from equipoise_model.plain.router import Router, Routing
from equipoise_model.plain.transformer import Transformer
from equipoise_model.train.bias import expert_load, update_selection_bias
from equipoise_model.train.data import DOMAINS, sample_batch
from equipoise_model.train.losses import (
    mtp_loss,
    next_token_loss,
    sequence_balance_loss,
    specialization_loss,
)


class TrainSettingsError(ValueError):
    """A setting is out of range; the message gives its name and range."""


class DivergedError(RuntimeError):
    """The loss is not finite; the message gives the step and the remedy."""


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """What a run depends on other than the model's config; each field is a command-line option.

    Raises:
        TrainSettingsError: a value is out of range.
    """

    seed: int = _option(0, "seed of the weights and the order of text")
    steps: int = _option(550, "optimiser steps")
    num_sequences: int = _option(9, "sequences per step; the three domains alternate")
    sequence_tokens: int = _option(192, "tokens of a sequence")
    learning_rate: float = _option(3e-3, "peak, after warm-up; then a cosine down to a tenth")
    warmup_steps: int = _option(20, "steps of linear warm-up")
    weight_decay: float = _option(0.1, "AdamW's, on matrices only")
    clip_norm: float = _option(1.0, "largest norm of all gradients")
    bias_speed: float = _option(8e-3, "gamma: how far the selection bias moves in the first step")
    unsteered_share: float = _option(
        0.1, "final share of the steps that run without gamma and specialisation loss"
    )
    settling_steps: int = _option(100, "steps after training in which only the bias moves")
    settling_speed: float = _option(6e-3, "gamma of the first of those steps; falls to 0")
    balance_weight: float = _option(1e-4, "alpha of the sequence-wise balance loss")
    specialization_weight: float = _option(
        0.5, "initial weight of the loss that draws domains to different experts"
    )
    specialization_target: float = _option(
        0.58, "target divergence of two domains' experts, in nats; at most log(2)"
    )
    mtp_weight: float = _option(0.3, "lambda of the multi-token-prediction loss")

    def __post_init__(self) -> None:
        self.require("steps", self.steps >= 1, "at least 1")
        whole = self.num_sequences >= 1 and self.num_sequences % len(DOMAINS) == 0
        self.require("num_sequences", whole, f"a multiple of {len(DOMAINS)}, the domains")
        wanted = "at least 4: MTP needs a token after the next"
        self.require("sequence_tokens", self.sequence_tokens >= 4, wanted)
        self.require("learning_rate", self.learning_rate > 0, "above 0")
        self.require("clip_norm", self.clip_norm > 0, "above 0")
        self.require("unsteered_share", 0 <= self.unsteered_share <= 1, "within [0, 1]")
        for name in _NOT_NEGATIVE:
            self.require(name, getattr(self, name) >= 0, "0 or more")

    def require(self, name: str, condition: bool, wanted: str) -> None:
        """Raise TrainSettingsError with a field's name and value unless a condition holds."""
        if not condition:
            value = getattr(self, name)
            raise TrainSettingsError(f"{name} = {value!r}: it must be {wanted}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step's losses in nats per token, before the step's update."""

    step: int
    loss: float
    mtp_loss: float
    balance: float
    """Mean over routers of the balance loss, without its weight."""
    specialization: float
    """Mean over routers of the specialisation loss, without its weight."""
    max_over_mean: float
    """The batch's most loaded expert against the mean, in the worst layer."""


def new_model(config: ModelConfig, *, seed: int) -> Transformer:
    """Build a model with its MTP modules and random weights that depend only on the seed."""
    # Weights come from torch's global generator; restore its state, so that callers' draws do not
    # change.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Transformer(config, mtp=True)


def train(model: Transformer, settings: TrainSettings) -> Iterator[StepRecord]:
    """Train `model` in place and yield a record after each of `settings.steps` steps.

    Raises:
        CorpusError: this Python installation has too little text.
        DivergedError: a loss is infinite or NaN.
        TrainSettingsError: sequences are longer than the model's positions.
    """
    most = model.config.max_position_embeddings
    fits, wanted = settings.sequence_tokens <= most, f"at most max_position_embeddings ({most})"
    settings.require("sequence_tokens", fits, wanted)
    rng = np.random.default_rng(settings.seed)
    optimizer = _new_optimizer(model, settings)
    biases = [module.e_score_correction_bias for module in _routers(model)]
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, settings)
        tokens_BT = _sample(rng, settings)
        record, routings, total = _losses(model, tokens_BT, settings=settings, step=step)
        optimizer.zero_grad(set_to_none=True)
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        optimizer.step()
        gamma = settings.bias_speed * steering(step, settings)
        for bias_E, routing in zip(biases, routings, strict=True):
            update_selection_bias(bias_E, _load(routing), gamma=gamma)
        yield record


@torch.no_grad()
def settle_bias(model: Transformer, settings: TrainSettings) -> Iterator[int]:
    """Let the selection biases converge for the trained weights; yield the number of each step.

    Weights move faster than gamma lets a bias follow, so a short training ends with loads less even
    than its biases could make them. These forward passes see training text in another order.
    Affinities, and so what experts specialise in, do not change.
    """
    rng = np.random.default_rng([settings.seed, 1])
    biases = [module.e_score_correction_bias for module in _routers(model)]
    for step in range(settings.settling_steps):
        output = model.forward_train(_sample(rng, settings))
        gamma = settings.settling_speed * (1 - step / settings.settling_steps)
        for bias_E, routing in zip(biases, output.routings + output.mtp_routings, strict=True):
            update_selection_bias(bias_E, _load(routing), gamma=gamma)
        yield step


def learning_rate(step: int, settings: TrainSettings) -> float:
    """Linear from nearly 0 during warm-up, then a cosine to a tenth of the peak."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    progress = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return settings.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def steering(step: int, settings: TrainSettings) -> float:
    """Factor of gamma and the specialisation loss, which steer routing: linear from 1 to 0.

    The report holds gamma for most of its run and then sets it to 0. A run of minutes has to start
    with large steps, and those would leave the bias a step off at the end. Without steering, the
    last steps let affinities settle on the text alone.
    """
    steered_steps = settings.steps * (1 - settings.unsteered_share)
    return max(0.0, 1 - step / steered_steps) if steered_steps else 0.0


def _losses(
    model: Transformer, tokens_BT: Tensor, *, settings: TrainSettings, step: int
) -> tuple[StepRecord, tuple[Routing, ...], Tensor]:
    """Return a step's record, the routings in `_routers`' order, and the total loss."""
    output = model.forward_train(tokens_BT)
    routings = output.routings + output.mtp_routings
    loss = next_token_loss(output.logits_BTV, tokens_BT)
    further = torch.stack(
        [
            mtp_loss(logits_BTV, tokens_BT, depth=depth)
            for depth, logits_BTV in enumerate(output.mtp_logits, start=1)
        ]
        or [torch.zeros(())]
    ).mean()
    balance = torch.stack(
        [sequence_balance_loss(routing, num_sequences=len(tokens_BT)) for routing in routings]
    )
    specialization = torch.stack(
        [
            specialization_loss(
                routing,
                num_sequences=len(tokens_BT),
                num_domains=len(DOMAINS),
                target=settings.specialization_target,
            )
            for routing in routings
        ]
    )
    total = (
        loss
        + settings.mtp_weight * further
        + settings.balance_weight * balance.sum()
        + settings.specialization_weight * steering(step, settings) * specialization.sum()
    )
    if not math.isfinite(total.item()):
        raise DivergedError(
            f"the loss is {total.item()} at step {step}: lower the learning rate "
            f"({settings.learning_rate})"
        )
    record = StepRecord(
        step=step,
        loss=loss.item(),
        mtp_loss=further.item(),
        balance=balance.mean().item(),
        specialization=specialization.mean().item(),
        max_over_mean=max(
            float(load_E.max() / load_E.double().mean())
            for load_E in (_load(routing) for routing in output.routings)
        ),
    )
    return record, routings, total


def _sample(rng: np.random.Generator, settings: TrainSettings) -> Tensor:
    return torch.from_numpy(
        sample_batch(rng, num_sequences=settings.num_sequences, num_tokens=settings.sequence_tokens)
    )


def _load(routing: Routing) -> Tensor:
    return expert_load(routing.expert_ids_TK, num_experts=routing.scores_TE.shape[1])


def _routers(model: Transformer) -> list[Router]:
    """Routers of the MoE layers, then of the MTP modules, in execution order."""
    return [
        module
        for part in (model.layers, model.mtp_layers)
        for module in part.modules()
        if isinstance(module, Router)
    ]


def _new_optimizer(model: Transformer, settings: TrainSettings) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [
            {
                "params": [p for p in parameters if p.ndim > 1],
                "weight_decay": settings.weight_decay,
            },
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=settings.learning_rate,
        betas=(0.9, 0.95),
    )


_NOT_NEGATIVE = (
    "seed",
    "warmup_steps",
    "weight_decay",
    "bias_speed",
    "settling_steps",
    "settling_speed",
    "balance_weight",
    "specialization_weight",
    "specialization_target",
    "mtp_weight",
)
