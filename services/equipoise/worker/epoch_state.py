"""`EpochState`: which epochs a worker joins, and what it reports when it loses one. Pure."""

from equipoise.planning.arrays import ExpertTable
from equipoise.wire.balancer_messages import JoinEpoch
from equipoise.wire.messages import GroupLost, LayoutRejected


class EpochState:
    """A worker's membership over all epochs."""

    def __init__(self) -> None:
        self._newest: JoinEpoch | None = None
        self._highest_generation = 0
        self.lost: GroupLost | None = None
        """Reports the latest group that was lost; None once the worker serves again."""

    @property
    def has_begun(self) -> bool:
        """Whether this worker ever took up an epoch."""
        return self._newest is not None

    @property
    def highest_epoch(self) -> int:
        """The newest epoch that it took up; 0 for none."""
        return 0 if self._newest is None else self._newest.epoch

    @property
    def highest_generation(self) -> int:
        """The highest generation that it started in, ran or staged; 0 for none."""
        return self._highest_generation

    def take_up(self, join_epoch: JoinEpoch) -> bool:
        """Take up an epoch; returns False if it is not newer than all earlier ones."""
        if join_epoch.epoch <= self.highest_epoch:
            return False
        self._newest = join_epoch
        self.use(join_epoch.layout.generation)
        return True

    def rejection(self, join_epoch: JoinEpoch) -> LayoutRejected | None:
        """Return the answer to an epoch that was not taken up; None if it repeats the newest.

        The balancer that opened it has lost what it knew of the newest one.
        """
        newest = self._newest
        assert newest is not None, "an epoch is rejected for another one"
        epoch = join_epoch.epoch
        reason = f"epoch {newest.epoch} was already taken up: a later one must be opened"
        if epoch == newest.epoch:
            if _is_same(join_epoch, newest):
                return None
            reason = f"another epoch {epoch} was already taken up: a later one must be opened"
        return LayoutRejected(
            epoch=epoch,
            rank=join_epoch.rank,
            generation=join_epoch.layout.generation,
            reason=reason,
            highest_epoch=newest.epoch,
        )

    def is_newest(self, join_epoch: JoinEpoch) -> bool:
        """Whether no later epoch was taken up."""
        return join_epoch.epoch == self.highest_epoch

    def use(self, generation: int) -> None:
        """Count a generation as run or staged, so that its number is never reused."""
        self._highest_generation = max(self._highest_generation, generation)

    def lose(
        self,
        join_epoch: JoinEpoch,
        reason: str,
        *,
        expert_of_slot: ExpertTable | None,
        unreached: tuple[str, ...] = (),
    ) -> GroupLost:
        """Return the report that an epoch's group is lost.

        The slots hold `expert_of_slot`; this worker could not connect to those `unreached`.
        """
        self.use(join_epoch.layout.generation)
        self.lost = GroupLost(
            epoch=join_epoch.epoch,
            reason=reason,
            expert_of_slot=expert_of_slot,
            generation=self._highest_generation,
            unreached=unreached,
        )
        return self.lost


def _is_same(one: JoinEpoch, other: JoinEpoch) -> bool:
    """Whether two messages with the same epoch assign the same ranks in the same layout."""
    return (
        one.rank == other.rank
        and [peer.worker for peer in one.peers] == [peer.worker for peer in other.peers]
        and one.layout.generation == other.layout.generation
        and one.layout.same_placement(other.layout)
    )
