"""Joins an epoch: stages the experts its slots lack, meets the other ranks, forms the group.

Slots keep their experts until all ranks have met, because peers pull from them. A new epoch
therefore begins as a generation does: no rank changes before every rank has verified bytes.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from equipoise.planning.arrays import EMPTY, ExpertTable
from equipoise.planning.layout import is_moved
from equipoise.planning.moves import Move
from equipoise.rank.errors import GroupError
from equipoise.rank.held import NO_CHECKSUM, SlotIndex
from equipoise.telemetry.loading import Loading
from equipoise.wire.balancer_messages import JoinEpoch
from equipoise.worker.group import RankGroup, first_line, meet
from equipoise.worker.parts import WorkerParts
from equipoise.worker.placement import HeldSlots, placement_of
from equipoise.worker.reach import unreached_peers
from equipoise.worker.settings import ReplicaChoice
from equipoise_kernels.nodes import Nodes
from equipoise_model.experts import StagedExperts, checksum
from equipoise_model.fp8.slot_exchange import SlotExchange

_POLL_S = 0.05
_MAX_NAMED = 4
_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpochGroup:
    """An epoch that this worker has joined."""

    join_epoch: JoinEpoch
    group: RankGroup
    held: HeldSlots
    exchange: SlotExchange | None
    """Carries rows between ranks for the FP8 model; None for the plain model and a single rank."""


class WorkerSlots:
    """This worker's slots in all epochs."""

    def __init__(self, parts: WorkerParts, *, loading: Loading) -> None:
        self._parts = parts
        self._core = parts.core
        self._loading = loading
        self.held: HeldSlots | None = None
        """None until the ranks of an epoch have met."""
        self._loaded: HeldSlots | None = None
        """The same from when the slots were filled and hashed, even if that epoch is given up."""
        self._filled: dict[SlotIndex, int] = {}
        """The expert that a slot was filled with, until all are filled: epochs may be given up."""

    async def stage(
        self, join_epoch: JoinEpoch, *, abandoned: threading.Event
    ) -> Callable[[], None]:
        """Fetch the experts that the slots lack; the result applies them once all ranks have met.

        Slots that were never filled serve no peer and are filled at once.

        Raises:
            GroupError: `abandoned` was set, or the message's `join_timeout_s` has passed.
            TransferError: an expert is unavailable from every source, or damaged in the checkpoint
                without another source.
        """
        bound = _JoinBound(join_epoch, abandoned=abandoned)
        layout, rank = join_epoch.layout, join_epoch.rank
        wanted = layout.expert_of_slot[:, layout.own_slots(rank)]
        if self._loaded is None:
            await self._load(wanted, join_epoch, bound=bound)
            # Not interrupted: the next epoch would have to hash all slots again.
            self._loaded = await asyncio.to_thread(self._hashed, join_epoch)
        held = self._loaded
        missing: dict[SlotIndex, int] = {
            (int(layer), int(slot)): int(wanted[layer, slot])
            for layer, slot in np.argwhere(is_moved(held.expert_of_slot, wanted))
        }
        is_emptied = (held.expert_of_slot != EMPTY) & (wanted == EMPTY)
        emptied = [(layer, slot) for layer, slot in np.argwhere(is_emptied).tolist()]
        payloads = await self._fetch(missing, join_epoch, bound=bound)
        contents = await asyncio.to_thread(
            lambda: held.contents.changed(
                layout,
                dict.fromkeys(emptied, NO_CHECKSUM)
                | {index: checksum(payload) for index, payload in payloads.items()},
            )
        )
        fill = await asyncio.to_thread(self._filling, payloads, emptied)

        def apply() -> None:
            held.replace(contents, rank=rank, fill=fill)
            self.held = held

        return apply

    def open_exchange(self, group: RankGroup, join_epoch: JoinEpoch) -> SlotExchange | None:
        """Open what carries rows between ranks, if the model needs it; all ranks open it together.

        Raises:
            GroupError: a rank is gone, or no backend serves all ranks.
        """
        process_group = group.process_group
        if process_group is None:
            return None
        settings = self._parts.settings
        try:
            return self._core.operations.exchange(
                self._core.checkpoint.config,
                slots_per_rank=join_epoch.layout.slots_per_rank,
                generation=join_epoch.layout.generation,
                max_step_tokens=settings.max_step_tokens,
                max_graph_rows=settings.graph_rows,
                group=process_group,
                timeout_s=settings.step_timeout_s,
                nodes=nodes_of(join_epoch),
                balances=settings.replica_choice is ReplicaChoice.BALANCED,
            )
        except RuntimeError as error:
            group.close()
            raise GroupError(
                f"the {group.num_ranks} ranks of epoch {group.epoch} met but cannot exchange "
                f"rows: {first_line(error)}"
            ) from error

    async def _load(
        self, wanted: ExpertTable, join_epoch: JoinEpoch, *, bound: "_JoinBound"
    ) -> None:
        """Fill every slot: a layer's pulled experts together, experts read from disk one by one.

        Slots that an epoch before has filled with the same expert are kept. Those that it has
        filled in vain, and that hold nothing now, give up places.
        """
        in_vain = [(layer, slot) for layer, slot in self._filled if wanted[layer, slot] == EMPTY]
        await asyncio.to_thread(self._write, {}, in_vain)
        for index in in_vain:
            del self._filled[index]
        there = {index for index, one in self._filled.items() if wanted[index] == one}
        num_experts, done = int((wanted != EMPTY).sum()), len(there)
        if there:
            _log.info("continuing to load: %d of %d experts are in their slots", done, num_experts)
        first = join_epoch.layout.own_slots(join_epoch.rank).start
        moved = {(move.layer, move.slot - first) for move in join_epoch.moves}
        expert_bytes = self._core.shape.expert_bytes
        with self._loading.of("experts") as report:
            for layer, row in enumerate(wanted.tolist()):
                experts: dict[SlotIndex, int] = {
                    (layer, slot): one
                    for slot, one in enumerate(row)
                    if one != EMPTY and (layer, slot) not in there
                }
                pulled = {index: one for index, one in experts.items() if index in moved}
                read = [{index: one} for index, one in experts.items() if index not in moved]
                for batch in ([pulled] if pulled else []) + read:
                    payloads = await self._fetch(batch, join_epoch, bound=bound)
                    for index in batch:
                        self._filled.pop(index, None)
                    await asyncio.to_thread(self._write, payloads)
                    self._filled |= batch
                    done += len(batch)
                    report(done * expert_bytes, num_experts * expert_bytes)

    async def _fetch(
        self, missing: Mapping[SlotIndex, int], join_epoch: JoinEpoch, *, bound: "_JoinBound"
    ) -> dict[SlotIndex, Tensor]:
        """Return the payload for each slot: pulled if there is a move for it, else read."""
        first = join_epoch.layout.own_slots(join_epoch.rank).start
        moves = {(move.layer, move.slot - first): move for move in join_epoch.moves}
        pulled = [index for index in missing if index in moves]
        by_index: dict[SlotIndex, Tensor] = {}
        if pulled:
            pulling = self._pull([moves[index] for index in pulled], join_epoch)
            by_index = dict(zip(pulled, await bound.limit(pulling), strict=True))
        for (layer, slot), expert in missing.items():
            if (layer, slot) not in by_index:
                read = self._parts.reader.read(layer, expert)
                by_index[layer, slot] = await bound.limit(read)
        return by_index

    async def _pull(self, moves: list[Move], join_epoch: JoinEpoch) -> tuple[Tensor, ...]:
        puller = self._parts.puller(join_epoch, held=self.held)
        try:
            return (await puller.pull(moves)).payloads
        finally:
            await puller.close()

    def _filling(
        self, payloads: Mapping[SlotIndex, Tensor], emptied: Sequence[SlotIndex]
    ) -> Callable[[], None]:
        """Return what writes the payloads: from device memory if there is room, else the host."""
        try:
            return StagedExperts.prepare(payloads, self._core.slots, emptied=emptied).apply
        except torch.OutOfMemoryError:
            # An epoch may change every slot. Writing from the host takes longer, and no memory.
            _log.info("%d experts stay on the host: not enough device memory", len(payloads))
        return lambda: self._write(payloads, emptied)

    def _write(
        self, payloads: Mapping[SlotIndex, Tensor], emptied: Sequence[SlotIndex] = ()
    ) -> None:
        for layer, slot in emptied:
            self._core.slots[layer].empty(slot)
        for (layer, slot), payload in payloads.items():
            self._core.slots[layer].write(slot, payload)

    def _hashed(self, join_epoch: JoinEpoch) -> HeldSlots:
        return HeldSlots(
            self._core.slots,
            layout=join_epoch.layout,
            rank=join_epoch.rank,
            tables=lambda layout: placement_of(layout).to(self._core.device),
        )


