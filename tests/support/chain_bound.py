"""The most that any placement with weighted replicas reaches where ranks have two slots each.

Experts are vertices, ranks edges between the two that they hold. A connected part with v experts
and e ranks carries at most e times the busiest rank T, so sum(T - w) >= T (v - e) over its experts;
v - e is at most 1 (a tree), and over all parts it comes to experts - ranks. So T is out of reach if
experts cannot be partitioned with values that sum to experts - ranks: a bin covering problem.
Its linear relaxation by patterns (Gilmore and Gomory, 1961) bounds those values from above; T - w
is rounded up to a grid, hence in favour of T.

A pattern whose sum is s (in units of T) is worth 1 if s >= 1, 0 if 0 <= s < 1, and s itself below:
never less than the part that it stands for.
"""

import numba
import numpy as np
from scipy.optimize import linprog

GRID = 400
MAX_ROUNDS = 300


def is_out_of_reach(load, *, num_ranks, balancedness):
    """Whether no weighted placement of `load`, [experts], on two slots a rank is so balanced."""
    load = np.asarray(load, dtype=np.float64) * num_ranks / load.sum()
    assert num_ranks < len(load) <= 2 * num_ranks, "fewer redundant slots than ranks"
    surplus = np.ceil((1.0 - load * balancedness) * GRID - 1e-9).astype(np.int64)
    surplus[surplus == 0] = 1
    size, count = np.unique(surplus, return_counts=True)
    return _most_value(size, count, enough=len(load) - num_ranks) < len(load) - num_ranks - 1e-6


def _most_value(size, count, *, enough):
    """An upper bound of the value of all parts, or `enough` if no bound below it is found."""
    worth = _worth(np.arange(min(0, size.min()), GRID + 1))
    price = size / GRID
    centre, best = price, float(price @ count)
    patterns = {}
    for attempt in range(MAX_ROUNDS):
        for tried in (0.3 * price + 0.7 * centre, price):
            cheapest, item, settled = _cheapest_walks(size, tried, -min(0, size.min()), GRID)
            missing = max(0.0, float((worth - cheapest).max()))
            # A part has two experts or more, so there are at most half as many.
            bound = float(tried @ count) + missing * count.sum() / 2
            if settled and bound < best:
                best, centre = bound, tried
            if best < enough - 1e-6:
                return best
            if _add_patterns(patterns, size, tried, take_all=attempt == 0):
                break
            walked = _walk(item, size, cheapest, worth)
            if walked is not None and walked not in patterns:
                patterns[walked] = float(_worth(np.array([np.dot(walked, size)]))[0])
                break
        else:
            return enough
        value, price = _solve(patterns, size, count)
        if value >= enough - 1e-7:
            return enough
    return enough


def _worth(total):
    return np.where(total >= GRID, 1.0, np.where(total >= 0, 0.0, total / GRID))


def _solve(patterns, size, count):
    """The best mixture of patterns, and the price of each size; hot experts must all be used."""
    hot = np.flatnonzero(size < 0)
    alone = np.zeros((len(size), len(hot)))
    alone[hot, np.arange(len(hot))] = 1.0
    columns = np.hstack([np.array(list(patterns)).T, alone])
    worth = np.concatenate([list(patterns.values()), size[hot] / GRID])
    cool = size > 0
    found = linprog(
        -worth,
        A_ub=columns[cool],
        b_ub=count[cool],
        A_eq=columns[hot] if len(hot) else None,
        b_eq=count[hot] if len(hot) else None,
        method="highs-ds",
    )
    price = np.zeros(len(size))
    price[cool] = -found.ineqlin.marginals
    if len(hot):
        price[hot] = -found.eqlin.marginals
    return -found.fun, price


def _add_patterns(patterns, size, price, *, take_all):
    """Add, for each size, the cheapest pattern with it, if it costs less than it is worth."""
    cost, last = _cheapest_covers(size, price, GRID - min(0, int(size.min())))
    added = False
    for first in range(len(size)):
        for total in (GRID,) if size[first] > 0 else (GRID, 0):
            missing = max(0, total - int(size[first]))
            worth = 1.0 if total == GRID else 0.0
            if price[first] + cost[missing] >= worth - 1e-7 and not take_all:
                continue
            pattern = np.zeros(len(size), dtype=np.int64)
            pattern[first] = 1
            while missing > 0:
                pattern[last[missing]] += 1
                missing = max(0, missing - int(size[last[missing]]))
            key = tuple(pattern.tolist())
            added = added or key not in patterns
            patterns[key] = worth
    return added


def _walk(item, size, cheapest, worth):
    """The pattern that is cheapest for its worth, or None if all cost what they are worth."""
    position = int((cheapest - worth).argmin())
    if cheapest[position] >= worth[position] - 1e-9:
        return None
    offset, pattern = len(item) - 1 - GRID, np.zeros(len(size), dtype=np.int64)
    for _ in range(4 * GRID):
        if position == offset or item[position, 0] < 0:
            break
        pattern[item[position, 0]] += 1
        position = int(item[position, 1])
    return tuple(pattern.tolist())


@numba.njit(cache=True)
def _cheapest_covers(size, price, most):
    """The least price of cool experts that sum to at least each total, and the last one of them."""
    cost, last = np.full(most + 1, np.inf), np.full(most + 1, -1)
    cost[0] = 0.0
    for total in range(1, most + 1):
        for index in range(len(size)):
            if size[index] > 0:
                before = cost[max(0, total - size[index])]
                if before + price[index] < cost[total]:
                    cost[total], last[total] = before + price[index], index
    return cost, last


@numba.njit(cache=True)
def _cheapest_walks(size, price, below, grid):
    """The least price of any multiset that sums to each total from -below to grid (or more).

    Cool experts go up, hot ones down, and the order is free, so totals need not leave that range:
    hot ones are taken at 0 or above only. Also returns the last step to each total, [totals, 2]
    (which size, and from where), and whether prices have settled.
    """
    cost = np.full(below + grid + 1, np.inf)
    step = np.full((below + grid + 1, 2), -1)
    cost[below] = 0.0
    for _ in range(8):
        changed = False
        for upward in (True, False):
            for turn in range(len(cost)):
                start = turn if upward else len(cost) - 1 - turn
                for index in range(len(size)):
                    end = min(start + size[index], len(cost) - 1)
                    if (size[index] > 0) != upward or (not upward and start < below) or end < 0:
                        continue
                    if cost[start] + price[index] < cost[end] - 1e-10:
                        cost[end] = cost[start] + price[index]
                        step[end, 0], step[end, 1] = index, start
                        changed = True
        if not changed:
            return cost, step, True
    return cost, step, False
