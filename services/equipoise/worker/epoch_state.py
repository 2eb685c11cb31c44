"""`EpochState`: which epochs a worker joins, and what it reports when it loses one. Pure."""

from equipoise.planning.arrays import ExpertTable
from equipoise.wire.messages import GroupLost, JoinEpoch


class EpochState:
    """A worker's membership over all epochs."""

    def __init__(self) -> None:
        self._newest = 0
        self._highest_generation = 0
        self.lost: GroupLost | None = None
        """Reports the latest group that was lost; None once the worker serves again."""

    @property
    def has_begun(self) -> bool:
        """Whether this worker ever took up an epoch."""
        return self._newest > 0

    def take_up(self, join_epoch: JoinEpoch) -> bool:
        """Take up an epoch; returns False if it is not newer than all earlier ones."""
        if join_epoch.epoch <= self._newest:
            return False
        self._newest = join_epoch.epoch
        return True

    def is_newest(self, join_epoch: JoinEpoch) -> bool:
        """Whether no later epoch was taken up."""
        return join_epoch.epoch == self._newest

    def use(self, generation: int) -> None:
        """Count a generation as run or staged, so that its number is never reused."""
        self._highest_generation = max(self._highest_generation, generation)

    def lose(
        self, join_epoch: JoinEpoch, reason: str, *, expert_of_slot: ExpertTable | None
    ) -> GroupLost:
        """Return the report that an epoch's group is lost; the slots hold `expert_of_slot`."""
        self.use(join_epoch.layout.generation)
        self.lost = GroupLost(
            epoch=join_epoch.epoch,
            reason=reason,
            expert_of_slot=expert_of_slot,
            generation=self._highest_generation,
        )
        return self.lost
