"""Holding rollouts to what they promised, and going back where one fell short.

Whether it did is `planning/promise.py`'s decision; the way back is an ordinary rollout.
"""

from equipoise.planning.balance import balancedness, layout_loads
from equipoise.planning.expected_gain import ExpectedGain, ObservedWindow, RealisedGain, judge_gain
from equipoise.planning.proposal import Proposal
from equipoise.pool.effects import Chain, Log
from equipoise.pool.given import adopt_given
from equipoise.pool.loads import ClosedWindow
from equipoise.pool.pool import JudgedRollout, Pool, WatchedRollout


def watch_rollout(pool: Pool, proposal: Proposal) -> None:
    """A plan is rolled out: remember what it promised, and by what that is to be judged.

    One that follows before the one before it was judged is held to the layout before both: the way
    back leads to the last that kept its word.
    """
    request, verdict = proposal.request, proposal.verdict
    before, optimism = request.current, 0.0
    balancedness_before = verdict.balancedness_current
    if pool.watched is not None:
        before, optimism = pool.watched.promise.before, pool.watched.promise.optimism
        balancedness_before = balancedness(layout_loads(before, request.window))
    elif request.balancedness is not None:
        optimism = balancedness_before - request.balancedness
    promise = ExpectedGain(
        before=before,
        generation=proposal.waves[-1].generation,
        balancedness_before=balancedness_before,
        balancedness_expected=verdict.balancedness_proposed,
        optimism=optimism,
    )
    pool.watched = WatchedRollout(promise=promise)


def judge_rollout(pool: Pool, window: ClosedWindow, *, now: float) -> Chain:
    """A window has closed: judge the latest rollout by it, once enough have, and go back if so."""
    watched, current = pool.watched, pool.layouts.current
    if watched is None or current is None or pool.rollouts.current is not None:
        return ()
    if current.generation != watched.promise.generation:
        # It was aborted half-way, or something else was rolled out since.
        pool.watched = None
        return ()
    if not (window.switched or window.doubt):
        watched.witnesses.append(ObservedWindow(load=window.load, balancedness=window.balancedness))
    realised = judge_gain(watched.promise, watched.witnesses, policy=pool.policy)
    return () if realised is None else _conclude(pool, realised, now=now)


def _conclude(pool: Pool, realised: RealisedGain, *, now: float) -> Chain:
    watched = pool.watched
    assert watched is not None, "it was judged"
    if realised.goes_back and (pool.hold.reason or not pool.can_plan):
        return ()  # Judged again at the next window, when somebody may move things.
    pool.watched = None
    pool.tally.promises[realised.outcome] += 1
    pool.judged.appendleft(JudgedRollout(promise=watched.promise, realised=realised, judged_s=now))
    log = Log(text=realised.reason, generation=watched.promise.generation)
    if not realised.goes_back:
        return (log,)
    pool.rolled_back_s = now
    pool.tally.rolled_back += 1
    back = adopt_given(
        pool, watched.promise.before, algorithm="rollback", reason=realised.reason, now=now
    )
    return (log, *back)
