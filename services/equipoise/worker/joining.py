"""From a JoinEpoch to a group: fill what the slots lack, meet the other ranks, form.

The slots keep what they hold until all ranks have met, because peers pull from them; so a new epoch
begins as a generation does: nobody changes before everybody has verified bytes.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equipoise.planning.arrays import Checksums, ExpertTable
from equipoise.planning.moves import Move
from equipoise.telemetry.loading import Loading
from equipoise.trust.credentials import Credentials
from equipoise.wire.messages import JoinEpoch
from equipoise.worker.core import ModelCore
from equipoise.worker.errors import GroupError
from equipoise.worker.group import RankGroup, first_line, meet
from equipoise.worker.held import Contents, HeldExperts, own_slots
from equipoise.worker.settings import WorkerSettings
from equipoise.worker.transfer import ExpertPuller
from equipoise.worker.waits import Waits
from equipoise_model.experts import StagedExperts, checksum
from equipoise_model.fp8.slot_exchange import SlotExchange
from equipoise_model.operations import Operations

_log = logging.getLogger(__name__)

SlotIndex = tuple[int, int]
"""A MoE layer and an own slot in it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Joined:
    """The group this worker joined and the experts it holds for it.

    `exchange` is what a model in FP8 carries rows to the other ranks with.
    """

    join_epoch: JoinEpoch
    group: RankGroup
    held: HeldExperts
    exchange: SlotExchange | None = None


class Slots:
    """This worker's slots over all epochs. `held` is None until they were filled once."""

    def __init__(
        self, core: ModelCore, *, credentials: Credentials, waits: Waits, loading: Loading
    ) -> None:
        self._core = core
        self._credentials = credentials
        self._waits = waits
        self._loading = loading
        self.held: HeldExperts | None = None

    @property
    def operations(self) -> Operations:
        """What computes with them."""
        return self._core.operations

    def open_exchange(
        self, group: RankGroup, join_epoch: JoinEpoch, settings: WorkerSettings
    ) -> SlotExchange | None:
        """What carries rows between the group's ranks, if the model needs it; all open it together.

        Raises:
            GroupError: a rank is gone, or they find no way to exchange rows.
        """
        process_group = group.process_group
        if process_group is None:
            return None
        try:
            return self.operations.exchange(
                self._core.checkpoint.config,
                slots_per_rank=join_epoch.layout.num_slots // len(join_epoch.peers),
                generation=join_epoch.layout.generation,
                max_step_tokens=settings.max_step_tokens,
                max_graph_rows=settings.max_requests,
                group=process_group,
                timeout_s=settings.step_timeout_s,
            )
        except RuntimeError as error:
            group.close()
            raise GroupError(
                f"the {len(join_epoch.peers)} ranks of epoch {join_epoch.epoch} met but cannot "
                f"exchange rows: {first_line(error)}"
            ) from error

    async def prepare(
        self, join_epoch: JoinEpoch, *, given_up: threading.Event
    ) -> Callable[[], None]:
        """Get what the slots lack; the result puts it there once all ranks have met.

        Slots that were never filled serve nobody and are filled at once.

        Raises:
            GroupError: `given_up` was set meanwhile.
            TransferError: an expert could be had from no source.
        """
        held = self.held
        own = own_slots(join_epoch.layout, rank=join_epoch.rank)
        wanted = join_epoch.layout.expert_of_slot[:, own]
        if held is None:
            await self._load(wanted, join_epoch, given_up=given_up)
            return lambda: self._fill(join_epoch)
        lacking: dict[SlotIndex, int] = {
            (int(layer), int(slot)): int(wanted[layer, slot])
            for layer, slot in np.argwhere(wanted != held.expert_of_slot)
        }
        payloads = await self._get(lacking, join_epoch, given_up=given_up)
        contents = Contents(
            layout=join_epoch.layout,
            checksums=await asyncio.to_thread(_with, payloads, held.contents.checksums),
        )
        fill = await asyncio.to_thread(self._ready, payloads)
        return lambda: held.become(contents, rank=join_epoch.rank, fill=fill)

    async def _load(
        self, wanted: ExpertTable, join_epoch: JoinEpoch, *, given_up: threading.Event
    ) -> None:
        """Fill every slot: a layer's pulled experts together, those that are read one by one."""
        first = own_slots(join_epoch.layout, rank=join_epoch.rank).start
        moved = {(move.layer, move.slot - first) for move in join_epoch.moves}
        done, total = 0, wanted.size
        with self._loading.of("experts") as told:
            for layer, row in enumerate(wanted.tolist()):
                places: dict[SlotIndex, int] = {(layer, slot): one for slot, one in enumerate(row)}
                pulled = {place: one for place, one in places.items() if place in moved}
                read = [{place: one} for place, one in places.items() if place not in moved]
                for part in ([pulled] if pulled else []) + read:
                    payloads = await self._get(part, join_epoch, given_up=given_up)
                    await asyncio.to_thread(self._write, payloads)
                    done += len(part)
                    told(
                        done * self._core.shape.expert_bytes, total * self._core.shape.expert_bytes
                    )

    async def _get(
        self, lacking: Mapping[SlotIndex, int], join_epoch: JoinEpoch, *, given_up: threading.Event
    ) -> dict[SlotIndex, Tensor]:
        """Payloads of experts by place: pulled where a move says from where, else read."""
        first = own_slots(join_epoch.layout, rank=join_epoch.rank).start
        moves = {(move.layer, move.slot - first): move for move in join_epoch.moves}
        pulled = [place for place in lacking if place in moves]
        payloads = dict(
            zip(
                pulled,
                await self._pull([moves[place] for place in pulled], join_epoch, given_up=given_up),
                strict=True,
            )
        )
        for (layer, slot), expert in lacking.items():
            if (layer, slot) not in payloads:
                _check(given_up)
                payloads[layer, slot] = await asyncio.to_thread(
                    self._core.checkpoint.read_expert, layer, expert
                )
        return payloads

    async def _pull(
        self, moves: list[Move], join_epoch: JoinEpoch, *, given_up: threading.Event
    ) -> tuple[Tensor, ...]:
        _check(given_up)
        if not moves:
            return ()
        puller = ExpertPuller(
            checkpoint=self._core.checkpoint,
            held=self.held,
            epoch=join_epoch.epoch,
            rank=join_epoch.rank,
            peers=join_epoch.peers,
            expert_bytes=self._core.shape.expert_bytes,
            credentials=self._credentials,
            waits=self._waits,
        )
        try:
            return (await puller.pull(moves)).payloads
        finally:
            await puller.close()

    def _ready(self, payloads: Mapping[SlotIndex, Tensor]) -> Callable[[], None]:
        """What puts payloads in their slots: at once from the device, if it has room for them."""
        try:
            return StagedExperts.prepare(payloads, self._core.slots).apply
        except torch.OutOfMemoryError:
            # An epoch may change every slot. From the host it takes longer, and no more memory.
            _log.info("%d experts wait on the host, for want of device memory", len(payloads))
        return lambda: self._write(payloads)

    def _write(self, payloads: Mapping[SlotIndex, Tensor]) -> None:
        for (layer, slot), payload in payloads.items():
            self._core.slots[layer].write(slot, payload)

    def _fill(self, join_epoch: JoinEpoch) -> None:
        self.held = HeldExperts(self._core.slots, layout=join_epoch.layout, rank=join_epoch.rank)


