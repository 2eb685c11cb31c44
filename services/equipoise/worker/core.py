"""`ModelCore`: the model and its checkpoint, with everything that does not depend on a rank."""

import logging
from dataclasses import dataclass
from typing import Self

import torch

from equipoise.planning.topology import ModelShape
from equipoise.rank.errors import WorkerError
from equipoise.telemetry.loading import Loading
from equipoise.worker.blocks import BlockPool
from equipoise.worker.memory import check_memory, num_blocks
from equipoise.worker.scheduler import Scheduler
from equipoise.worker.settings import WorkerSettings
from equipoise_kernels.plain.row_invariance import RowVarianceError
from equipoise_model.checkpoint import Checkpoint, CheckpointError
from equipoise_model.checkpoint_digests import verified
from equipoise_model.checkpoint_manifest import Payloads
from equipoise_model.config import UnsupportedConfigError
from equipoise_model.device import DeviceError, choose_device
from equipoise_model.drafting import Drafter
from equipoise_model.experts import PhysicalSlots
from equipoise_model.latent_cache import LatentCache
from equipoise_model.operations import Operations, OperationsError
from equipoise_model.plain.row_invariance import verify_rows
from equipoise_model.plain.transformer import Transformer
from equipoise_model.serving_model import ServingModel

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelCore:
    """What is the same for every rank that this worker may become."""

    checkpoint: Checkpoint
    model: ServingModel
    cache: LatentCache
    operations: Operations
    pace_s_per_row: float = 0.0
    """As in `ExpertParallel.distributed`."""

    @classmethod
    def load(cls, settings: WorkerSettings, *, loading: Loading | None = None) -> Self:
        """Open the checkpoint and load everything but the routed experts, which need a layout.

        `loading` reports progress; to the log by default.

        Raises:
            WorkerError: the checkpoint is missing, damaged or does not fit the settings, the
                settings need more memory than there is, or this machine cannot compute
                batch-invariantly.
        """
        loading = loading or Loading(log_format=settings.log_format)
        with loading.of("config and headers"):
            checkpoint, operations = _opened(settings)
        if settings.pace_us_per_row and operations.device.type != "cpu":
            raise WorkerError(
                f"--pace-us-per-row works only on CPUs, but this worker uses {operations.device}: "
                "remove it, or set --device cpu"
            )
        config = checkpoint.config
        if settings.context_length > config.max_position_embeddings:
            raise WorkerError(
                f"context_length {settings.context_length} is more than the model's "
                f"{config.max_position_embeddings} positions: choose at most that many"
            )
        num_modules = config.num_nextn_predict_layers if checkpoint.has_mtp else 0
        if settings.speculate > num_modules:
            raise WorkerError(
                f"speculate {settings.speculate} is more than the checkpoint's {num_modules} "
                "multi-token-prediction modules: choose at most that many"
            )
        check_memory(config, settings, operations)
        model = operations.model(
            config,
            num_slots=settings.slots_per_rank,
            num_places=settings.places,
            num_spare=settings.spare_slots,
            row_block=settings.row_block,
            mtp=settings.speculate > 0,
            max_graph_rows=settings.graph_rows,
        )
        try:
            with loading.of("digests") as report:
                checkpoint = verified(checkpoint, mtp=settings.speculate > 0, progress=report)
            with loading.of("dense weights") as report:
                checkpoint.load_dense(model, progress=report)
        except CheckpointError as error:
            raise WorkerError(f"checkpoint {settings.checkpoint}: {error}") from error
        cache = operations.cache(
            config,
            num_blocks=num_blocks(settings, block_tokens=operations.block_tokens),
            max_len=settings.context_length,
            mtp=settings.speculate > 0,
        )
        try:
            operations.warm_up(model, cache, max_rows=settings.max_step_tokens)
        except torch.OutOfMemoryError as error:
            raise WorkerError(
                f"a step of {settings.max_step_tokens} tokens does not fit in the memory of "
                f"{operations.device}: lower max_step_tokens, cache_tokens or slots_per_rank"
            ) from error
        if settings.batch_invariant:
            assert isinstance(model, Transformer)
            try:
                verify_rows(model, cache)
            except RowVarianceError as error:
                raise WorkerError(str(error)) from error
        return cls(
            checkpoint=checkpoint,
            model=model.eval(),
            cache=cache,
            operations=operations,
            pace_s_per_row=settings.pace_us_per_row / 1e6,
        )

    def latent_form(self, settings: WorkerSettings) -> str:
        """What a token's latents look like here: equal forms hold the same bytes for it."""
        bits = "invariant" if settings.batch_invariant else "fast"
        return f"v1/{self.checkpoint.fingerprint[:32]}/{self.cache.form}/{bits}"

    def block_pool(self) -> BlockPool:
        """Return the accounting of the cache's blocks, all free."""
        return BlockPool(num_blocks=self.cache.num_blocks, block_tokens=self.cache.block_tokens)

    def scheduler(self, settings: WorkerSettings) -> Scheduler:
        """Return a scheduler without requests, over all blocks of the cache."""
        return Scheduler(
            blocks=self.block_pool(),
            max_requests=settings.max_requests,
            max_queued=settings.max_queued_requests,
            max_step_tokens=settings.max_step_tokens,
            num_drafts=settings.speculate,
            max_drafting=settings.speculate_up_to,
            hold_s=settings.hold_s,
        )

    @property
    def parity_tokens(self) -> int:
        """Pairs of a token and an earlier position that cost as much as a token without them."""
        return self.checkpoint.config.attention_parity_tokens

    def drafter(self, settings: WorkerSettings) -> Drafter | None:
        """Return what drafts tokens; None if the settings turn speculative decoding off."""
        if not settings.speculate:
            return None
        return Drafter(self.model, num_drafts=settings.speculate)

    @property
    def payload_checksums(self) -> Payloads:
        """Checksums of all placed experts' payloads by the checkpoint's manifest."""
        checksums = self.checkpoint.payload_checksums(mtp=self.model.num_mtp_layers > 0)
        assert checksums is not None, "the checkpoint is verified"
        return checksums

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.operations.device

    @property
    def slots(self) -> list[PhysicalSlots]:
        """This rank's physical slots, by MoE layer; draft modules are the last ones."""
        return self.model.slots

    @property
    def shape(self) -> ModelShape:
        """The model's dimensions, which all workers of a pool must share."""
        config = self.checkpoint.config
        return ModelShape(
            num_layers=len(self.slots),
            num_experts=config.num_placed_experts,
            # The shared expert is in no group.
            num_groups=1 if config.shared_as_routed else config.n_group,
            expert_bytes=config.expert_bytes,
            has_shared_expert=config.shared_as_routed,
        )


