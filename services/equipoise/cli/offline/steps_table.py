"""How even single steps are, and whether it pays to even them out, as a table and as JSON."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from equipoise.cli.display import console


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBalance:
    """Steps of one number of tokens, as means over the layers that were drawn."""

    tokens_per_rank: int
    """Tokens of each rank in a step."""

    hashed: float
    """Mean / max assignments of the ranks if replicas are chosen by the layout's shares."""

    balanced: float
    """The same with `--replica-choice balanced`."""

    saved_assignments: float
    """Assignments per layer by which the busiest rank has fewer if balanced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrice:
    """What saved assignments are worth, and what it costs to save them, as far as known."""

    assignment_us: float | None
    """Microseconds per assignment on the busiest rank of a layer."""

    exchange_us: float | None
    """Microseconds per layer of an exchange of one number per expert, and of the division."""

    def saved_us(self, step: StepBalance) -> float | None:
        """Microseconds per layer that the busiest rank saves; None if unknown."""
        us = self.assignment_us
        return None if us is None else us * step.saved_assignments

    def pays(self, step: StepBalance) -> bool | None:
        """Whether that is more than the choice takes; None if unknown."""
        saved_us = self.saved_us(step)
        if saved_us is None or self.exchange_us is None:
            return None
        return saved_us > self.exchange_us

    def as_json(self, step: StepBalance) -> dict[str, Any]:
        """The step, with what balancing it saves and whether that pays."""
        return {**asdict(step), "saved_us": self.saved_us(step), "pays": self.pays(step)}

    def pays_text(self, step: StepBalance) -> str:
        """Whether it pays, or from which time per assignment on."""
        pays = self.pays(step)
        if pays is not None:
            return "yes" if pays else "no"
        if self.exchange_us is None or step.saved_assignments <= 0:
            return "no"
        return f"above {self.exchange_us / step.saved_assignments:.2g} µs/assignment"


def show_steps(
    of_pools: Iterable[tuple[int, int, Sequence[StepBalance]]], price: StepPrice
) -> None:
    """Print the steps of each pool, (ranks, redundant slots, steps), and when balancing pays."""
    columns = ["ranks", "redundant", "tokens/rank", "hashed", "balanced", "saved"]
    columns += [] if price.assignment_us is None else ["saved µs"]
    columns += [] if price.exchange_us is None else ["pays"]
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for num_ranks, num_redundant, steps in of_pools:
        for step in steps:
            saved_us = price.saved_us(step)
            table.add_row(
                str(num_ranks),
                str(num_redundant),
                f"{step.tokens_per_rank:,}",
                f"{step.hashed:.3f}",
                f"{step.balanced:.3f}",
                f"{step.saved_assignments:,.1f}",
                *([] if saved_us is None else [f"{saved_us:,.1f}"]),
                *([] if price.exchange_us is None else [price.pays_text(step)]),
            )
    out = console()
    out.print("\nwithin steps drawn from the loads, by --replica-choice of the workers")
    out.print(table)
    out.print(
        "\nhashed, balanced: mean / max assignments of the ranks in a layer; saved: assignments "
        "per layer by which the busiest rank has fewer if balanced"
    )
    if price.exchange_us is None or price.assignment_us is None:
        out.print(
            "balanced pays where these, times the µs per assignment (--assignment-us), exceed the "
            "µs of an exchange of one number per expert and of the division (--exchange-us)"
        )
