"""`Member`: one worker of a pool."""

import sys
from dataclasses import dataclass, field, fields, replace

from equipoise.planning.arrays import ExpertTable
from equipoise.planning.layout import Layout
from equipoise.planning.moves import CHECKSUM_BYTES
from equipoise.wire.messages import GroupLost, Heartbeat, Hello, RankStats, RunningState, Serving

_OWN_CELL_BYTES = 4 + CHECKSUM_BYTES
"""An own slot: its expert and its checksum, in whichever message they come."""


def bytes_of(hello: Hello) -> int:
    """Bytes that a worker's names take, and the tables of its own slots."""
    values = [getattr(hello, one.name) for one in fields(hello)]
    texts = [*(value for value in values if isinstance(value, str)), *hello.backends]
    cells = hello.model.num_layers * hello.slots_per_rank
    return cells * _OWN_CELL_BYTES + sum(map(sys.getsizeof, texts))


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """One worker. Only its own methods change it."""

    hello: Hello
    """What it reported when it connected, without `running` and `group_lost`."""

    hello_bytes: int = field(init=False)
    """`bytes_of` that."""

    last_heard_s: float
    """When it connected or its latest message arrived. After a message was rejected, only a valid
    heartbeat counts: a worker does not live on messages that cannot be used."""

    since_s: float
    """When it connected, got its rank, or lost its group; the latest of them."""

    rank: int | None = None
    """Its rank in the epoch; None without one."""

    joined: bool = False
    """Whether it was sent its rank on this stream."""

    heartbeat_s: float = 0.0
    """Seconds between its heartbeats, as sent with its rank."""

    generation: int = 0
    """Generation that it reported last; 0 for none."""

    staged_generation: int = 0
    """Generation that it has staged and not switched to; 0 for none."""

    idle: bool = False
    """Whether its engine takes no forward passes."""

    weights_version: int = 0
    """Number of the weights in its slots, as last reported; 0 if they never change."""

    draining: bool = False
    """Whether it takes no new requests."""

    serving: bool = False
    """Whether it holds its part of a layout and takes part in steps."""

    claim: RunningState | None = None
    """What it reported to run in an epoch that this balancer did not open; else None."""

    lost_reason: str | None = None
    """Why its group ended; None while it has one."""

    left_out: str | None = None
    """Why the current epoch has no rank for it although it is connected."""

    later_epoch: int = 0
    """Epoch that it has taken up, if that keeps it from the current one; else 0."""

    held: ExpertTable | None = None
    """What its slots hold, int32 [layers, slots_per_rank]; None if unknown."""

    rejected: str = ""
    """Why its latest message was rejected; empty once a heartbeat is valid again."""

    is_stopping: bool = False
    """Whether it announced that it stops in order."""

    gone_reason: str | None = None
    """Why its stream ended; None while it is open."""

    stats: RankStats | None = None
    """Its latest statistics, without timeouts."""

    steps: str = ""
    """How its steps run, as reported."""

    def __post_init__(self) -> None:
        self.hello_bytes = bytes_of(self.hello)

    @property
    def name(self) -> str:
        """Stable name of the worker."""
        return self.hello.worker

    @property
    def connected(self) -> bool:
        """Whether the worker has a stream now."""
        return self.gone_reason is None

    @property
    def is_gone(self) -> bool:
        """Whether the process that had a rank is gone; of another one nothing is known yet."""
        is_another = self.rank is None and self.left_out is None and self.claim is None
        return is_another or not self.connected

    @property
    def has_new_weights(self) -> bool:
        """Whether its weights were updated after it hashed them for its Hello."""
        return self.weights_version > self.hello.weights_version

    @property
    def is_claiming(self) -> bool:
        """Whether it reports to run in an epoch in which it does not count as a rank."""
        return self.claim is not None and self.rank is None

    def is_process_of(self, hello: Hello) -> bool:
        """Whether the process that said this Hello is the one that it already is."""
        return self.hello.boot_id == hello.boot_id

    def note_heard(self, *, now: float) -> None:
        """A valid message arrived."""
        if not self.rejected:
            self.last_heard_s = now

    def note_rejected(self, reason: str) -> None:
        """A message of it was rejected."""
        self.rejected = reason

    def note_heartbeat(self, heartbeat: Heartbeat, *, now: float) -> None:
        """Take over its state, except its generations."""
        self.last_heard_s, self.rejected = now, ""
        self.draining = heartbeat.draining
        if self.hello.engine:  # Ours step at all times, and their weights never change.
            self.idle, self.weights_version = heartbeat.idle, heartbeat.weights_version

    def note_generations(self, heartbeat: Heartbeat) -> None:
        """Take over the generations that it runs and has staged, as a rank of the epoch."""
        self.generation = heartbeat.generation
        self.staged_generation = heartbeat.staged_generation

    def note_stats(self, stats: RankStats) -> None:
        """Take over its statistics; `Timeouts` counts its timeouts."""
        self.stats = replace(stats, timeouts=())

    def note_joined(self, *, heartbeat_s: float) -> None:
        """It was sent its rank."""
        self.joined, self.heartbeat_s = True, heartbeat_s

    def note_serving(self, serving: Serving, layout: Layout | None) -> None:
        """It holds its part of `layout`, which is None if no longer known."""
        self.generation, self.serving, self.steps = serving.generation, True, serving.steps
        self._hold(layout)

    def note_staged(self, generation: int) -> None:
        """It has staged a generation."""
        self.staged_generation = generation

    def note_switched(self, generation: int, layout: Layout | None) -> None:
        """It switched to a generation, whose `layout` is None if no longer known."""
        self.generation, self.staged_generation = generation, 0
        self._hold(layout)

    def lose_group(self, lost: GroupLost, *, now: float) -> None:
        """Its group ended; it waits for a rank and keeps what its slots hold."""
        if self.lost_reason is None:
            self.since_s = now
        self.held = lost.expert_of_slot
        self._wait_for_epoch(lost.reason)

    def reject_epoch(self, later_epoch: int) -> None:
        """It cannot join the current epoch, because it has taken up `later_epoch`."""
        self.later_epoch = later_epoch

    def note_claim(self, running: RunningState) -> None:
        """It reports to run in an epoch that this balancer did not open."""
        self.claim, self.held = running, _part(running.layout, running.rank)

    def resume_claim(self) -> None:
        """It counts as the rank that it reports to be."""
        assert self.claim is not None, "it claims to run"
        self.resume(self.claim)

    def give_up_claim(self, reason: str) -> None:
        """The group that it reports to run is not taken over: it needs another epoch."""
        assert self.claim is not None, "it claims to run"
        self._wait_for_epoch(reason)

    def leave_out(self, reason: str) -> None:
        """It gets no rank for now, although it is connected."""
        self.rank, self.left_out, self.serving = None, reason, False

    def note_stop(self) -> None:
        """It announces that it stops in order: nobody expects it back."""
        self.is_stopping = True

    def leave(self, reason: str) -> None:
        """Its stream has ended."""
        self.gone_reason = self.gone_reason or reason

    def unseat(self) -> None:
        """Remove its rank."""
        self.rank, self.serving = None, False

    def reopen(self, *, left_out: str | None) -> None:
        """An epoch opens: it has no rank in it yet, or for the reason `left_out` none at all."""
        self.left_out = left_out or self.left_out
        if self.rank is not None:
            self.rank = self.claim = None
        self.serving = self.joined = False

    def seat(self, rank: int, *, now: float) -> None:
        """Assign a rank of a new epoch."""
        self.rank, self.since_s = rank, now
        self.lost_reason = self.left_out = self.claim = None
        self.generation = self.staged_generation = self.later_epoch = 0

    def wait_from(self, *, now: float) -> None:
        """It may get a rank from now on."""
        self.since_s = now

    def keep_seat(self, known: "Member", held: ExpertTable | None) -> None:
        """Keep the rank that it had on its previous stream, and since when."""
        self.rank, self.held = known.rank, held
        if known.rank is not None:
            self.since_s = known.since_s

    def resume(self, running: RunningState) -> None:
        """It runs a layout in the epoch already."""
        self.rank, self.left_out = running.rank, None
        self.generation = running.generation
        self.staged_generation = running.staged_generation
        self.serving, self.steps = True, running.steps
        self._hold(running.layout)

    def _hold(self, layout: Layout | None) -> None:
        assert self.rank is not None, "only a rank has a part"
        self.held = None if layout is None else _part(layout, self.rank)

    def _wait_for_epoch(self, reason: str) -> None:
        self.lost_reason, self.left_out, self.claim = reason, None, None
        self.serving = False
        self.staged_generation = 0


def _part(layout: Layout, rank: int) -> ExpertTable:
    """A copy of a rank's part of a layout, which need not stay in memory for it."""
    return layout.expert_of_slot[:, layout.own_slots(rank)].copy()
