"""`plan_in_places`: plans for ranks whose layers share a pool of places.

A rank has room for some number of experts over all layers, and in one layer at most for its slots.
Per layer, a rank fills equally many slots in every layer. Pooled, layers and ranks differ, if all
ranks have equally many slots.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from equipoise.planning.arrays import EMPTY, Bools, ExpertTable, Indices, Load, Weights
from equipoise.planning.balance import mean_over_kinds
from equipoise.planning.errors import InvalidLayoutError
from equipoise.planning.layout import Layout, count_moves, used_places
from equipoise.planning.placing.blanks import (
    columns_of,
    narrowed,
    widened,
    with_blanks,
    without_blanks,
)
from equipoise.planning.placing.bound import upper_bound_of_places
from equipoise.planning.placing.chance import chance_of_layer, gains_beyond_chance
from equipoise.planning.placing.cover import cover, fill
from equipoise.planning.placing.from_scratch import place_globally
from equipoise.planning.placing.incremental import improve
from equipoise.planning.placing.locality import Homes, strays
from equipoise.planning.placing.pooled import place_pooled
from equipoise.planning.placing.pooled_by_node import obstacle_to_pooling_by_node
from equipoise.planning.placing.problem import Problem
from equipoise.planning.placing.stay import align
from equipoise.planning.placing.weigh import Placed, weigh
from equipoise.planning.planner import LEAST_LAYER_GAIN, LOCALITY, Plan, plan, summary
from equipoise.planning.policy import Algorithm, SlotUse, Weighting
from equipoise.planning.shares import even_shares
from equipoise.planning.topology import ModelShape, Topology

PARTS = (0.125, 0.25, 0.5, 1.0)
"""Parts of the layers worth placing again that are tried, those that lose most first."""

COST_OF_PLACING_AGAIN = 2.0
"""A layer that is placed again must gain this many times what its moves cost. It moves nearly all
its experts, and later plans may do so again: counted once, EP32 earns up to 0.003 less net of
moves, and EP144 makes up to 8 % more moves for at most 0.0015."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a plan should be like; see `plan`."""

    algorithm: Algorithm = Algorithm.GLOBAL
    slots: SlotUse = SlotUse.PER_LAYER
    weighted: Weighting = Weighting.OFF
    locality: float | None = None
    target_balancedness: float | None = None
    max_moves: int | None = None
    samples: float | None = None
    weights: Weights | None = None
    """For a load of several kinds of traffic. Pooled, layers that are placed from scratch are for
    their mean."""
    least_gain_per_move: float = 0.0


def plan_in_places(
    load: Load,
    wishes: Wishes,
    *,
    model: ModelShape,
    topology: Topology,
    current: Layout | None,
    exclude_ranks: frozenset[int] = frozenset(),
) -> Plan:
    """Plan as `plan` does, and fill no more places of any rank than it has.

    Raises:
        InvalidLayoutError: there are fewer slots or places than experts, or no ranks.
    """
    is_per_layer = wishes.slots is SlotUse.PER_LAYER or not topology.has_equal_slots
    if not topology.places_of_rank or is_per_layer:
        of_layer = topology.slots_of_layer(model.num_layers)
        if min(of_layer) < 1:
            raise InvalidLayoutError(
                f"{min(topology.places_of_rank)} places of a rank are less than one for each of "
                f"{model.num_layers} layers: give each rank more, or pool them"
            )
        num_left = sum(size for rank, size in enumerate(of_layer) if rank not in exclude_ranks)
        if topology.places_of_rank and num_left < model.num_experts:
            raise InvalidLayoutError(
                f"with equally many slots in each layer, the places of {topology.num_ranks} ranks "
                f"are {num_left} slots, too few for {model.num_experts} experts: give each rank "
                "more, or pool them"
            )
        narrow = Topology(
            node_of_rank=topology.node_of_rank, slots_per_rank=max(of_layer), slots_of_rank=of_layer
        )
        held = current
        if current is not None and topology.places_of_rank:
            mean = load if wishes.weights is None else mean_over_kinds(load, wishes.weights)
            held = _narrow_layout(mean, current, model=model, topology=topology, narrow=narrow)
        made = plan(
            load,
            model=model,
            topology=narrow,
            current=held,
            algorithm=wishes.algorithm,
            locality=wishes.locality,
            max_moves=wishes.max_moves,
            target_balancedness=wishes.target_balancedness,
            exclude_ranks=exclude_ranks,
            samples=wishes.samples,
            weighted=wishes.weighted,
            weights=wishes.weights,
            least_gain_per_move=wishes.least_gain_per_move,
        )
        return _widened(made, topology, of_layer, current) if topology.places_of_rank else made
    ranks = tuple(rank for rank in range(topology.num_ranks) if rank not in exclude_ranks)
    if not ranks:
        raise InvalidLayoutError("no rank is left to plan for: exclude fewer ranks")
    problem = Problem.of(
        load,
        model=model,
        topology=topology,
        current=current,
        ranks=ranks,
        weighted=wishes.weighted,
        weights=wishes.weights,
    )
    num_places = sum(problem.topology.places_of_rank)
    if num_places < model.num_layers * model.num_experts:
        raise InvalidLayoutError(
            f"{len(ranks)} ranks with {num_places} places cannot hold {model.num_experts} experts "
            f"in each of {model.num_layers} layers: give each rank at least "
            f"{-(-model.num_layers * model.num_experts // len(ranks))} places"
        )
    return replace(_Pooling.of(problem, wishes).plan(), ranks=ranks)


