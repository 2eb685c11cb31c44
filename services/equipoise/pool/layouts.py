"""`PoolLayouts`: the layouts of a pool that matter now, by generation."""

from dataclasses import dataclass, field

from equipoise.planning.layout import Layout
from equipoise.wire.messages import Hello

MAX_KNOWN = 8
"""Layouts kept to read late reports by; load counters keep fewer generations than that."""


@dataclass(slots=True)
class PoolLayouts:
    """What ranks run, what the store has committed, and which number comes next.

    `current` is what all ranks run as far as they told; before they told, what the store
    remembers. `stored_generation` is the committed one in the store, None if there is none;
    `proposed` is what an earlier balancer was rolling out when it ended.
    `next_generation` was never used.
    """

    current: Layout | None = None
    stored_generation: int | None = None
    next_generation: int = 1
    proposed: Layout | None = None
    _known: dict[int, Layout] = field(default_factory=dict)

    @property
    def committed(self) -> Layout | None:
        """The layout that the store has as committed."""
        return None if self.stored_generation is None else self.get(self.stored_generation)

    def know(self, layout: Layout) -> None:
        """Remember a layout that a rank runs or is asked to stage."""
        self._known[layout.generation] = layout
        self.next_generation = max(self.next_generation, layout.generation + 1)
        current = self.current.generation if self.current is not None else 0
        for generation in sorted(self._known)[:-MAX_KNOWN]:
            if generation != current:
                del self._known[generation]

    def reserve(self, generation: int) -> None:
        """A rank holds something by this number, whatever it is: it was used."""
        self.next_generation = max(self.next_generation, generation + 1)

    def run(self, layout: Layout) -> None:
        """All ranks run this layout now."""
        self.current = layout
        self.know(layout)

    def get(self, generation: int) -> Layout | None:
        """A layout by its number, if it is still kept."""
        return self._known.get(generation)

    def nearest(self, generation: int) -> Layout | None:
        """The layout of that number, else the newest one, else None."""
        known = self._known.get(generation)
        return known or (self._known[max(self._known)] if self._known else None)

    @staticmethod
    def fits(layout: Layout, hello: Hello, *, num_ranks: int) -> bool:
        """Whether a layout is one for so many of such workers."""
        return (
            layout.num_layers == hello.model.num_layers
            and layout.num_experts == hello.model.num_experts
            and layout.num_ranks == num_ranks
            and layout.slots_per_rank == hello.slots_per_rank
        )
