"""Planted faults: real code broken on purpose, to know that the invariants would notice.

Each stands for a fault that was there once, or that one careless line would make.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from tests.simulation.plants.leaders import LEADER_PLANTS
from tests.simulation.plants.members import MEMBER_PLANTS
from tests.simulation.plants.ranks import RANK_PLANTS

PLANTS = {**LEADER_PLANTS, **MEMBER_PLANTS, **RANK_PLANTS}
"""Every planted fault, by name."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Break one thing inside the block; nothing for an empty name."""
    with ExitStack() as stack:
        for target, attribute, value in PLANTS[name].patches() if name else ():
            stack.enter_context(patch.object(target, attribute, value))
        yield
