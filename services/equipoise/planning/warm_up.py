"""`warm_up`: compile the planner before the first plan is needed.

Run as `python -m equipoise.planning.warm_up`, it fills the cache for later processes.
"""

from functools import partial
from itertools import product

import numpy as np

from equipoise.planning.balance import compare
from equipoise.planning.layout import Layout
from equipoise.planning.places import Wishes, plan_in_places
from equipoise.planning.planner import plan
from equipoise.planning.policy import Algorithm, SlotUse, Weighting
from equipoise.planning.topology import ModelShape, Topology


def warm_up() -> None:
    """Make and compare tiny plans with every algorithm, so that all functions are compiled.

    Takes tens of seconds without a cache (see `equipoise.planning.placing.compiled`), else about a
    second. May run in a thread: the compiler releases the GIL while it runs native code.
    """
    model = ModelShape(num_layers=1, num_experts=8, num_groups=4, expert_bytes=1)
    topology = Topology(node_of_rank=("a", "a", "b", "b"), slots_per_rank=3)
    load = np.array([[9.0, 1.0, 1.0, 1.0, 5.0, 4.0, 1.0, 2.0]])
    few_slots = Topology(node_of_rank=("a", "a", "b", "b", "b"), slots_per_rank=2)
    plan(load, model=model, topology=few_slots, algorithm=Algorithm.GLOBAL, weighted=Weighting.ON)
    for algorithm, weighted in product(Algorithm, (Weighting.OFF, Weighting.ON)):
        place = partial(plan, model=model, topology=topology, algorithm=algorithm)
        made = place(load, weighted=weighted)
        layout = Layout(
            generation=1,
            num_experts=8,
            num_ranks=4,
            expert_of_slot=made.expert_of_slot,
            share_of_slot=made.share_of_slot,
        )
        place(load[:, ::-1], current=layout, weighted=weighted, samples=1e9)
        compare(layout, layout, load)
    places = Topology(
        node_of_rank=("a", "a", "b", "b"), slots_per_rank=4, places_of_rank=(3, 3, 3, 3)
    )
    for slots in (SlotUse.POOLED, SlotUse.PER_LAYER):
        pooled = partial(plan_in_places, model=model, topology=places)
        first = pooled(load, Wishes(slots=slots, weighted=Weighting.ON), current=None)
        layout = Layout(
            generation=1, num_experts=8, num_ranks=4, expert_of_slot=first.expert_of_slot
        )
        pooled(load[:, ::-1], Wishes(slots=slots, samples=1e9), current=layout)


if __name__ == "__main__":
    warm_up()
