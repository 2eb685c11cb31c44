"""Pools that could serve recorded loads, what each gives and costs, and which one to take. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.cli.display import bytes_words
from equipoise.cli.offline.replay_run import replay
from equipoise.formats.recording import Recording
from equipoise.planning.layout import Layout
from equipoise.planning.planner import plan
from equipoise.planning.policy import Algorithm, Policy
from equipoise.planning.topology import ModelShape, Topology

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One pool. `balancedness` is that of a plan for all windows together, on them.

    `memory_bytes` are all experts of one GPU. With several windows, `balancedness_replayed` is the
    mean under the policy, of the windows behind the first, and moves and bytes are by the hour.
    """

    num_ranks: int
    num_nodes: int
    num_slots: int
    num_redundant: int
    balancedness: float
    balancedness_min_layer: float
    bound: float
    memory_bytes: int
    balancedness_replayed: float | None
    moves_per_hour: float | None
    bytes_per_hour: float | None

    @property
    def worth(self) -> float:
        """What choices are compared by: the replayed balancedness, if there is one."""
        if self.balancedness_replayed is None:
            return self.balancedness
        return self.balancedness_replayed


def topologies(
    num_experts: int, *, rank_counts: Sequence[int], ranks_per_node: int, max_redundant: int
) -> Iterator[Topology]:
    """All pools to try: for each number of ranks, slots a rank up to the redundancy allowed.

    The fewest slots that hold all experts are always tried.
    """
    for num_ranks in rank_counts:
        least = -(-num_experts // num_ranks)
        most = max(least, (num_experts + max_redundant) // num_ranks)
        # Ranks of a pool that fills no whole number of nodes are taken to be near each other.
        on_nodes = num_ranks if num_ranks % ranks_per_node else ranks_per_node
        for slots_per_rank in range(least, most + 1):
            yield Topology(
                node_of_rank=tuple(f"node{rank // on_nodes}" for rank in range(num_ranks)),
                slots_per_rank=slots_per_rank,
            )


def evaluate(
    recording: Recording,
    *,
    topology: Topology,
    model: ModelShape,
    algorithm: Algorithm,
    policy: Policy,
    window_s: float,
) -> Choice:
    """What one pool would give and cost."""
    made = plan(
        recording.total(),
        model=model,
        topology=topology,
        algorithm=algorithm,
        weighted=policy.weighted,
    )
    balance, moves_per_hour = None, None
    if recording.num_windows > 1:
        start = Layout(
            generation=1,
            num_experts=model.num_experts,
            num_ranks=topology.num_ranks,
            expert_of_slot=made.expert_of_slot,
            share_of_slot=made.share_of_slot,
        )
        run = replay(
            recording,
            name="whatif",
            policy=policy,
            model=model,
            topology=topology,
            start=start,
            window_s=window_s,
        )
        balance = float(np.mean([step.balancedness for step in run.steps[1:]]))
        moves_per_hour = run.moves * _HOUR_S / (recording.num_windows * window_s)
    return Choice(
        num_ranks=topology.num_ranks,
        num_nodes=len(topology.nodes),
        num_slots=topology.num_slots,
        num_redundant=topology.num_slots - model.num_experts,
        balancedness=made.balancedness,
        balancedness_min_layer=float(made.balancedness_of_layer.min()),
        bound=made.bound,
        memory_bytes=topology.slots_per_rank * model.num_layers * model.expert_bytes,
        balancedness_replayed=balance,
        moves_per_hour=moves_per_hour,
        bytes_per_hour=None if moves_per_hour is None else moves_per_hour * model.expert_bytes,
    )


def choose(
    choices: Sequence[Choice], *, tolerance: float, memory_bytes: float | None
) -> tuple[Choice | None, str]:
    """The choice to take, if any fits, and why.

    A GPU's share of the throughput falls with balancedness, and what experts do not take is left
    for the cache: so of the choices that come within `tolerance` of the best, the one with least
    memory per GPU; then the one with fewest moves, then with fewest ranks.
    """
    fitting = [one for one in choices if memory_bytes is None or one.memory_bytes <= memory_bytes]
    if not fitting:
        least = min(choices, key=lambda one: one.memory_bytes)
        return None, (
            f"nothing fits: the least is {bytes_words(least.memory_bytes)} of experts per GPU, "
            f"with {least.num_ranks} ranks"
        )
    best = max(fitting, key=lambda one: one.worth)
    near = [one for one in fitting if one.worth >= best.worth - tolerance]
    chosen = min(near, key=lambda one: (one.memory_bytes, one.moves_per_hour or 0.0, one.num_ranks))
    kind = "balance" if chosen.balancedness_replayed is None else "replayed balance"
    reason = (
        f"take {_pool_words(chosen)}: {kind} {chosen.worth:.3f} with "
        f"{bytes_words(chosen.memory_bytes)} of experts per GPU"
    )
    if chosen is best:
        others = f", the best of {len(fitting)}" if len(fitting) > 1 else ""
        return chosen, reason + others
    return chosen, (
        f"{reason}, the least memory of the {len(near)} that come within {tolerance:g} of the "
        f"best, {best.worth:.3f} with {bytes_words(best.memory_bytes)} ({_pool_words(best)})"
    )


def _pool_words(choice: Choice) -> str:
    return f"{choice.num_ranks} ranks with {choice.num_redundant} redundant slots"
