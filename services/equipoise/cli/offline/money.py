"""What imbalance costs a pool in GPUs and money."""

from dataclasses import dataclass
from typing import Annotated

from equipoise.settings.fields import Range, check_ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSettings:
    """What a GPU costs, and how much of a step depends on balance.

    Raises:
        InvalidSettingsError: a value is out of range.
    """

    gpu_hour_price: Annotated[float | None, Range(0, 1_000_000)] = None
    """Price of a GPU for an hour, in any currency: shows the GPUs and the money that imbalance
    costs."""

    expert_share: Annotated[float, Range(0, 1)] = 1.0
    """Share of a balanced step that is spent in experts: `expert_share` in the JSON of `equipoise
    status`. Shows the GPUs that imbalance costs. By default a step consists only of experts, which
    gives the most that it can cost."""

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def is_wanted(self) -> bool:
        """Whether tables show the costs; JSON always has the GPUs."""
        return self.gpu_hour_price is not None or self.expert_share < 1.0

    def cells(self, lost: float) -> tuple[str, ...]:
        """What a table shows of lost GPUs, under `columns`."""
        if not self.is_wanted:
            return ()
        price = self.price_per_hour(lost)
        return (f"{lost:.2f}",) if price is None else (f"{lost:.2f}", f"{price:,.2f}")

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of a table."""
        if not self.is_wanted:
            return ()
        return ("GPUs lost",) if self.gpu_hour_price is None else ("GPUs lost", "price/h")

    @property
    def basis(self) -> str:
        """What the costs assume."""
        if self.expert_share == 1.0:
            return "at most: as if a step consisted only of expert computation"
        return f"with {self.expert_share:.0%} of a balanced step in experts"

    def lost_gpus(self, balancedness: float, *, num_ranks: int) -> float:
        """GPUs that evenly loaded ranks would save at the same throughput.

        A step takes 1 - s + s / balancedness times as long as with evenly loaded ranks, where s is
        the share of experts.
        """
        slowdown = 1.0 - self.expert_share + self.expert_share / balancedness
        return num_ranks * (1.0 - 1.0 / slowdown)

    def price_per_hour(self, gpus: float) -> float | None:
        """Price of that many GPUs for an hour; None without a price of one."""
        return None if self.gpu_hour_price is None else gpus * self.gpu_hour_price
