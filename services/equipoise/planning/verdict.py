"""`judge`: whether a plan is worth its moves. Every verdict carries its reason in words."""

from dataclasses import dataclass

import numpy as np

from equipoise.planning.balance import balancedness, rank_loads
from equipoise.planning.layout import ExpertTable, Layout
from equipoise.planning.load import Load, Shift, tokens_per_layer
from equipoise.planning.policy import Algorithm, Policy
from equipoise.planning.topology import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Yes or no to a plan, and why.

    Both balancednesses are what the latest window's load makes of a layout. `moves` counts the
    slots that change, over all layers; `bytes` is what they cost.
    """

    accepted: bool
    reason: str
    balancedness_current: float
    balancedness_proposed: float
    moves: int
    bytes: int


def judge(
    *,
    current: Layout,
    proposed: ExpertTable,
    algorithm: Algorithm,
    average: Load,
    window: Load,
    model: ModelShape,
    policy: Policy,
    now: float,
    last_switch_s: float | None,
    shift: Shift,
) -> Verdict:
    """Weigh what `proposed` gains on the latest window against what it costs.

    `average` and `window` are [layers, experts]: the load that the plan was made for (any unit) and
    the tokens of the latest window. A plan follows the average; the window is the newer witness,
    so a plan that is worse on it is refused however good it looks on the average.
    """
    moves = int(np.count_nonzero(proposed != current.expert_of_slot))
    before = _balancedness(current.expert_of_slot, window, current.num_ranks)
    after = _balancedness(proposed, window, current.num_ranks)
    refusal = (
        _too_few_tokens(window, policy)
        or _cooling_down(policy, shift, now=now, last_switch_s=last_switch_s)
        or _nothing_to_move(moves, before)
        or _gains_too_little(before, after, policy)
    )
    cost_bytes = moves * model.expert_bytes
    return Verdict(
        accepted=refusal is None,
        reason=refusal
        or (
            f"{algorithm} plan raises balancedness on the latest window from {before:.3f} to "
            f"{after:.3f} (on the average from "
            f"{_balancedness(current.expert_of_slot, average, current.num_ranks):.3f} to "
            f"{_balancedness(proposed, average, current.num_ranks):.3f}) for {moves} moves of "
            f"{cost_bytes / 2**20:.1f} MiB together; {shift.reason}"
        ),
        balancedness_current=before,
        balancedness_proposed=after,
        moves=moves,
        bytes=cost_bytes,
    )


def _balancedness(expert_of_slot: ExpertTable, load: Load, num_ranks: int) -> float:
    return balancedness(rank_loads(expert_of_slot, load=load, num_ranks=num_ranks))


def _too_few_tokens(window: Load, policy: Policy) -> str | None:
    tokens = tokens_per_layer(window)
    if tokens >= policy.min_tokens:
        return None
    return (
        f"the latest window has {tokens:.0f} expert assignments per layer, "
        f"a decision needs {policy.min_tokens:.0f}"
    )


def _cooling_down(
    policy: Policy, shift: Shift, *, now: float, last_switch_s: float | None
) -> str | None:
    if last_switch_s is None or shift.detected or now - last_switch_s >= policy.cooldown_s:
        return None
    return (
        f"the last switch was {now - last_switch_s:.1f} s ago, "
        f"the cooldown is {policy.cooldown_s:g} s"
    )


def _nothing_to_move(moves: int, before: float) -> str | None:
    if moves:
        return None
    return f"nothing to move: no better layout was found than the current one, at {before:.3f}"


def _gains_too_little(before: float, after: float, policy: Policy) -> str | None:
    if after < before:
        return (
            f"the plan is worse on the latest window: balancedness would fall from {before:.3f} "
            f"to {after:.3f}"
        )
    if after - before < policy.min_gain:
        return (
            f"the plan gains too little on the latest window: balancedness would go from "
            f"{before:.3f} to {after:.3f}, the least gain is {policy.min_gain:.3f}"
        )
    return None
