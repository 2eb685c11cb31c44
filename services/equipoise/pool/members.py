"""`Roster`: who is in a pool, who holds which rank, and what each worker's slots hold.

Owns membership only: it neither sends nor stores. When ranks are dealt anew is decided by
`planning/membership.py`.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from equipoise.planning.arrays import ExpertTable
from equipoise.planning.layout import Layout
from equipoise.planning.membership import EpochCandidate, MemberState
from equipoise.planning.topology import Topology
from equipoise.pool.kernels import unshared
from equipoise.pool.records import RefusedWorkerError
from equipoise.wire.messages import GroupLost, Hello, Peer, RankStats, RunningState


@dataclass(slots=True, kw_only=True)
class Member:
    """What is known of one worker. `rank` is None until an epoch seats it.

    `assigned` is set once it was told so on this stream, and `heartbeat_s` the seconds between its
    heartbeats that it was told with it. `generation` and `staged_generation` are what it reported
    last, 0 for none; `draining` says that it takes no new request; `serving` is set once it told
    that it holds its part of a layout. `lost_reason` is set while its group is over for it,
    `left_out` says why it is in no epoch although it is here. `held` is int32 [layers,
    slots_per_rank]: what its slots hold as far as it told, `steps` how its steps run, in its words.
    `gone_reason` is None while its stream is open. `since_s` is when it came or its group was lost.
    """

    hello: Hello
    last_heard_s: float
    since_s: float
    rank: int | None = None
    assigned: bool = False
    heartbeat_s: float = 0.0
    generation: int = 0
    staged_generation: int = 0
    draining: bool = False
    serving: bool = False
    lost_reason: str | None = None
    left_out: str | None = None
    held: ExpertTable | None = None
    gone_reason: str | None = None
    stats: RankStats | None = None
    steps: str = ""

    @property
    def name(self) -> str:
        """Stable name of the worker."""
        return self.hello.worker

    @property
    def connected(self) -> bool:
        """Whether the worker has a stream now."""
        return self.gone_reason is None

    def hold(self, layout: Layout | None) -> None:
        """It told that its slots hold its part of a layout; None if that is not known any more."""
        assert self.rank is not None, "only a rank has a part"
        first, last = (rank * self.hello.slots_per_rank for rank in (self.rank, self.rank + 1))
        self.held = None if layout is None else layout.expert_of_slot[:, first:last]

    def lose_group(self, lost: GroupLost, *, now: float) -> None:
        """Its group is over; it waits for a rank and holds on to what its slots hold."""
        self.lost_reason, self.left_out = lost.reason, None
        self.held = lost.expert_of_slot
        self.serving, self.since_s = False, now
        self.staged_generation = 0


@dataclass(slots=True)
class Roster:
    """The members of one pool.

    `shape` is the Hello that all must agree with: that of the first member present. `epoch` is 0
    until one opened. `highest_epoch` keeps numbers from being used again. `peers` are all ranks of
    the epoch in rank order, empty until each of them is known, and `rendezvous_address` is where
    rank 0 hosts the rendezvous of their process group. `num_ranks` is how many ranks the epoch has,
    0 before there was one.
    """

    pool: str
    epoch: int = 0
    highest_epoch: int = 0
    num_ranks: int = 0
    shape: Hello | None = None
    peers: tuple[Peer, ...] = ()
    rendezvous_address: str = ""
    members: dict[str, Member] = field(default_factory=dict)
    _seated: tuple[Member, ...] = field(default=(), init=False)

    def admit(self, hello: Hello, *, now: float) -> Member:
        """Let a worker in; a newer boot of the same name takes the older one's place.

        Raises:
            RefusedWorkerError: it does not fit the pool, or it runs something that the pool has
                left behind.
        """
        known = self.members.get(hello.worker)
        # When nobody is here, whoever comes says what the pool is.
        shape = self.shape if self._present(besides=hello.worker) else None
        self._check_shape(hello, shape or hello)
        self._check_kernels(hello, shape or hello)
        member = Member(hello=hello, last_heard_s=now, since_s=now)
        if hello.running is not None:
            self._reseat(member, hello.running)
        elif hello.group_lost is not None:
            self._return_without_group(member, known, hello.group_lost, now=now)
        elif known is not None and known.hello.boot_id == hello.boot_id:
            # The stream broke before the worker had anything to report; its seat is still its own.
            member.rank, member.held = known.rank, known.held
        self.shape = shape or hello
        self.members[hello.worker] = member
        self.note_seats()
        return member

    def leave(self, worker: str, *, reason: str) -> None:
        """A worker's stream has ended; one without a seat is forgotten."""
        member = self.members.get(worker)
        if member is None:
            return
        member.gone_reason = member.gone_reason or reason
        if member.rank is None:
            del self.members[worker]

    def open_epoch(self, workers: Container[str], *, left_out: str | None) -> None:
        """Deal the ranks to `workers`; ranks of a node are contiguous, all sorted by name.

        Sorting makes a restarted fleet get the ranks it had. Others who are here lose their seats,
        for the reason `left_out`, or may come anew if that is None; those who are gone are
        forgotten.
        """
        self.highest_epoch += 1
        self.epoch = self.highest_epoch
        self.members = {name: one for name, one in self.members.items() if one.connected}
        seated = [one for name, one in self.members.items() if name in workers]
        ordered = sorted(seated, key=lambda member: (member.hello.node, member.name))
        for member in self.members.values():
            if member.rank is not None and member.name not in workers:
                member.left_out = left_out
            member.rank = None
            member.serving = member.assigned = False
        for rank, member in enumerate(ordered):
            member.rank = rank
            member.lost_reason = member.left_out = None
            member.generation = member.staged_generation = 0
        self.num_ranks = len(ordered)
        self.note_seats()

    def waiting(self) -> list[Member]:
        """Connected members without a rank."""
        return [
            member for member in self.members.values() if member.connected and member.rank is None
        ]

    def seated(self) -> tuple[Member, ...]:
        """Members of the epoch in rank order, those that are gone included."""
        return self._seated

    def candidates(
        self, silent: Container[str], *, excluded: Mapping[str, str]
    ) -> Sequence[EpochCandidate]:
        """How every worker stands, for who decides about the next epoch.

        `silent` are names of members that have not spoken for too long, `excluded` those of which
        the policy wants none now, with the reason.
        """
        return [
            _candidate(
                member,
                is_silent=member.name in silent,
                excluded=excluded.get(member.name, ""),
            )
            for member in self.members.values()
        ]

    @property
    def wanted_ranks(self) -> int:
        """Workers that the pool waits for before it first opens: the most that any expects."""
        present = [one.hello.num_ranks for one in self.members.values() if one.connected]
        return max(present, default=0)

    @property
    def complete(self) -> bool:
        """Whether every rank of the epoch is connected and serving."""
        for member in self._seated:  # A loop, because it is asked for after every word.
            if not member.serving or member.gone_reason is not None:
                return False
        return 0 < self.num_ranks == len(self._seated)

    @property
    def settled(self) -> bool:
        """Whether whoever is here is a rank of the epoch, and every rank serves."""
        return len(self.members) == self.num_ranks == len(self._seated) and self.complete

    def member_at(self, rank: int) -> Member:
        """The member that holds a rank of the epoch."""
        return next(member for member in self.seated() if member.rank == rank)

    def topology(self) -> Topology:
        """Nodes of the epoch's ranks, once they are known."""
        assert self.shape is not None
        return Topology(
            node_of_rank=tuple(peer.node for peer in self.peers),
            slots_per_rank=self.shape.slots_per_rank,
        )

    def note_seats(self) -> None:
        """Remember who sits where: it is asked for at every tick, and changes with membership."""
        members = [member for member in self.members.values() if member.rank is not None]
        seated = self._seated = tuple(sorted(members, key=lambda member: member.rank or 0))
        if not seated or len(seated) < self.num_ranks:
            # A seat whose holder restarted keeps its old address: the others still need the list.
            return
        self.peers = tuple(
            Peer(
                rank=rank,
                address=member.hello.address,
                node=member.hello.node,
                worker=member.name,
            )
            for rank, member in enumerate(seated)
        )
        self.rendezvous_address = seated[0].hello.rendezvous_address

    def _present(self, *, besides: str) -> list[Member]:
        return [
            member for name, member in self.members.items() if name != besides and member.connected
        ]

    def _check_shape(self, hello: Hello, shape: Hello) -> None:
        for kind, what, theirs, ours in (
            ("hello_model", "model shape", hello.model, shape.model),
            ("hello_slots", "slots per rank", hello.slots_per_rank, shape.slots_per_rank),
            (
                "hello_checkpoint",
                "checkpoint fingerprint",
                hello.checkpoint_fingerprint,
                shape.checkpoint_fingerprint,
            ),
        ):
            if theirs != ours:
                raise RefusedWorkerError(
                    kind,
                    f"worker {hello.worker}: its {what} is {theirs}, but pool {self.pool} has "
                    f"{ours} (set by worker {shape.worker}): start it with the same, or in "
                    f"another pool",
                )
        num_slots = hello.num_ranks * hello.slots_per_rank
        if num_slots < hello.model.num_experts:
            raise RefusedWorkerError(
                "hello_too_few_slots",
                f"worker {hello.worker}: {hello.num_ranks} ranks x {hello.slots_per_rank} slots "
                f"cannot hold {hello.model.num_experts} experts: give each rank at least "
                f"{-(-hello.model.num_experts // hello.num_ranks)} slots",
            )

    def _check_kernels(self, hello: Hello, shape: Hello) -> None:
        """Ranks that cannot compute alike would never form a group, so one may not come."""
        if hello.backends in ((), shape.backends):
            return
        present = self._present(besides=hello.worker)
        told = {hello.backends, shape.backends, *(member.hello.backends for member in present)}
        operation = unshared(told - {()})
        if operation is not None:
            raise RefusedWorkerError(
                "hello_kernels",
                f"worker {hello.worker}: it computes with {hello.kernels}, but pool {self.pool} "
                f"with {shape.kernels} (worker {shape.worker}), and no backend of {operation} can "
                f"be had by all: start it with the same weights, device and EQUIPOISE_KERNELS, or "
                f"in another pool",
            )

    def _return_without_group(
        self, member: Member, known: Member | None, lost: GroupLost, *, now: float
    ) -> None:
        """A worker whose group is over has a stream again; a seat dealt since is still its own."""
        if known is not None and known.rank is not None and lost.epoch < self.epoch:
            member.rank, member.held = known.rank, lost.expert_of_slot
            return
        self.highest_epoch = max(self.highest_epoch, lost.epoch)
        member.rank = known.rank if known is not None else None
        member.lose_group(lost, now=now)

    def _reseat(self, member: Member, running: RunningState) -> None:
        """Seat a worker where it says that it runs: its word is the truth, if the others agree."""
        others = [
            other
            for other in self._present(besides=member.name)
            if other.rank is not None and other.lost_reason is None
        ]
        if running.epoch != self.epoch:
            if others:
                raise RefusedWorkerError(
                    "hello_epoch",
                    f"worker {member.name} runs in epoch {running.epoch}, but pool {self.pool} is "
                    f"in epoch {self.epoch}: it can join when its group is over",
                )
            # Nobody else runs anything: this balancer knew less, or something older.
            self._forget_seats()
            self.epoch = running.epoch
            self.highest_epoch = max(self.highest_epoch, running.epoch)
        self.num_ranks = running.layout.num_ranks
        holder = self._holder(running.rank)
        if holder is not None and holder.name != member.name and holder.connected:
            raise RefusedWorkerError(
                "hello_rank_taken",
                f"worker {member.name} runs as rank {running.rank} of epoch {running.epoch}, which "
                f"is held by worker {holder.name}: restart it",
            )
        if holder is not None and holder.name != member.name:
            del self.members[holder.name]
        member.rank = running.rank
        member.generation = running.generation
        member.staged_generation = running.staged_generation
        member.serving, member.steps = True, running.steps
        member.hold(running.layout)

    def _holder(self, rank: int) -> Member | None:
        return next((other for other in self.members.values() if other.rank == rank), None)

    def _forget_seats(self) -> None:
        self.peers = ()
        self.members = {name: member for name, member in self.members.items() if member.connected}
        for member in self.members.values():
            member.rank = None


def _candidate(member: Member, *, is_silent: bool, excluded: str) -> EpochCandidate:
    state, reason = MemberState.NEW, ""
    if not member.connected or is_silent:
        state = MemberState.STUCK if member.rank is None else MemberState.MISSING
        reason = member.gone_reason or "it is silent"
    elif excluded and (member.rank is None or member.lost_reason is not None):
        state, reason = MemberState.STUCK, excluded
    elif excluded and member.serving:
        state, reason = MemberState.SLOW, excluded
    elif member.lost_reason is not None:
        state = MemberState.NEW if member.rank is None else MemberState.SURVIVOR
        reason = member.lost_reason
    elif member.left_out is not None:
        state, reason = MemberState.STUCK, member.left_out
    elif member.rank is not None:
        state = MemberState.SERVING if member.serving else MemberState.JOINING
    return EpochCandidate(
        name=member.name,
        state=state,
        since_s=member.since_s,
        holds=member.lost_reason is not None,
        reason=reason,
    )
