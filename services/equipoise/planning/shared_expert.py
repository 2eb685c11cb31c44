"""The shared expert as one more routed expert: planned with the others, or on dedicated ranks.

Source of the idea: the decode unit of the DeepSeek-V3 technical report, section 3.4.2. There 320
GPUs hold one expert each; 64 of them hold replicas of hot experts and of the shared expert, which
every token uses in addition to its routed ones.
"""

from dataclasses import replace

import numpy as np

from equipoise.planning.arrays import Load
from equipoise.planning.errors import InvalidLayoutError
from equipoise.planning.layout import Layout
from equipoise.planning.placing.problem import Problem
from equipoise.planning.placing.weigh import Placed
from equipoise.planning.planner import Plan, plan, summary
from equipoise.planning.policy import Algorithm
from equipoise.planning.topology import ModelShape, Topology


def with_shared_expert(load: Load, *, top_k: int) -> Load:
    """Append the shared expert's load, [..., layers, experts] to [..., layers, experts + 1].

    `load` counts routed assignments, `top_k` per token; the shared expert has one per token.
    """
    assert top_k >= 1, "every token has at least one routed expert"
    return np.concatenate([load, load.sum(axis=-1, keepdims=True) / top_k], axis=-1)


def shape_with_shared_expert(model: ModelShape) -> ModelShape:
    """Return the model with one more expert and a single group.

    The shared expert is assumed to be as large as a routed one, so that any slot can hold it.
    """
    return replace(model, num_experts=model.num_experts + 1, num_groups=1, has_shared_expert=True)


def plan_with_shared_ranks(
    load: Load,
    *,
    model: ModelShape,
    topology: Topology,
    num_shared_ranks: int,
    current: Layout | None = None,
    algorithm: Algorithm = Algorithm.AUTO,
    exclude_ranks: frozenset[int] = frozenset(),
    samples: float | None = None,
) -> Plan:
    """Plan with the last `num_shared_ranks` ranks for the shared expert only.

    For pools with a fixed number of replicas of the shared expert; if a plan may choose it, `plan`
    does at least as well. `load` is [layers, experts] with the shared expert last, `model` has the
    same experts, and ranks have one slot each. The other arguments are those of `plan`.

    Raises:
        InvalidLayoutError: ranks have more than one slot, or too few are left for routed experts.
    """
    if topology.slots_per_rank != 1:
        raise InvalidLayoutError(
            f"dedicated ranks for the shared expert need 1 slot per rank, not "
            f"{topology.slots_per_rank}: let the plan choose its replicas"
        )
    live = [rank for rank in range(topology.num_ranks) if rank not in exclude_ranks]
    assert 1 <= num_shared_ranks < len(live), "both kinds of experts need ranks"
    shared, routed = model.num_experts - 1, current
    if current is not None:  # Slots of the shared expert count as holding expert 0.
        table = current.expert_of_slot
        routed = replace(
            current,
            num_experts=shared,
            expert_of_slot=np.where(table == shared, np.int32(0), table),
            share_of_slot=None,
        )
    of_routed = plan(
        load[:, :shared],
        model=replace(model, num_experts=shared),
        topology=topology,
        current=routed,
        algorithm=algorithm,
        exclude_ranks=exclude_ranks | frozenset(live[-num_shared_ranks:]),
        samples=samples,
    )
    shared_slots = np.full((model.num_layers, num_shared_ranks), shared, dtype=np.int32)
    table = np.concatenate([of_routed.expert_of_slot, shared_slots], axis=1)
    problem = Problem.of(load, model=model, topology=topology, current=current, ranks=tuple(live))
    made = summary(problem, Placed(table), of_routed.algorithm)
    return replace(
        made,
        ranks=tuple(live),
        reason=f"{made.balancedness:.3f} with {num_shared_ranks} ranks for the shared expert; the "
        f"others: {of_routed.reason}",
    )
