"""`judge_redundancy`: whether ranks have more redundant experts than their traffic needs, or fewer.

Placements from scratch with several numbers of redundant slots show how even the ranks could be
with each. Some layers stand for all.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from equipoise.planning.arrays import Load
from equipoise.planning.balance import spread_layers
from equipoise.planning.placing.pooled import choose_sizes
from equipoise.planning.placing.problem import Problem
from equipoise.planning.placing.sized import placed_with_sizes
from equipoise.planning.planner import plan
from equipoise.planning.policy import Algorithm, Policy, SlotUse
from equipoise.planning.topology import ModelShape, Topology

WASTED = 0.003
"""Balancedness that all redundant slots beyond those that suffice add at most."""

SHORT = 0.03
"""Balancedness that more redundant slots add at least."""

MAX_LAYERS = 8
"""Layers that are placed, evenly spaced over the model."""

MAX_FEWER = 4
"""Numbers of redundant slots that are tried below the present one."""

MIN_SAMPLES = 100
"""Assignments per expert from which a load is precise enough: chance looks like skew."""

PERSISTENCE = 3
"""Plans in a row that must find the same before it is shown."""


class RedundancyKind(StrEnum):
    """What is wrong with the number of redundant slots."""

    WASTED = "wasted"
    SHORT = "short"


@dataclass(frozen=True, slots=True, kw_only=True)
class Redundancy:
    """A number of redundant slots that would serve a pool's load better than the present one."""

    kind: RedundancyKind
    present: int
    """Redundant slots per layer; on average, if layers share places."""
    advised: int
    """The same for the number that suffices, or that would help."""
    balancedness: float
    """Balancedness that a placement from scratch reaches with the present number."""
    balancedness_advised: float
    """The same with the advised number."""
    bytes_per_rank: int
    """Bytes of experts by which both differ on a rank."""

    @property
    def reason(self) -> str:
        """What is wrong and the number, for people."""
        if self.kind is RedundancyKind.WASTED:
            return (
                f"{self.advised} redundant slots per layer would do: all {self.present} add "
                f"{self.balancedness - self.balancedness_advised:.4f} of balancedness to "
                f"{self.balancedness_advised:.4f} on the average load"
            )
        return (
            f"{self.advised} redundant slots per layer instead of {self.present} would raise the "
            f"balancedness that plans can reach on the average load from {self.balancedness:.3f} "
            f"to {self.balancedness_advised:.3f}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RedundancyHistory:
    """What is shown, and what the latest plans found; changes only if they agree."""

    shown: Redundancy | None = None
    """What several plans in a row found last."""
    found: tuple[RedundancyKind, int, int] | None = None
    """Kind, present and advised number by the latest plan."""
    times: int = 0
    """Plans in a row that found this."""

    def after(self, found: Redundancy | None) -> "RedundancyHistory":
        """Count what a plan found; a pool with another number of slots begins anew."""
        key = None if found is None else (found.kind, found.present, found.advised)
        times = self.times + 1 if key == self.found else 1
        shown = self.shown
        if found is not None and shown is not None and found.present != shown.present:
            shown = None
        if times >= PERSISTENCE:
            shown = found
        return RedundancyHistory(shown=shown, found=key, times=times)


def judge_redundancy(
    load: Load,
    *,
    samples: float | None,
    model: ModelShape,
    topology: Topology,
    policy: Policy,
) -> Redundancy | None:
    """Compare the present number of redundant slots with fewer and with more.

    Args:
        load: [layers, experts] in any unit: the average that plans are for.
        samples: assignments per layer that it is as precise as; None if it is exact.
        model: the shape of the model.
        topology: the ranks; None is returned if they differ in slots or places.
        policy: how slots are used and experts placed.

    Returns:
        The number that suffices, or that would help; None if the present one is about right, or if
        the load is too short to tell.
    """
    is_precise = samples is None or samples >= MIN_SAMPLES * model.num_experts
    are_alike = topology.has_equal_slots and len(set(topology.places_of_rank)) <= 1
    if not load.any() or not is_precise or not are_alike:
        return None
    layers = spread_layers(load, most=MAX_LAYERS)
    few = replace(model, num_layers=len(layers))
    tried = _with_slots_of_ranks
    if topology.places_of_rank and policy.slots is SlotUse.POOLED:
        tried = _with_shared_places
    options = tried(load[layers], few, topology, policy, num_layers=model.num_layers)
    present, reached = next(options, (0, None))
    if reached is None:
        return None
    for number, other in options:
        is_enough = number < present and other >= reached - WASTED
        if is_enough or (number > present and other >= reached + SHORT):
            num_bytes = abs(present - number) * model.num_layers * model.expert_bytes
            return Redundancy(
                kind=RedundancyKind.WASTED if is_enough else RedundancyKind.SHORT,
                present=present,
                advised=number,
                balancedness=reached,
                balancedness_advised=other,
                bytes_per_rank=num_bytes // topology.num_ranks,
            )
    return None


def _with_slots_of_ranks(
    load: Load, model: ModelShape, topology: Topology, policy: Policy, *, num_layers: int
) -> Iterator[tuple[int, float]]:
    """Yield redundant slots and balancedness: at present, of fewer ascending, and of more.

    All ranks have equally many slots in each layer.
    """
    num_ranks, algorithm = topology.num_ranks, policy.algorithm
    if algorithm is Algorithm.INCREMENTAL:
        algorithm = Algorithm.LOCAL if policy.locality < 1.0 else Algorithm.GLOBAL
    present = topology.slots_of_layer(num_layers)[0]
    fewer = range(-(-model.num_experts // num_ranks), present)
    step = max(1, -(-len(fewer) // MAX_FEWER))
    for slots in (present, *fewer[::step], present + 1):
        if slots * num_ranks < model.num_experts:
            return
        made = plan(
            load,
            model=model,
            topology=Topology(node_of_rank=topology.node_of_rank, slots_per_rank=slots),
            algorithm=algorithm,
            locality=policy.locality if algorithm is Algorithm.LOCAL else None,
            weighted=policy.weighted,
        )
        yield slots * num_ranks - model.num_experts, made.balancedness


def _with_shared_places(
    load: Load, model: ModelShape, topology: Topology, policy: Policy, *, num_layers: int
) -> Iterator[tuple[int, float]]:
    """Yield the same for layers that share places, wherever experts may be."""
    present = sum(topology.places_of_rank) // num_layers - model.num_experts
    least = max(1, topology.num_ranks // 4)
    problem = Problem.of(
        load,
        model=model,
        topology=topology,
        current=None,
        ranks=tuple(range(topology.num_ranks)),
        weighted=policy.weighted,
    )
    most = (model.num_experts + max(present, least)) * model.num_layers
    sizes = list(placed_with_sizes(problem, num_places=most))
    busiest = np.stack([one.busiest for one in sizes])
    # Fewer than 2 leave hardly any room to exchange experts between ranks.
    powers = (2**power for power in range(1, present.bit_length()))
    fewer = [one for one in powers if one <= present // 2]
    for redundant in (present, *fewer[-MAX_FEWER:], present + max(least, present)):
        places = (model.num_experts + redundant) * model.num_layers
        chosen = choose_sizes(sizes, num_places=places)
        yield redundant, float((1.0 / busiest[chosen, np.arange(len(chosen))]).mean())
