"""Each step of `relieve` compared with the best of all copies and swaps, computed from scratch.

`relieve` updates what steps change and skips what its bounds exclude. What remains stale or is
excluded wrongly shows here: the step taken is worth less than another one.
"""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from equipoise.planning.placing.relieve import FROM_AFAR, LEAST_EXCESS, relieve
from equipoise.planning.placing.search_state import Goal, SearchSpace

MOVE = 1.0


class Brute:
    """The excess that any copy or swap removes per cost, by the definitions in `relieve`."""

    def __init__(self, start, slots, load, space, goal):
        self.start, self.slots, self.load, self.space, self.goal = start, slots, load, space, goal
        self.count = np.bincount(slots, minlength=len(load))
        self.share = load / self.count[:, None]
        self.mean_load = load @ goal.weight
        num_ranks = len(space.node_of_rank)
        self.carried = np.zeros((num_ranks, load.shape[1]))
        np.add.at(self.carried, space.rank_of_slot, self.share[slots])
        self.excess = np.array([self.over(carried) for carried in self.carried])
        self.node_of_slot = space.node_of_rank[space.rank_of_slot]
        self.num_off_home = np.zeros(len(load))
        np.add.at(self.num_off_home, slots, self.node_of_slot != space.home_of_expert[slots])

    def over(self, carried):
        return float(np.maximum(carried - self.goal.threshold, 0.0) @ self.goal.weight)

    def best(self):
        best = max((self.copy(*one) for one in self.copies()), default=0.0)
        for busy in np.lexsort((np.arange(len(self.excess)), -self.excess)):
            if self.excess[busy] <= max(LEAST_EXCESS, best * MOVE / 4):
                break
            swaps = (self.swap(*one) for one in self.swaps(busy))
            best = max(best, *swaps, 0.0)
            if best > 0.0:
                break
        return best

    def copies(self):
        for slot in np.flatnonzero(self.count[self.slots] > 1):
            on_rank = self.slots[self.space.rank_of_slot == self.space.rank_of_slot[slot]]
            for expert in np.setdiff1d(np.arange(len(self.load)), on_rank):
                yield slot, expert

    def copy(self, slot, expert):
        rank_of_slot, spared = self.space.rank_of_slot, self.slots[slot]
        rank, node = rank_of_slot[slot], self.node_of_slot[slot]
        more = self.load[expert] / (self.count[expert] + 1)
        fewer = self.load[spared] / (self.count[spared] - 1)
        without = self.carried[rank] - self.share[spared]
        removed = self.excess[rank] - self.over(without + more)
        for other in np.flatnonzero(self.slots == expert):
            carried = self.carried[rank_of_slot[other]]
            less = np.maximum(carried - self.goal.threshold, 0.0)
            removed += np.minimum(self.share[expert] - more, less) @ self.goal.weight
        for other in np.flatnonzero(self.slots == spared):
            if other != slot:
                carried = self.carried[rank_of_slot[other]]
                removed += self.over(carried) - self.over(carried + fewer - self.share[spared])
        cost = MOVE * self.price(slot, expert)
        cost += self.space.cost_of_joining * self.is_on_node(expert, node)
        left = self.leaving(expert, 1, node) + self.leaving(spared, -1, node)
        return self.worth(removed, cost + self.space.cost_of_leaving * left)

    def swaps(self, busy):
        rank_of_slot = self.space.rank_of_slot
        for mine in np.flatnonzero(rank_of_slot == busy):
            for theirs in np.flatnonzero(rank_of_slot != busy):
                on_other = self.slots[rank_of_slot == rank_of_slot[theirs]]
                on_busy = self.slots[rank_of_slot == busy]
                if self.slots[mine] not in on_other and self.slots[theirs] not in on_busy:
                    yield mine, theirs

    def swap(self, mine, theirs):
        one, two = self.slots[mine], self.slots[theirs]
        busy, rank = self.space.rank_of_slot[mine], self.space.rank_of_slot[theirs]
        here, there = self.node_of_slot[mine], self.node_of_slot[theirs]
        given = self.share[one] - self.share[two]
        removed = self.excess[busy] - self.over(self.carried[busy] - given)
        removed += self.excess[rank] - self.over(self.carried[rank] + given)
        cost = MOVE * (self.price(mine, two) + self.price(theirs, one))
        if here != there:
            joining = self.is_on_node(one, there) + self.is_on_node(two, here)
            cost += self.space.cost_of_joining * joining
            for expert, before, after in ((one, here, there), (two, there, here)):
                home, part = self.space.home_of_expert[expert], self.share[expert]
                left = (int(after != home) - int(before != home)) * (part @ self.goal.weight)
                cost += self.space.cost_of_leaving * left
        return self.worth(removed, cost)

    def worth(self, removed, cost):
        return removed / max(cost, MOVE / 4) if removed > LEAST_EXCESS else 0.0

    def price(self, slot, expert):
        moves = float(expert != self.start[slot]) - float(self.slots[slot] != self.start[slot])
        near = self.node_of_slot[self.start == expert]
        if expert == self.start[slot] or self.node_of_slot[slot] in near:
            return moves
        return moves + FROM_AFAR - 1.0

    def is_on_node(self, expert, node):
        return int(((self.slots == expert) & (self.node_of_slot == node)).any())

    def leaving(self, expert, more, node):
        count, off = self.count[expert], self.num_off_home[expert]
        changed = off + more * (self.space.home_of_expert[expert] != node)
        return self.mean_load[expert] * (changed / (count + more) - off / count)


