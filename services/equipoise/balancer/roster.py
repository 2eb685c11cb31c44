"""`Roster`: who is in a pool, who holds which rank, and when an epoch can open.

Owns membership only: it neither sends nor stores, and knows nothing of loads and layouts beyond
the generation each rank says it runs.
"""

from dataclasses import dataclass, field

from equipoise.balancer.errors import RefusedWorkerError
from equipoise.planning.topology import Topology
from equipoise.wire.messages import Hello, Peer, RankStats, RunningState


@dataclass(slots=True, kw_only=True)
class Member:
    """What is known of one worker. `rank` is None until an epoch seats it.

    `assigned` is set once it was told so on this stream. `generation` and `staged_generation` are
    what it reported last, 0 for none; `serving` is set once it told that it holds its part of a
    layout. `gone_reason` is None while its stream is open.
    """

    hello: Hello
    last_heard_s: float
    rank: int | None = None
    assigned: bool = False
    generation: int = 0
    staged_generation: int = 0
    serving: bool = False
    gone_reason: str | None = None
    stats: RankStats | None = None

    @property
    def name(self) -> str:
        """Stable name of the worker."""
        return self.hello.worker

    @property
    def connected(self) -> bool:
        """Whether the worker has a stream now."""
        return self.gone_reason is None


@dataclass(slots=True)
class Roster:
    """The members of one pool.

    `shape` is the Hello that all must agree with: that of the first member present. `epoch` is 0
    until one opened. `highest_epoch` keeps numbers from being used again. `peers` are all ranks of
    the epoch in rank order, empty until each of them is known.
    """

    pool: str
    epoch: int = 0
    highest_epoch: int = 0
    shape: Hello | None = None
    peers: tuple[Peer, ...] = ()
    members: dict[str, Member] = field(default_factory=dict)

    def admit(self, hello: Hello, *, now: float) -> Member:
        """Let a worker in; a newer boot of the same name takes the older one's place.

        Raises:
            RefusedWorkerError: it does not fit the pool, the pool is complete, or it runs
                something that the pool has left behind.
        """
        known = self.members.get(hello.worker)
        # When nobody is here, whoever comes says what the pool is.
        shape = self.shape if self._present(besides=hello.worker) else None
        self._check_shape(hello, shape or hello)
        member = Member(hello=hello, last_heard_s=now)
        if hello.running is not None:
            self._reseat(member, hello.running)
        elif known is not None and known.hello.boot_id == hello.boot_id and known.rank is not None:
            # The stream broke before the worker had anything to report; its seat is still its own.
            member.rank = known.rank
        else:
            self._check_room(hello)
        self.shape = shape or hello
        self.members[hello.worker] = member
        self._note_peers()
        return member

    def leave(self, worker: str, *, reason: str) -> None:
        """A worker's stream has ended; one without a seat is forgotten."""
        member = self.members.get(worker)
        if member is None:
            return
        member.gone_reason = reason
        if member.rank is None:
            del self.members[worker]

    def can_open(self) -> bool:
        """Whether as many workers wait for a rank as the pool has ranks."""
        return self.shape is not None and len(self.waiting()) == self.shape.num_ranks

    def open_epoch(self) -> None:
        """Seat everybody who waits; ranks of a node are contiguous, all sorted by name.

        Sorting makes a restarted fleet get the ranks it had.
        """
        self.highest_epoch += 1
        self.epoch = self.highest_epoch
        ordered = sorted(self.waiting(), key=lambda member: (member.hello.node, member.name))
        self.members = {member.name: member for member in ordered}
        for rank, member in enumerate(ordered):
            member.rank = rank
        self._note_peers()

    def waiting(self) -> list[Member]:
        """Connected members without a rank."""
        return [
            member for member in self.members.values() if member.connected and member.rank is None
        ]

    def seated(self) -> list[Member]:
        """Members of the epoch in rank order, those that are gone included."""
        seated = [member for member in self.members.values() if member.rank is not None]
        return sorted(seated, key=lambda member: member.rank or 0)

    @property
    def complete(self) -> bool:
        """Whether every rank of the epoch is connected and serving."""
        seated = self.seated()
        return (
            self.shape is not None
            and len(seated) == self.shape.num_ranks
            and all(member.connected and member.serving for member in seated)
        )

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

    @property
    def rendezvous_address(self) -> str:
        """Where rank 0 hosts the rendezvous of the epoch's process group."""
        return self.member_at(0).hello.rendezvous_address

    def _note_peers(self) -> None:
        assert self.shape is not None
        seated = self.seated()
        if len(seated) < self.shape.num_ranks:
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

    def _present(self, *, besides: str) -> list[Member]:
        return [
            member for name, member in self.members.items() if name != besides and member.connected
        ]

    def _check_shape(self, hello: Hello, shape: Hello) -> None:
        for kind, what, theirs, ours in (
            ("hello_model", "model shape", hello.model, shape.model),
            ("hello_num_ranks", "number of ranks", hello.num_ranks, shape.num_ranks),
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

    def _check_room(self, hello: Hello) -> None:
        present = self._present(besides=hello.worker)
        if len(present) >= hello.num_ranks:
            names = ", ".join(sorted(member.name for member in present))
            raise RefusedWorkerError(
                "hello_pool_complete",
                f"worker {hello.worker}: pool {self.pool} is complete with {hello.num_ranks} "
                f"ranks ({names}): name another pool, or stop one of these first",
            )

    def _reseat(self, member: Member, running: RunningState) -> None:
        """Seat a worker where it says that it runs: its word is the truth, if the others agree."""
        others = [other for other in self._present(besides=member.name) if other.rank is not None]
        if running.epoch != self.epoch:
            if others:
                raise RefusedWorkerError(
                    "hello_epoch",
                    f"worker {member.name} runs in epoch {running.epoch}, but pool {self.pool} is "
                    f"in epoch {self.epoch}: restart it",
                )
            # Nobody else runs anything: this balancer knew less, or something older.
            self._forget_seats()
            self.epoch = running.epoch
            self.highest_epoch = max(self.highest_epoch, running.epoch)
        holder = next((other for other in self.seated() if other.rank == running.rank), None)
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
        member.serving = True

    def _forget_seats(self) -> None:
        self.peers = ()
        self.members = {
            name: member for name, member in self.members.items() if member.rank is None
        }
