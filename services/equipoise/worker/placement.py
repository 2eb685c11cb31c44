"""The tables that our model dispatches by, from a layout."""

from equipoise.planning.layout import Layout
from equipoise.rank.held import HeldExperts
from equipoise_model.placement import PlacementTables

HeldSlots = HeldExperts[PlacementTables]
"""The experts that our model computes with."""


def placement_of(layout: Layout) -> PlacementTables:
    """Return the tables that the model dispatches by in a layout."""
    return PlacementTables.from_layout(
        layout.expert_of_slot,
        num_experts=layout.num_experts,
        num_ranks=layout.num_ranks,
        generation=layout.generation,
        share_of_slot=layout.share_of_slot,
    )