def _opened(settings: WorkerSettings) -> tuple[Checkpoint, Operations]:
    """Open the checkpoint, with payloads in the format that the chosen operations compute with."""
    routed = settings.shared_as_routed
    try:
        device = choose_device(settings.device)
    except DeviceError as error:
        raise WorkerError(f"device: {error}") from error
    try:
        stored = Checkpoint.open(settings.checkpoint, keep_fp8=True, shared_as_routed=routed)
        operations = Operations.choose(
            settings.weights,
            config=stored.config,
            device=device,
            batch_invariant=settings.batch_invariant,
            latents=settings.latents,
            block_tokens=settings.block_tokens,
            sums_on_nodes=settings.sums_on_nodes,
        )
        if operations.fp8 == stored.config.quantization_config:
            return stored, operations
        if operations.fp8 is None:
            _log.warning(
                "the checkpoint is in FP8, and %s computes it in %s, with %d times the memory: FP8 "
                "needs a Hopper GPU",
                device,
                str(operations.dtype).removeprefix("torch."),
                operations.dtype.itemsize,
            )
        converted = Checkpoint.open(
            settings.checkpoint, quantize_as=operations.fp8, shared_as_routed=routed
        )
        return converted, operations
    except OperationsError as error:
        raise WorkerError(f"weights: {error}") from error
    except (CheckpointError, UnsupportedConfigError) as error:
        raise WorkerError(f"checkpoint {settings.checkpoint}: {error}") from error


def single_threaded() -> None:
    """Compute on one thread: ranks share few cores, and more threads would contend for them."""
    torch.set_num_threads(1)