def nodes_of(join_epoch: JoinEpoch) -> Nodes:
    """Return the nodes of an epoch's ranks."""
    return Nodes.named([peer.node for peer in join_epoch.peers])


async def join(
    join_epoch: JoinEpoch, *, slots: WorkerSlots, parts: WorkerParts, abandoned: threading.Event
) -> EpochGroup:
    """Become a rank of an epoch; returns shortly after `abandoned` is set.

    Raises:
        GroupError: the ranks did not meet in time, or cannot exchange rows; it names the peers that
            this rank cannot connect to.
        TransferError: an expert is unavailable from every source.
    """
    try:
        return await _form(join_epoch, slots=slots, parts=parts, abandoned=abandoned)
    except GroupError as error:
        unreached = await unreached_peers(join_epoch, abandoned=abandoned)
        raise GroupError(f"{error}{_listed(unreached)}", unreached=unreached) from error


async def _form(
    join_epoch: JoinEpoch, *, slots: WorkerSlots, parts: WorkerParts, abandoned: threading.Event
) -> EpochGroup:
    operations, end_s = parts.core.operations, time.monotonic() + join_epoch.join_timeout_s
    apply = await slots.stage(join_epoch, abandoned=abandoned)
    group = await asyncio.to_thread(
        meet,
        join_epoch,
        timeout_s=max(0.0, min(join_epoch.meet_timeout_s, end_s - time.monotonic())),
        step_timeout_s=parts.settings.step_timeout_s,
        abandoned=abandoned,
        on_met=apply,
        device=operations.device,
        announcement=operations.announcement,
        check=operations.agree,
    )
    assert slots.held is not None, "applied when the ranks met"
    exchange = await asyncio.to_thread(slots.open_exchange, group, join_epoch)
    return EpochGroup(join_epoch=join_epoch, group=group, held=slots.held, exchange=exchange)