def _widened(
    made: Plan, topology: Topology, of_layer: tuple[int, ...], current: Layout | None
) -> Plan:
    """Spread a plan over all slots of its ranks; those that it does not use stay empty."""
    live = topology.only(made.ranks)
    own = tuple(of_layer[rank] for rank in made.ranks)
    table, shares = widened(made.expert_of_slot, live, own, fill=EMPTY), made.share_of_slot
    if shares is not None:
        shares = widened(shares, live, own, fill=0)
    if current is None:
        return replace(made, expert_of_slot=table, share_of_slot=shares)
    columns = columns_of(topology, topology.slots_of_rank, ranks=made.ranks)
    held = current.expert_of_slot[:, columns]
    in_use = np.add.reduceat(held != EMPTY, live.first_slot[:-1], axis=1, dtype=np.int64)
    if shares is None:  # Experts that stay on their rank also stay in their slot.
        wide = (with_blanks(one, current.num_experts) for one in (table, held))
        aligned = align(*wide, first_slot=np.array(live.first_slot, dtype=np.int64))
        table = without_blanks(aligned, current.num_experts)
    return replace(
        made,
        expert_of_slot=table,
        share_of_slot=shares,
        moves=count_moves(held, table),
        evened_layers=int((in_use != own).any(axis=1).sum()),
    )