@given(st.integers(0, 2**32), st.sampled_from([1, 2]), st.sampled_from(["", "joining", "homes"]))
@example(13662, 1, "")  # A copy of what was just copied is worth more, because it adds less.
@example(19868, 1, "joining")  # An expert that left a node costs less there.
@example(2174, 1, "homes")  # Copies elsewhere cost less once an expert has one more replica.
@settings(max_examples=40, deadline=None)
def test_no_other_step_is_worth_more_than_the_one_taken(seed, num_kinds, costs):
    rng = np.random.default_rng(seed)
    num_nodes, ranks_per_node, size = rng.integers(1, 4), rng.integers(1, 4), rng.integers(1, 5)
    num_ranks = int(num_nodes * ranks_per_node)
    num_slots = num_ranks * int(size)
    num_experts = int(rng.integers(1, num_slots + 1))
    start = np.append(np.arange(num_experts), rng.integers(num_experts, size=num_slots))
    start = rng.permutation(start[:num_slots]).astype(np.int32)
    load = rng.lognormal(sigma=1.0, size=(num_experts, num_kinds))
    load[rng.random(num_experts) < 0.1] = 0.0
    load *= num_ranks / np.maximum(load.sum(axis=0), 1e-9)
    space = SearchSpace(
        np.arange(num_ranks + 1) * size,
        np.repeat(np.arange(num_ranks), size),
        np.repeat(np.arange(num_nodes), ranks_per_node),
        rng.integers(num_nodes, size=num_experts) * (costs == "homes"),
        MOVE,
        10.0 if costs == "homes" else 0.0,
        0.5 if costs == "joining" else 0.0,
    )
    weight = rng.dirichlet(np.ones(num_kinds))
    goal = Goal(rng.choice([1.0, 1.06, 1.3]) * np.ones(num_kinds), weight, np.inf)
    path = relieve(start, load, space, goal)

    slots = start.copy()
    for step in path.steps:
        brute, (first, one, second, two) = Brute(start, slots, load, space, goal), step
        taken = brute.copy(first, one) if second < 0 else brute.swap(first, second)
        assert taken == pytest.approx(brute.best(), rel=1e-6, abs=1e-8)
        slots[first] = one
        if second >= 0:
            slots[second] = two
    if len(path.steps) < 2 * num_slots:
        assert Brute(start, slots, load, space, goal).best() <= 1e-8