def _listed(unreached: tuple[str, ...]) -> str:
    """The peers without a connection, as the end of a message."""
    if not unreached:
        return ""
    more = f" and {len(unreached) - _MAX_NAMED} more" if len(unreached) > _MAX_NAMED else ""
    return f"; no connection to {', '.join(unreached[:_MAX_NAMED])}{more}"


class _JoinBound:
    """Ends what a joining rank fetches, once the epoch is abandoned or takes too long."""

    def __init__(self, join_epoch: JoinEpoch, *, abandoned: threading.Event) -> None:
        self._join_epoch = join_epoch
        self._abandoned = abandoned
        self._end_s = time.monotonic() + join_epoch.join_timeout_s

    async def limit(self, fetching: Coroutine[Any, Any, _Result]) -> _Result:
        """Return what is fetched.

        Raises:
            GroupError: the rank gave up, and the fetching was cancelled.
        """
        task = asyncio.create_task(fetching)
        try:
            while not task.done():
                self._check()
                await asyncio.wait({task}, timeout=_POLL_S)
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
            del task  # Its error refers to this frame: what it fetched would live on.

    def _check(self) -> None:
        epoch, timeout_s = self._join_epoch.epoch, self._join_epoch.join_timeout_s
        if self._abandoned.is_set():
            raise GroupError(f"epoch {epoch} was abandoned before its ranks met")
        if time.monotonic() > self._end_s:
            raise GroupError(
                f"this rank of epoch {epoch} did not get its experts within {timeout_s:g} s"
            )
