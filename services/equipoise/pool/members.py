"""`Roster`: the workers of a pool, which rank each has, and what each one's slots hold.

It neither sends nor stores. `planning/membership.py` decides when ranks are assigned again.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import replace

from equipoise.planning.expert_needs import ExpertNeeds
from equipoise.planning.membership import EpochCandidate
from equipoise.planning.phase import Phase
from equipoise.planning.resumption import GroupChoice, RunningClaim
from equipoise.planning.topology import ModelShape, Topology
from equipoise.pool.candidates import candidate
from equipoise.pool.hello_checks import (
    RejectedWorkerError,
    check_kernels,
    check_order,
    check_shape,
    check_slots,
)
from equipoise.pool.member import Member
from equipoise.pool.records import EpochMembers
from equipoise.pool.room import check_room, shared
from equipoise.wire.balancer_messages import Peer
from equipoise.wire.messages import GroupLost, Hello, RunningState


class Roster:
    """The members of one pool."""

    def __init__(self, pool: str, *, highest_epoch: int = 0) -> None:
        self._pool = pool
        self.epoch = 0
        """The current epoch; 0 before the first one."""
        self.opened_here = False
        """Whether this balancer opened it; else it found its ranks running."""
        self.highest_epoch = highest_epoch
        """The highest epoch ever seen: epochs are never reused."""
        self.recorded_epoch = highest_epoch
        """The highest epoch whose workers the store has: it takes no earlier one any more."""
        self.num_ranks = 0
        """Ranks of the epoch; 0 before the first one."""
        self.peers: tuple[Peer, ...] = ()
        """All ranks of the epoch in rank order; empty until each of them is known."""
        self.rendezvous_address = ""
        """Where rank 0 hosts the rendezvous of the process group."""
        self.latest: Hello | None = None
        """The Hello of a rank of the latest epoch that this balancer opened; None before that."""
        self._members: dict[str, Member] = {}
        self._seated: tuple[Member, ...] = ()
        # Names of all workers of the epoch, connected or not.
        self._workers: frozenset[str] = frozenset()

    def reserve_epoch(self, epoch: int) -> None:
        """A worker has taken up this epoch: later ones must be above it."""
        self.highest_epoch = max(self.highest_epoch, epoch)

    def note_recorded(self, epoch: int) -> None:
        """The store has the workers of this epoch."""
        self.recorded_epoch = max(self.recorded_epoch, epoch)

    @property
    def members(self) -> Mapping[str, Member]:
        """All members by name."""
        return self._members

    def admit(self, hello: Hello, *, now: float) -> Member:
        """Let a worker in; a newer boot of the same name replaces the older one.

        Raises:
            RejectedWorkerError: it does not fit the pool, the pool is full, it runs an epoch that
                is over, or its process has connected again since.
        """
        known = self._members.get(hello.worker)
        if known is not None and known.serving:
            check_order(hello, known.hello, epoch=self.epoch)
        check_slots(hello)
        others = [one for one in self._members.values() if one.name != hello.worker]
        if hello.running is not None:
            hello = replace(hello, running=shared(hello.running, others))
        check_room(hello, others, pool=self._pool)
        ranks = [one.hello for one in self._followers(excluding=hello.worker)]
        is_unknown = hello.running is not None and hello.running.epoch > self.epoch
        if self.opened_here and ranks and not is_unknown:  # Else most decide what the pool is.
            check_shape(hello, ranks[0], pool=self._pool)
            check_kernels(hello, ranks, pool=self._pool)
        # What it runs is kept as its claim, and only until the pool has decided about it.
        kept = replace(hello, running=None, group_lost=None)
        member = Member(hello=kept, last_heard_s=now, since_s=now)
        # The rank of one process is not for another of its name.
        same = known if known is not None and known.is_process_of(hello) else None
        if hello.running is not None:
            self._return_running(member, same, hello.running)
        elif hello.group_lost is not None:
            self._return_without_group(member, same, hello.group_lost, now=now)
        elif same is not None:
            # The stream failed before the worker had anything to report; it keeps its rank.
            member.keep_seat(same, same.held)
            if hello.highest_epoch > self.epoch:
                member.reject_epoch(hello.highest_epoch)
        self._members[hello.worker] = member
        self._note_seats()
        if self.opened_here and member.rank is not None:
            self._leave_out_claims()
        return member

    def has_rank(self, worker: str, running: RunningState) -> bool:
        """Whether a worker has the rank of the epoch that it reports to run as."""
        if (running.epoch, running.layout.num_ranks) != (self.epoch, self.num_ranks):
            return False
        known = self._members.get(worker)
        if known is not None and known.rank is not None:
            return known.rank == running.rank
        # Another process may have had its name meanwhile.
        return self.opened_here and self.peers[running.rank].worker == worker

    def leave(self, worker: str, *, reason: str) -> None:
        """A worker's stream has ended; one without a rank is forgotten."""
        member = self._members.get(worker)
        if member is None:
            return
        member.leave(reason)
        if member.rank is None:
            del self._members[worker]

    def open_epoch(
        self, workers: Container[str], *, no_hosts: Container[str], left_out: str | None, now: float
    ) -> None:
        """Assign the ranks to `workers`; ranks of a node are contiguous, all sorted by name.

        Sorting gives a restarted fleet the ranks that it had, but `no_hosts` come last. Other
        connected members lose their ranks, for the reason `left_out`. They may join later if that
        is None, or if none of their group is among `workers`: nothing would end it. Members that
        are gone are forgotten.
        """
        self.highest_epoch += 1
        self.epoch, self.opened_here = self.highest_epoch, True
        self._members = {name: one for name, one in self._members.items() if one.connected}
        chosen = [one for name, one in self._members.items() if name in workers]
        is_group_over = any(member.rank is not None for member in chosen)
        for member in self._members.values():
            loses_rank = member.rank is not None and member.name not in workers
            member.reopen(left_out=left_out if loses_rank and is_group_over else None)
        ordered = sorted(chosen, key=lambda one: (one.name in no_hosts, one.hello.node, one.name))
        nodes = dict.fromkeys(member.hello.node for member in ordered)
        place_of = {node: place for place, node in enumerate(nodes)}
        ordered.sort(key=lambda member: place_of[member.hello.node])
        for rank, member in enumerate(ordered):
            member.seat(rank, now=now)
        self.num_ranks, self.latest = len(ordered), ordered[0].hello
        self._workers = frozenset(member.name for member in ordered)
        self._note_seats()

    def seated(self) -> tuple[Member, ...]:
        """Members of the epoch in rank order, including those that are gone."""
        return self._seated

    @property
    def departed(self) -> Collection[str]:
        """Names of the epoch's workers whose process is gone, or was replaced by another."""
        members = self._members
        return [name for name in self._workers if name not in members or members[name].is_gone]

    def epoch_members(self) -> EpochMembers:
        """The workers of the epoch, for the store."""
        return EpochMembers(epoch=self.epoch, workers=tuple(one.name for one in self._seated))

    def candidates(
        self,
        silent: Container[str],
        *,
        excluded: Mapping[str, str],
        quarantined: Mapping[str, str],
    ) -> Sequence[EpochCandidate]:
        """Every worker's state, for the decision about the next epoch.

        `silent` are names of members that sent nothing for too long, `excluded` those that the
        policy leaves out now, `quarantined` those that must not serve, both with the reason.
        """
        apart = self._apart()
        return [
            candidate(
                member,
                is_apart=member.name in apart,
                is_silent=member.name in silent,
                excluded=excluded.get(member.name, ""),
                quarantined=quarantined.get(member.name, ""),
            )
            for member in self._members.values()
        ]

    def claims(self) -> Sequence[RunningClaim]:
        """What connected workers report to run in an epoch that this balancer did not open.

        Once a rank of an epoch that it opened is connected, only later epochs count.
        """
        latest = self.epoch if self.opened_here and any(self._followers()) else 0
        return [
            RunningClaim(
                worker=member.name,
                epoch=member.claim.epoch,
                workers=member.claim.workers,
                generation=member.claim.generation,
                digest=member.claim.layout.digest(),
                is_rank=member.rank is not None,
                engine=member.hello.engine,
            )
            for member in self._members.values()
            if member.claim is not None and member.claim.epoch > latest and member.connected
        ]

    def opponents(self) -> int:
        """Connected workers that oppose all claims.

        Ranks of an epoch that this balancer opened, else workers whose group has ended.
        """
        ranks = len(list(self._followers())) if self.opened_here else 0
        return ranks or sum(
            member.lost_reason is not None and member.connected for member in self._members.values()
        )

    def take_over(self, choice: GroupChoice) -> Sequence[Member]:
        """Make the claims that agree the ranks of their epoch; returns the ranks that are new."""
        if choice.is_new_group:
            self._forget_seats()
            self.epoch, workers = choice.ranks[0].group
            self.num_ranks, self.opened_here = len(workers), False
            self._workers = frozenset(workers)
        for worker, reason in choice.contradicting.items():
            self._members[worker].leave_out(reason)
        resumed = [self._members[one.worker] for one in choice.ranks if not one.is_rank]
        for member in resumed:
            member.resume_claim()
        self._note_seats()
        return resumed

    def release_claims(self, reason: str) -> None:
        """No group is taken over: workers that report to run need another epoch.

        They are sent one unless others are in an epoch now.
        """
        is_followed = self.opened_here and any(self._followers())
        for member in self._members.values():
            if member.claim is not None and is_followed:
                member.leave_out(reason)
            elif member.claim is not None:
                member.give_up_claim(reason)

    @property
    def contradicting(self) -> Mapping[str, str]:
        """Connected workers that report to run what the ranks do not, each with the reason."""
        return {
            member.name: member.left_out
            for member in self._members.values()
            if member.is_claiming and member.connected and member.left_out is not None
        }

    @property
    def shape(self) -> Hello | None:
        """A Hello with the pool's shape: a rank's, else that of most workers; None without any.

        If several shapes are equally common, that of the latest epoch counts, as in `odd_workers`.
        """
        rank = next(self._followers(), None)
        if rank is not None:
            return rank.hello
        connected = [one.hello for one in self._members.values() if one.connected]
        counts = Counter(_shape_of(hello) for hello in connected)
        latest = None if self.latest is None else _shape_of(self.latest)
        return max(
            connected,
            key=lambda one: (counts[_shape_of(one)], _shape_of(one) == latest),
            default=self.latest,
        )

    @property
    def needs(self) -> ExpertNeeds:
        """The room that all experts need on workers of the pool's shape, which must be known."""
        assert self.shape is not None, "a worker has connected"
        hello, model = self.shape, self.shape.model
        return ExpertNeeds(
            num_experts=model.num_experts,
            num_layers=model.num_layers,
            slots_per_rank=hello.slots_per_rank,
        )

    @property
    def phase(self) -> Phase | None:
        """The phase that the pool serves; None before a worker has connected."""
        shape = self.shape
        return None if shape is None else shape.phase

    @property
    def intended_ranks(self) -> int:
        """Ranks that the pool is meant to have: the most that any connected worker expects.

        Without any, what the ranks that are gone expected, but for those that stopped in order.
        """
        present = [one for one in self._members.values() if one.connected]
        expecting = present or [one for one in self._seated if not one.is_stopping]
        return max((one.hello.num_ranks for one in expecting), default=0)

    @property
    def idleness(self) -> str:
        """Why no rank would switch to a staged layout now; empty if they would."""
        idle = next((member for member in self._seated if member.idle), None)
        if idle is None:
            return ""
        return f"the engine is idle: rank {idle.rank} ({idle.name}) takes no forward passes"

    @property
    def complete(self) -> bool:
        """Whether every rank of the epoch is connected and serving."""
        for member in self._seated:  # A loop, because this runs after every message.
            if not member.serving or member.gone_reason is not None:
                return False
        return 0 < self.num_ranks == len(self._seated)

    @property
    def settled(self) -> bool:
        """Whether every member is a rank of the epoch, and every rank serves."""
        return len(self._members) == self.num_ranks == len(self._seated) and self.complete

    def name_at(self, rank: int) -> str:
        """Name of the worker that holds a rank of the epoch, for messages: it may be gone."""
        place = bisect_left(self._seated, rank, key=lambda member: member.rank or 0)
        found = self._seated[place : place + 1]
        return found[0].name if found and found[0].rank == rank else "its worker is gone"

    @property
    def places_of_rank(self) -> tuple[int, ...]:
        """Places of each rank of the epoch; empty if each slot has one.

        A rank whose worker is gone counts as if it had a place in each slot.
        """
        places = {member.rank: member.hello.num_places for member in self._seated}
        if not any(places.values()):
            return ()
        hello = self._seated[0].hello
        most = hello.model.num_layers * hello.slots_per_rank
        return tuple(places.get(rank) or most for rank in range(self.num_ranks))

    def topology(self) -> Topology:
        """Nodes of the epoch's ranks, once they are known."""
        return Topology(
            node_of_rank=tuple(peer.node for peer in self.peers),
            slots_per_rank=self._seated[0].hello.slots_per_rank,
            places_of_rank=self.places_of_rank,
        )

    def _note_seats(self) -> None:
        """Remember the ranks in order: every tick needs them, only membership changes them."""
        members = [member for member in self._members.values() if member.rank is not None]
        seated = self._seated = tuple(sorted(members, key=lambda member: member.rank or 0))
        if not seated or len(seated) < self.num_ranks:
            # A rank whose worker restarted keeps its old address: the others still need the list.
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

    def _return_without_group(
        self, member: Member, same: Member | None, lost: GroupLost, *, now: float
    ) -> None:
        """A worker whose group ended reconnects; it keeps a rank assigned to its process since."""
        if same is not None and same.rank is not None and lost.epoch < self.epoch:
            member.keep_seat(same, lost.expert_of_slot)
            return
        lost_s = now
        if same is not None:
            member.keep_seat(same, None)
            if same.lost_reason is not None:
                lost_s = same.since_s  # However often it reconnects: the pool waits once for it.
        member.lose_group(lost, now=lost_s)

    def _return_running(self, member: Member, same: Member | None, running: RunningState) -> None:
        """A worker that runs reconnects as the rank that it had; else what it runs is a claim."""
        if not self.opened_here:
            member.note_claim(running)
        if self.has_rank(member.name, running):
            member.resume(running)
        elif not self.opened_here:
            return
        elif same is not None and not same.serving and running.epoch < self.epoch:
            member.keep_seat(same, same.held)  # It has yet to take up the current epoch.
        else:
            member.note_claim(running)
            if any(self._followers(excluding=member.name)):
                self._oppose(member, running)

    def _oppose(self, member: Member, running: RunningState) -> None:
        """A rank of the epoch opened here is connected: only a later epoch counts against it.

        Raises:
            RejectedWorkerError: the worker's group is about to end, or it has a rank already.
        """
        is_later, known = running.epoch > self.epoch, self._members.get(member.name)
        has_rank = known is not None and known.rank is not None
        if has_rank or not (is_later or self._is_apart(member)):
            raise self._rejection(member, running)
        if not is_later:
            self._leave_out(member, running, is_apart=True)

    def _leave_out(self, member: Member, running: RunningState, *, is_apart: bool) -> None:
        """What a worker reports to run is not what the ranks do: it gets none for now."""
        if is_apart:
            what = f"it runs in epoch {running.epoch}, but the pool is in epoch {self.epoch}"
            member.leave_out(f"{what}: it can join the next")
        else:
            member.leave_out(str(self._rejection(member, running)))

    def _is_apart(self, member: Member) -> bool:
        """Whether no rank of the epoch is in the group that a worker reports to run in.

        A group ends once one of its ranks takes up another epoch: nothing would end this one.
        """
        return member.claim is not None and self._workers.isdisjoint(member.claim.workers)

    def _apart(self) -> Container[str]:
        """Names of all members of which that is true.

        Those of a group share one list of its workers, so it is compared once.
        """
        found: dict[int, bool] = {}
        names: set[str] = set()
        for member in self._members.values():
            if member.claim is not None:
                group = id(member.claim.workers)
                if group not in found:
                    found[group] = self._is_apart(member)
                if found[group]:
                    names.add(member.name)
        return names

    def _rejection(self, member: Member, running: RunningState) -> RejectedWorkerError:
        """Why a worker cannot be a rank of the epoch, which this balancer opened."""
        what = f"worker {member.name} runs"
        if running.epoch != self.epoch:
            return RejectedWorkerError(
                "hello_epoch",
                f"{what} in epoch {running.epoch}, but pool {self._pool} is in epoch {self.epoch}: "
                "it can join once its group has ended",
            )
        if running.layout.num_ranks != self.num_ranks:
            return RejectedWorkerError(
                "hello_num_ranks",
                f"{what} a layout of {running.layout.num_ranks} ranks in epoch {running.epoch}, "
                f"but that epoch of pool {self._pool} has {self.num_ranks}: restart it",
            )
        holder = self.peers[running.rank].worker
        return RejectedWorkerError(
            "hello_rank_taken",
            f"{what} as rank {running.rank} of epoch {running.epoch}, which is held by worker "
            f"{holder}: restart it",
        )

    def _leave_out_claims(self) -> None:
        """A rank of the epoch that this balancer opened is connected: what others run is over."""
        apart = self._apart()
        for member in self._members.values():
            is_over = member.claim is not None and member.claim.epoch <= self.epoch
            if member.claim is not None and member.is_claiming and is_over:
                self._leave_out(member, member.claim, is_apart=member.name in apart)

    def _followers(self, *, excluding: str = "") -> Iterator[Member]:
        """Connected workers that are ranks of the epoch, in no order."""
        return (
            member
            for member in self._members.values()
            if member.rank is not None and member.lost_reason is None
            if member.connected and member.name != excluding
        )

    def _forget_seats(self) -> None:
        self.peers = ()
        self._members = {name: one for name, one in self._members.items() if one.connected}
        for member in self._members.values():
            member.unseat()


def _shape_of(hello: Hello) -> tuple[ModelShape, int, bool, Phase]:
    return hello.model, hello.slots_per_rank, hello.num_places > 0, hello.phase