async def join(
    join_epoch: JoinEpoch,
    *,
    slots: Slots,
    settings: WorkerSettings,
    given_up: threading.Event,
) -> Joined:
    """Become a rank of an epoch; not much longer than until `given_up` is set.

    Raises:
        GroupError: the ranks did not meet in time, or cannot exchange rows.
        TransferError: an expert could be had from no source.
    """
    settle = await slots.prepare(join_epoch, given_up=given_up)
    group = await asyncio.to_thread(
        meet,
        join_epoch.rendezvous_address,
        epoch=join_epoch.epoch,
        rank=join_epoch.rank,
        num_ranks=len(join_epoch.peers),
        step_timeout_s=settings.step_timeout_s,
        meet_timeout_s=join_epoch.meet_timeout_s,
        given_up=given_up,
        met=settle,
        device=slots.operations.device,
        told=slots.operations.announcement,
        hear=slots.operations.agree,
    )
    assert slots.held is not None, "settled"
    exchange = await asyncio.to_thread(slots.open_exchange, group, join_epoch, settings)
    return Joined(join_epoch=join_epoch, group=group, held=slots.held, exchange=exchange)


def _with(payloads: Mapping[SlotIndex, Tensor], checksums: Checksums) -> Checksums:
    """Checksums of own slots, [layers, slots_per_rank, 16], when these payloads are in place."""
    changed = checksums.copy()
    for place, payload in payloads.items():
        changed[place] = np.frombuffer(checksum(payload), dtype=np.uint8)
    changed.flags.writeable = False
    return changed


def _check(given_up: threading.Event) -> None:
    if given_up.is_set():
        raise GroupError("the epoch was given up before its ranks had met")
