"""`Operations`: which data plane computes a model, decided once at start-up.

The plain plane is torch; the FP8 plane is the kernels, whose own selection (EQUIPOISE_KERNELS) is
made here too, so that it happens at start-up and is logged.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Self

import torch
from torch import distributed as dist

from equipoise_kernels.errors import KernelsUnavailableError
from equipoise_kernels.formats import GROUP
from equipoise_kernels.fp8 import selection
from equipoise_kernels.fp8.all_to_all.payload import Payload
from equipoise_kernels.fp8.all_to_all.shape import EpShape
from equipoise_kernels.fp8.attention.libraries import (
    LatentShape,
    misfit,
)
from equipoise_kernels.fp8.jit import is_interpreting
from equipoise_kernels.fp8.self_test import start_process
from equipoise_kernels.nodes import Nodes
from equipoise_model.config import Fp8Config, ModelConfig
from equipoise_model.device import compute_dtype, use
from equipoise_model.fp8.graphs import DecodeGraphs, capture_obstacle
from equipoise_model.fp8.slot_exchange import SlotExchange, exchange_tokens
from equipoise_model.fp8.transformer import Fp8Transformer, obstacle
from equipoise_model.fp8.warm_up import warm_up, warm_up_balance
from equipoise_model.latent_cache import BLOCK_TOKENS, KERNEL_BLOCK_TOKENS, LatentCache
from equipoise_model.plain.transformer import Transformer
from equipoise_model.serving_model import ServingModel

AUTO, BF16, FP8 = "auto", "bf16", "fp8"

_TORCH = "torch"

# The operation without whose kernel FP8 counts as missing: its torch twin is far too slow.
_CORE = "grouped_gemm"
_TRITON = "triton"
_ATTENTION = "mla_decode"


class OperationsError(ValueError):
    """A requested choice is not available here; the message says why, and what is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """How a model computes on a device."""

    device: torch.device
    fp8: Fp8Config | None
    """The kind of FP8 weights for the FP8 plane; None for the plain plane."""
    fp8_latents: bool = False
    """Whether latents are stored in FP8 too."""
    block_tokens: int = BLOCK_TOKENS
    """Positions per block of the latent cache."""
    sums_on_nodes: bool = False
    """Whether outputs that travel in two hops are summed on their nodes, which changes bits."""

    @classmethod
    def choose(
        cls,
        wanted: str,
        *,
        config: ModelConfig,
        device: torch.device,
        batch_invariant: bool,
        latents: str = BF16,
        block_tokens: int = 0,
        sums_on_nodes: bool = False,
    ) -> Self:
        """Resolve `auto`, `bf16` or `fp8` for a checkpoint's config as stored.

        `auto` is FP8 on a GPU if the checkpoint is, and never falls back to BF16 there; elsewhere
        it is bf16, which is computed in `device.compute_dtype`. `latents` is `bf16` (the model's
        compute dtype) or `fp8`. With `block_tokens` 0, blocks suit what attends.

        Raises:
            OperationsError: a choice does not exist or is not available here.
        """
        # By default, cuBLAS may round partial sums of BF16 products to BF16.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        fp8 = _weights(wanted, config=config, device=device, batch_invariant=batch_invariant)
        if latents not in (BF16, FP8):
            raise OperationsError(f"latents {latents!r} is neither bf16 nor fp8")
        if latents == FP8 and fp8 is None:
            raise OperationsError("latents in FP8 require weights in FP8: choose weights fp8 too")
        if latents == FP8 and config.kv_lora_rank % GROUP != 0:
            raise OperationsError(
                "latents in FP8 are not available: "
                f"kv_lora_rank is {config.kv_lora_rank}, not a multiple of {GROUP}"
            )
        if fp8 is not None and not _always_twins(device):
            block_tokens = block_tokens or KERNEL_BLOCK_TOKENS
            try:
                _fit_attention(config, block_tokens=block_tokens, quantized=latents == FP8)
            except KernelsUnavailableError as error:
                raise OperationsError(str(error)) from error
        return cls(
            device=device,
            fp8=fp8,
            fp8_latents=latents == FP8,
            block_tokens=block_tokens or BLOCK_TOKENS,
            sums_on_nodes=sums_on_nodes,
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations and of weights that are not in FP8."""
        return (
            torch.bfloat16
            if self.fp8 is not None
            else compute_dtype(on_gpu=self.device.type == "cuda")
        )

    @property
    def kernels(self) -> str:
        """What computes, human-readable: torch, or the commonest backend and its exceptions."""
        if self.fp8 is None:
            return ", ".join([self._torch, *self._variants])
        if _always_twins(self.device):
            return ", ".join([selection.REFERENCE, *self._variants])
        backends = selection.current().backends
        names = sorted(backends.values())
        common = max(names, key=names.count)
        others = (f"{operation}={name}" for operation, name in backends.items() if name != common)
        return ", ".join([common, *others, *self._variants])

    @property
    def backends(self) -> tuple[str, ...]:
        """What could compute, as "operation=backend|backend"; ranks must share one of each."""
        if self.fp8 is None:
            return (f"model={self._torch}", *self._variants)
        if _always_twins(self.device):
            return (f"model={selection.REFERENCE}", *self._variants)
        possible = selection.own().possible
        announced = (f"{operation}={'|'.join(names)}" for operation, names in possible.items())
        return (*announced, *self._variants)

    @property
    def announcement(self) -> str:
        """What this rank sends to the others when a group forms, as input of `agree`."""
        if self.fp8 is None or _always_twins(self.device):
            return self.kernels
        own = asdict(selection.own())
        return json.dumps(own | {"variants": self._variants}, sort_keys=True)

    def agree(self, announcements: Sequence[str]) -> None:
        """Compute with what all ranks can run, given their announcements, so that no bits differ.

        An empty announcement is from a rank that sent none.

        Raises:
            OperationsError: the ranks cannot agree.
        """
        words = {self.announcement, *filter(None, announcements)}
        others = sorted(word for word in words if not word.startswith("{"))
        if len(words) == len(others) == 1:
            return
        if others:
            raise OperationsError(
                f"ranks compute differently ({', '.join(others)} and more): give all of them the "
                f"same weights, device, sums_on_nodes and {selection.VARIABLE}"
            )
        announced = [_announced(word) for word in sorted(words)]
        first, *others_have = (variants for variants, _ in announced)
        if odd := first.union(*others_have) - first.intersection(*others_have):
            raise OperationsError(
                "; ".join(
                    _DIFFERENCES.get(one, f"only some ranks have {one}") for one in sorted(odd)
                )
            )
        try:
            selection.adopt(selection.agree([selected for _, selected in announced]))
        except KernelsUnavailableError as error:
            raise OperationsError(str(error)) from error

    def model(
        self,
        config: ModelConfig,
        *,
        num_slots: int,
        num_spare: int,
        row_block: int | None,
        mtp: bool,
        max_graph_rows: int,
        num_places: int = 0,
    ) -> ServingModel:
        """Build a model of a config, without weights.

        With `num_places`, layers share places for as many experts and `num_spare` staged ones, and
        their slots are empty. Without, each layer has a place for each slot and for `num_spare`.

        `num_spare` and `max_graph_rows` (rows of the largest captured step, 0 for none) only apply
        to the FP8 plane, `row_block` only to the plain one.
        """
        own_slots, own_spare = (0, 0) if num_places else (num_slots, num_spare)
        model: ServingModel
        with self.device:
            if self.fp8 is None:
                model = Transformer(
                    config, num_slots=own_slots, row_block=row_block, dtype=self.dtype, mtp=mtp
                )
            else:
                captures = self.device.type == "cuda" and max_graph_rows > 0
                model = Fp8Transformer(
                    config,
                    num_slots=own_slots,
                    num_spare=own_spare,
                    mtp=mtp,
                    graphs=DecodeGraphs(max_rows=max_graph_rows) if captures else None,
                )
        if num_places:
            first, *others = model.slots
            first.own_places(num_slots, num_places=num_places, num_spare=num_spare)
            for slots in others:
                slots.share_places(first)
        return model

    def exchange(
        self,
        config: ModelConfig,
        *,
        slots_per_rank: int,
        generation: int,
        max_step_tokens: int,
        max_graph_rows: int,
        group: dist.ProcessGroup,
        timeout_s: float,
        nodes: Nodes,
        balances: bool = False,
    ) -> SlotExchange | None:
        """Open the exchange of an FP8 model with several ranks, which all call this together.

        `nodes` are those of the group's ranks. With `balances`, what balances their replicas is
        compiled.

        None in the plain plane, whose layers exchange rows themselves.

        Raises:
            RuntimeError: another rank is gone, or no backend works for all ranks.
        """
        if self.fp8 is None:
            return None
        use(self.device)
        shape = EpShape(
            rank=dist.get_rank(group),
            num_ranks=dist.get_world_size(group),
            slots_per_rank=slots_per_rank,
            top_k=config.slots_per_token,
            dim=config.hidden_size,
            max_tokens=exchange_tokens(max_step_tokens, max_graph_rows=max_graph_rows),
            payload=Payload.FP8,
        )
        if balances and self.device.type == "cuda":
            warm_up_balance(
                num_experts=config.num_placed_experts,
                num_ranks=shape.num_ranks,
                slots_per_rank=slots_per_rank,
                device=self.device,
            )
        return SlotExchange.open(
            shape,
            max_captured_rows=max_graph_rows,
            generation=generation,
            group=group,
            device=self.device,
            timeout_s=timeout_s,
            nodes=nodes,
            sums_on_nodes=self.sums_on_nodes,
        )

    def steps(self, exchange: SlotExchange | None) -> str:
        """How decode steps run and how rows travel, human-readable; empty in the plain plane."""
        if self.fp8 is None:
            return ""
        reason = capture_obstacle(exchange)
        if self.device.type != "cuda":
            reason = f"{self.device.type} has no CUDA graphs"
        words = f"launched one by one: {reason}" if reason else "captured"
        if exchange is None:
            return words
        others = f" (not {exchange.passed_over})" if exchange.passed_over else ""
        return f"{words}; rows by {exchange.backend}{others}"

    def cache(
        self, config: ModelConfig, *, num_blocks: int, max_len: int, mtp: bool
    ) -> LatentCache:
        """A latent cache for the model."""
        return LatentCache(
            config,
            num_blocks=num_blocks,
            max_len=max_len,
            mtp=mtp,
            dtype=self.dtype,
            device=self.device,
            block_tokens=self.block_tokens,
            fp8=self.fp8_latents,
        )

    def warm_up(self, model: ServingModel, cache: LatentCache, *, max_rows: int) -> None:
        """Compile what steps of up to `max_rows` rows need, if anything; dense weights are loaded.

        Raises:
            torch.OutOfMemoryError: the largest step does not fit in the device's memory.
        """
        if self.device.type == "cuda" and isinstance(model, Fp8Transformer):
            use(self.device)
            warm_up(model, cache, max_rows=max_rows)

    @property
    def _torch(self) -> str:
        return _TORCH if self.dtype == torch.float32 else f"{_TORCH}-{BF16}"

    @property
    def _variants(self) -> tuple[str, ...]:
        """What else changes bits; empty for the defaults."""
        chosen = {_FP8_LATENTS: self.fp8_latents, _NODE_SUMS: self.sums_on_nodes}
        return tuple(name for name, is_chosen in chosen.items() if is_chosen)


_FP8_LATENTS, _NODE_SUMS = f"latents={FP8}", "sums=nodes"

_DIFFERENCES = {
    _FP8_LATENTS: "some ranks store latents in FP8 and some do not: set the same latents on all "
    "ranks",
    _NODE_SUMS: "some ranks sum outputs on nodes and some do not: set the same sums_on_nodes on "
    "all ranks",
}


def wants_fp8(wanted: str, *, config: ModelConfig, on_gpu: bool) -> bool:
    """Whether `auto`, `bf16` or `fp8` means FP8 for a checkpoint's config as stored.

    Raises:
        OperationsError: it is none of the three.
    """
    if wanted not in (AUTO, BF16, FP8):
        raise OperationsError(f"{wanted!r} is not one of auto, bf16 and fp8")
    return wanted == FP8 or (wanted == AUTO and on_gpu and config.quantization_config is not None)


def fp8_obstacle(config: ModelConfig, *, batch_invariant: bool) -> str | None:
    """Return why a model cannot run in FP8 on any device, or None."""
    if batch_invariant:
        return "batch-invariant mode is only available with bf16: turn it off, or choose bf16"
    return obstacle(config)


def _weights(
    wanted: str, *, config: ModelConfig, device: torch.device, batch_invariant: bool
) -> Fp8Config | None:
    """The FP8 that weights are stored in, or None; starts the kernels if there are any."""
    if not wants_fp8(wanted, config=config, on_gpu=device.type == "cuda"):
        return None
    reason = fp8_obstacle(config, batch_invariant=batch_invariant)
    if reason is None and not _always_twins(device):
        reason = _missing_kernels(device)
    if reason is None:
        return config.quantization_config or Fp8Config()
    if wanted == FP8:
        raise OperationsError(f"FP8 is not available: {reason}")
    raise OperationsError(
        f"the checkpoint is in FP8, which is not available: {reason}; weights bf16 would take "
        "twice the memory"
    )


def _missing_kernels(device: torch.device) -> str | None:
    """Start the kernels; return why only their torch twins could compute here, or None.

    Twins that EQUIPOISE_KERNELS names are no obstacle.

    Raises:
        OperationsError: the setting of the kernels cannot be carried out.
    """
    try:
        if not selection.is_started():
            use(device)  # Self-tests run on the device that is current.
            start_process()
    except KernelsUnavailableError as error:
        raise OperationsError(str(error)) from error
    reason = selection.current().obstacles.get(f"{_CORE}={_TRITON}")
    if reason is None or selection.backend(_CORE, device) != selection.REFERENCE:
        return None
    return (
        f"{_CORE} has no kernel that runs on {device}, because {reason}; "
        f"{selection.VARIABLE}={selection.REFERENCE} computes with torch, slowly"
    )


def _fit_attention(config: ModelConfig, *, block_tokens: int, quantized: bool) -> None:
    """Exclude backends that cannot attend to the model's latents."""
    shape = LatentShape(
        rank=config.kv_lora_rank,
        rotary=config.qk_rope_head_dim,
        block_tokens=block_tokens,
        quantized=quantized,
    )
    possible = selection.own().possible[_ATTENTION]
    reasons = {f"{_ATTENTION}={name}": misfit(name, shape) for name in possible}
    selection.exclude({what: why for what, why in reasons.items() if why})


def _always_twins(device: torch.device) -> bool:
    """Whether the kernels' torch twins compute on the device, whatever is selected."""
    return device.type == "cpu" and not is_interpreting()


def _announced(word: str) -> tuple[set[str], selection.Selection]:
    """Return the variants and the backends of a rank."""
    try:
        values = json.loads(word)
        selected = selection.Selection(
            backends={str(one): str(name) for one, name in values["backends"].items()},
            possible={
                str(one): tuple(map(str, names)) for one, names in values["possible"].items()
            },
            obstacles={str(one): str(why) for one, why in values["obstacles"].items()},
        )
        return set(map(str, values["variants"])), selected
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise OperationsError(
            f"a rank announces {word[:80]!r}, which no rank of this release does: restart it"
        ) from None