def _narrow_layout(
    load: Load, current: Layout, *, model: ModelShape, topology: Topology, narrow: Topology
) -> Layout:
    """The current layout in the slots of a narrow topology, each of them filled."""
    of_layer = narrow.slots_of_rank
    table = narrowed(current.expert_of_slot, topology, of_layer)
    for layer in np.flatnonzero((table == EMPTY).any(axis=1)).tolist():
        fill(table[layer], load[layer], narrow)
    table = cover(Problem(load=load, model=model, topology=narrow, held=table))
    columns = columns_of(topology, of_layer)
    is_all = np.array_equal(widened(table, topology, of_layer, fill=EMPTY), current.expert_of_slot)
    shares = current.share_of_slot
    return Layout(
        generation=current.generation,
        num_experts=current.num_experts,
        num_ranks=current.num_ranks,
        expert_of_slot=table,
        slots_of_rank=of_layer,
        share_of_slot=shares[:, columns] if shares is not None and is_all else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pooling:
    """A problem whose layers share places, and what a plan for it should be like."""

    problem: Problem
    wishes: Wishes
    locality: float
    """1 for any expert on any rank; below, groups have home nodes, as in `place_locally`."""
    obstacle: str
    """Why groups have no home nodes although they should; empty if they have, or need none."""

    @classmethod
    def of(cls, problem: Problem, wishes: Wishes) -> "_Pooling":
        """Find out how far groups may leave their nodes."""
        locality = 1.0 if wishes.locality is None else wishes.locality
        if wishes.algorithm is Algorithm.HIERARCHICAL:
            locality = 0.0
        elif wishes.algorithm is Algorithm.LOCAL and wishes.locality is None:
            locality = LOCALITY
        obstacle = obstacle_to_pooling_by_node(problem) if locality < 1.0 else None
        return cls(
            problem=problem,
            wishes=wishes,
            locality=1.0 if obstacle else locality,
            obstacle=obstacle or "",
        )

    def plan(self) -> Plan:
        """Improve layers in the slots that they have; place those that lose most again."""
        problem, wishes = self.problem, self.wishes
        held = Placed(problem.held, problem.held_shares)
        fresh = self._placed_again(problem, free=np.ones_like(problem.is_busy))
        if problem.is_new:
            return self._made(fresh, before=None)
        before, after = _busiest(problem, held), _busiest(problem, fresh)
        returns = strays(problem, *held, locality=self.locality)
        must = ~problem.is_valid | returns
        worth, comparison = _worth_changing(problem, before - after, wishes.samples)
        # A layout for the mean of several kinds of traffic does not show what moves gain for all.
        lack = before - 1.0 / problem.bound_of_layer
        climbs, _ = _worth_changing(problem, lack, wishes.samples)
        if problem.weighted is not Weighting.OFF:
            held = weigh(problem, problem.held, may_chain=False)
        standing = _mean_balance(problem, held)
        target = wishes.target_balancedness
        may_gain = (worth | climbs).any() and (target is None or standing < target)
        if not (must.any() or may_gain):
            return self._made(held, before=standing, comparison=comparison)
        ways: Iterable[Placed] = (fresh,)
        if wishes.algorithm is Algorithm.INCREMENTAL:
            ways = self._candidates(
                fresh,
                lose=np.where(worth, before - after, 0.0),
                lack=np.where(climbs, lack, 0.0),
                must=must,
            )
        best, reached, net = held, standing, standing
        curve: list[tuple[int, float]] = []
        for place, placed in enumerate(ways):
            moves = count_moves(problem.held, placed.table)
            if wishes.max_moves is not None and moves > wishes.max_moves and not must.any():
                continue  # A later one may need fewer.
            balance = _mean_balance(problem, placed)
            if not curve or balance > curve[-1][1]:
                curve = [*(point for point in curve if point[0] < moves), (moves, balance)]
            cost = wishes.least_gain_per_move * moves * (COST_OF_PLACING_AGAIN if place else 1.0)
            if must.any() or balance - cost > net:
                best, reached, net = placed, balance, balance - cost
            if must.any() or (target is not None and reached >= target):
                break
        made = self._made(best, before=standing, comparison=comparison)
        return replace(made, returned_layers=int(returns.sum()), curve=tuple(curve))

    def _candidates(
        self, fresh: Placed, *, lose: Load, lack: Load, must: Bools
    ) -> Iterator[Placed]:
        """Yield placements that mostly move more and more, at first in the slots that layers have.

        `lose` is what layers lose by staying instead of being placed again, `lack` what they are
        short of their bound, `must` which cannot stay; [layers] all.
        """
        near, gains = self.problem, lose > 0
        if not must.any():
            table = self._improved_in_place(near, self.wishes, lose=lack)
            before = _busiest(near, Placed(near.held, near.held_shares))
            gain = before - _busiest(near, weigh(near, table, may_chain=False))
            changes, _ = _worth_changing(near, gain, self.wishes.samples)
            near = replace(near, held=np.where(changes[:, None], table, near.held))
            improved = weigh(self.problem, near.held, may_chain=False)
            yield improved
            # What these layers would still gain by other numbers of slots.
            still = _busiest(self.problem, improved) - _busiest(self.problem, fresh)
            lose = np.where(gains, still, 0.0)
            gains = lose > 0
        order = np.argsort(-lose, kind="stable")
        # With a budget, no layer is placed again beside those that must be.
        parts = (0.0,) if must.any() and self.wishes.max_moves is not None else PARTS
        for part in parts:
            free = must.copy()
            free[order[: int(np.ceil(part * gains.sum()))]] = True
            if not free.any():
                return
            if not self._have_places(free):
                free[:] = True
            yield fresh if free.all() else self._placed_again(near, free=free)
        yield fresh

    def _have_places(self, free: Bools) -> bool:
        """Whether the layers that stay leave places for all experts of the others."""
        problem, num_parts = self.problem, self.problem.num_nodes if self.locality < 1.0 else 1
        topology, needed = problem.topology, int(free.sum()) * problem.model.num_experts
        room = np.array(topology.places_of_rank)
        room -= used_places(problem.held[~free], first_slot=topology.first_slot)
        return bool((num_parts * room.reshape(num_parts, -1).sum(axis=1) >= needed).all())

    def _improved_in_place(self, problem: Problem, wishes: Wishes, *, lose: Load) -> ExpertTable:
        """Make the moves that are worth it in the slots that each rank has in use.

        Layers that `lose` most by staying, [layers], come first in a move budget.
        """
        table, left = problem.held.copy(), wishes.max_moves
        num_busy = int(problem.is_busy.sum())
        order = np.argsort(-lose, kind="stable")
        for layer in order[lose[order] > 0].tolist():
            columns = np.flatnonzero(problem.held[layer] != EMPTY)
            small = _layer_in_use(problem, layer, columns)
            noise, homes, fresh = None, None, small.held
            if wishes.samples is not None:
                noise = chance_of_layer(small, samples=wishes.samples) / 2
            if self.locality < 1.0:
                homes = Homes.of_table(small, small.held, locality=self.locality)
            elif left is None:
                fresh = place_globally(small, noise=noise)
            improved = improve(
                small,
                layers=np.ones(1, dtype=np.bool_),
                fresh=fresh,
                standing=small.balancedness_of_layer(small.held),
                least_gain=LEAST_LAYER_GAIN,
                target=wishes.target_balancedness,
                max_moves=left,
                homes=homes,
                least_slope=wishes.least_gain_per_move * num_busy,
                noise=noise,
            )
            table[layer, columns] = improved.table[0]
            if left is not None:
                left -= count_moves(small.held, improved.table)
        return table

    def _placed_again(self, problem: Problem, *, free: Bools) -> Placed:
        """Place some layers from scratch; those with home nodes leave them only as they may."""
        try:
            table = place_pooled(problem, free=free, locality=self.locality)
        except InvalidLayoutError:
            if free.all():
                raise
            free = np.ones_like(free)  # Few layers may have no exchange that makes room.
            table = place_pooled(problem, free=free, locality=self.locality)
        if 0.0 < self.locality < 1.0:
            homely = replace(problem, held=table, held_shares=None)
            lose = (free & problem.is_busy).astype(np.float64)
            table = self._improved_in_place(homely, Wishes(), lose=lose)
        return weigh(problem, table, may_chain=False)

    def _made(self, placed: Placed, *, before: float | None, comparison: str = "") -> Plan:
        """Build the plan with its figures and its reason."""
        problem, topology = self.problem, self.problem.topology
        algorithm = self.wishes.algorithm
        is_placed_as_asked = algorithm is Algorithm.INCREMENTAL or self.locality < 1.0
        made = summary(problem, placed, algorithm if is_placed_as_asked else Algorithm.GLOBAL)
        if self.locality < 1.0:
            comparison += f"; {1.0 - made.off_node_share:.1%} of the load stays on its home node"
        elif self.obstacle:
            comparison += f"; not hierarchical: {self.obstacle}"
        slots_of_layer = (placed.table != EMPTY).sum(axis=1)
        changed = int((placed.table != problem.held).any(axis=1).sum())
        how = (
            ""
            if before is None
            else f" after {before:.3f} by {made.moves} moves in {changed} of "
            f"{len(slots_of_layer)} layers"
        )
        return replace(
            made,
            bound=sum(
                weight
                * upper_bound_of_places(
                    load,
                    num_places=sum(topology.places_of_rank),
                    num_slots=topology.num_slots,
                    num_ranks=topology.num_ranks,
                )
                for weight, load in zip(
                    problem.weights, problem.kinds or (problem.load,), strict=True
                )
            ),
            reason=(
                f"pooled: {made.balancedness:.3f}{how}, with {slots_of_layer.min()} to "
                f"{slots_of_layer.max()} slots in a layer{comparison}"
            ),
        )


def _layer_in_use(problem: Problem, layer: int, columns: Indices) -> Problem:
    """One layer on the slots that hold an expert, [columns], as a problem without empty slots."""
    ranks, sizes = np.unique(problem.rank_of_slot[columns], return_counts=True)
    slots_of_rank = tuple(sizes.tolist())
    return Problem(
        load=problem.load[layer : layer + 1],
        model=replace(problem.model, num_layers=1),
        topology=Topology(
            node_of_rank=tuple(problem.topology.node_of_rank[rank] for rank in ranks),
            slots_per_rank=max(slots_of_rank),
            slots_of_rank=slots_of_rank,
        ),
        held=np.ascontiguousarray(problem.held[layer, columns][None]),
        kinds=tuple(load[layer : layer + 1] for load in problem.kinds),
        weights=problem.weights,
    )


def _worth_changing(problem: Problem, gain: Load, samples: float | None) -> tuple[Bools, str]:
    """Find layers that gain more than jitter and chance, [layers]; say why others do not."""
    changes: Bools = problem.is_busy & (gain > LEAST_LAYER_GAIN)
    if samples is None:
        return changes, ""
    shares = problem.held_shares
    if shares is None:  # As a table they are 0 where a slot is empty.
        shares = even_shares(problem.held, num_experts=problem.model.num_experts)
    with_shares = replace(problem, held_shares=shares)
    beyond, text = gains_beyond_chance(with_shares, gain, samples=samples)
    kept = int((changes & ~beyond).sum())
    return changes & beyond, f"; {kept} layers keep their placement: {text}" if kept else ""


def _busiest(problem: Problem, placed: Placed) -> Load:
    """The load of the busiest rank, in multiples of the mean rank load, [layers]."""
    busiest: Load = 1.0 / problem.balancedness_of_layer(*placed)
    return busiest


def _mean_balance(problem: Problem, placed: Placed) -> float:
    balance = problem.balancedness_of_layer(*placed)[problem.is_busy]
    return float(balance.mean()) if len(balance) else 1.0
