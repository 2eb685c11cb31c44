"""`PoolLayouts`: the layouts of a pool by generation."""

from equipoise.planning.layout import Layout
from equipoise.pool.records import PoolMemory

MAX_KNOWN = 8
"""Layouts kept, to read late reports; load counters keep fewer generations than that."""


class PoolLayouts:
    """What ranks run, what the store has committed, and which generation comes next."""

    def __init__(self, memory: PoolMemory) -> None:
        self._known: dict[int, Layout] = {}
        self.current: Layout | None = None
        """What all ranks run; before they reported, what the store remembers."""
        self.next_generation = memory.next_generation
        """The lowest generation that was never used."""
        self.stored_generation: int | None = None
        """Generation that the store has as committed, or None."""
        self.proposed = memory.proposed
        """What an earlier balancer was rolling out when it ended."""
        self._adopting: int | None = None
        self._of_wave: frozenset[int] = frozenset()
        if memory.committed is not None:
            self.run(memory.committed)
            self.stored_generation = memory.committed.generation
        if memory.proposed is not None:
            self.remember(memory.proposed)

    @property
    def committed(self) -> Layout | None:
        """The layout that the store has as committed."""
        return None if self.stored_generation is None else self.get(self.stored_generation)

    def get(self, generation: int) -> Layout | None:
        """A layout by its generation, if it is still kept."""
        return self._known.get(generation)

    def nearest(self, generation: int) -> Layout | None:
        """The layout of that generation, else the newest one, else None."""
        known = self._known.get(generation)
        return known or (self._known[max(self._known)] if self._known else None)

    def remember(self, layout: Layout) -> None:
        """Keep a layout that a rank runs or is asked to stage, in place of any with its number.

        It stays longer than those remembered before, whatever their numbers: ranks that are found
        may run an earlier generation than others did since.
        """
        known = self._known.pop(layout.generation, layout)
        if layout.generation == self.stored_generation and not known.same_placement(layout):
            self.stored_generation = None  # The store has another one: this must be adopted.
        self._known[layout.generation] = layout
        self.reserve(layout.generation)
        in_use = {one.generation for one in (self.current, self.proposed) if one is not None}
        needed = {*in_use, self.stored_generation, *self._of_wave}
        for generation in list(self._known)[:-MAX_KNOWN]:
            if generation not in needed:
                del self._known[generation]

    def keep_for_wave(self, *generations: int) -> None:
        """Keep the layouts that a wave leads from and to, until the next wave."""
        self._of_wave = frozenset(generations)

    def reserve(self, generation: int) -> None:
        """A rank holds something under this generation: it must not be used again."""
        self.next_generation = max(self.next_generation, generation + 1)

    def run(self, layout: Layout) -> None:
        """All ranks run this layout now."""
        self.current = layout
        self.remember(layout)

    def note_stored(self, generation: int) -> None:
        """The store has committed a generation."""
        self.stored_generation = generation

    def note_read(self, committed: Layout | None) -> None:
        """The store was read and has this layout as committed."""
        if self._adopting is None:
            self.stored_generation = None if committed is None else committed.generation

    def begin_adoption(self, generation: int) -> None:
        """A layout that no rollout led to is on its way to the store."""
        self._adopting = generation

    def end_adoption(self, *, stored_generation: int | None) -> None:
        """The store has committed that layout, or failed to if None."""
        self._adopting = None
        if stored_generation is not None:
            self.stored_generation = stored_generation

    def needs_adoption(self, generation: int) -> bool:
        """Whether a generation that all ranks run is neither committed nor about to be."""
        return generation not in {self.stored_generation, self._adopting}
