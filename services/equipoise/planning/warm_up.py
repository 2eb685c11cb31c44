"""`warm_up`: have everything compiled that a plan calls, so that the first real one is not late.

Run as a program, `python -m equipoise.planning.warm_up`, it fills the cache for later processes.
"""

import numpy as np

from equipoise.planning.layout import contiguous_layout
from equipoise.planning.planner import plan
from equipoise.planning.policy import Algorithm
from equipoise.planning.topology import ModelShape, Topology


def warm_up() -> None:
    """Make small plans of every kind.

    The first call after an installation compiles for half a minute; later ones, in other processes
    too, load what it left in the cache (see `compiled`) within two seconds.
    """
    model = ModelShape(num_layers=2, num_experts=8, num_groups=4, expert_bytes=1)
    topology = Topology(node_of_rank=("a", "a", "b", "b"), slots_per_rank=3)
    current = contiguous_layout(
        num_layers=model.num_layers,
        num_experts=model.num_experts,
        num_ranks=topology.num_ranks,
        slots_per_rank=topology.slots_per_rank,
    )
    load = np.linspace(1.0, 9.0, model.num_layers * model.num_experts) ** 2
    for algorithm in Algorithm:
        for start in (None, current):
            plan(
                load.reshape(model.num_layers, model.num_experts),
                model=model,
                topology=topology,
                current=start,
                algorithm=algorithm,
                samples=1e6,
            )


if __name__ == "__main__":
    warm_up()
