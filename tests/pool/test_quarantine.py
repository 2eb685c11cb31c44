"""A rank whose bytes differ from the checkpoint is quarantined by name; the pool goes on.

Its only copy of an expert, or the copy that is reported first, is compared like any other.
"""

import dataclasses

import numpy as np
import pytest

from equipoise.planning.moves import checksums_digest
from equipoise.pool.health import Health
from equipoise.wire.balancer_messages import Rejection, Stage
from equipoise.wire.messages import GroupLost
from tests.support.pool_harness import POLICY
from tests.support.scripted_worker import (
    MODEL,
    ScriptedWorker,
    expert_checksum,
    expert_table,
    make_hello,
)

MANY = frozenset(np.ndindex(MODEL.num_layers, 24))
"""Most experts of every layer."""


WAIT_S = int(POLICY.start_timeout_s) + 5
SLOTS = 12
"""Of each of four workers, so that three of them can hold all 32 experts."""


def hello_of_worker(name, **changes):
    return make_hello(name, node="node-0", slots_per_rank=SLOTS, **changes)


@pytest.fixture
def harness(make_harness):
    harness = make_harness()
    for name in harness.workers:
        harness.workers[name] = ScriptedWorker(hello_of_worker(name))
    return harness


@pytest.fixture
def serving_harness(harness):
    harness.serve()
    return harness


class DamagedWorker(ScriptedWorker):
    """A rank whose copies of some experts differ by one bit, as (layer, expert)."""

    def __init__(self, hello, damaged):
        super().__init__(hello)
        self.damaged = damaged

    def checksums(self):
        found = super().checksums()
        for layer, slot in np.ndindex(found.shape[:2]):
            if (layer, int(self.own(self.layout.expert_of_slot)[layer, slot])) in self.damaged:
                found[layer, slot, 3] ^= 16
        return found


def damage(harness, name, *, experts=MANY):
    """Replace a worker by one that holds wrong bytes of these experts."""
    harness.workers[name] = DamagedWorker(harness.workers[name].hello, experts)
    return harness.workers[name]


def quarantined(harness):
    return {one.worker: one for one in harness.pool.quarantine.workers}


def settle(harness, *, seconds=5):
    """Let time pass; all workers are alive, and serve in the newest epoch that they were sent."""
    for _ in range(seconds):
        for worker in harness.workers.values():
            if worker.hello.worker in harness.pool.roster.members:
                harness.say(worker, worker.heartbeat())
        harness.tick(1.0)
        for member in harness.pool.roster.seated():
            worker = harness.workers[member.name]
            if worker.join_epoch and worker.epoch == harness.pool.roster.epoch:
                harness.say(worker, worker.serving())


def seated(harness):
    return [member.name for member in harness.pool.roster.seated()]


def test_every_rank_that_holds_the_checkpoints_bytes_is_verified(serving_harness):
    verification = serving_harness.pool.verification
    assert verification.complete
    assert np.array_equal(verification.table, expert_table(MODEL))
    assert not quarantined(serving_harness)


def test_nothing_is_verified_before_rank_0_sent_the_table(harness):
    harness.assemble()
    first, *others = harness.ranks
    for worker in others:
        harness.say(worker, worker.serving())
    assert harness.pool.verification.table is None
    assert not harness.pool.agreement.is_settled
    harness.say(first, first.serving())
    assert harness.pool.verification.complete
    assert harness.pool.agreement.is_settled


@pytest.mark.parametrize("name", ["worker-0", "worker-3"])
@pytest.mark.parametrize("backwards", [False, True])
def test_damage_is_never_the_truth_and_the_pool_goes_on_without_it(
    harness, skewed, name, backwards
):
    """Most experts of one rank, with and without replicas, damaged by one bit each."""
    damage(harness, name)
    harness.assemble()
    for worker in harness.ranks[::-1] if backwards else harness.ranks:
        harness.say(worker, worker.serving())
    (one,) = quarantined(harness).values()
    assert (one.worker, one.boot_id) == (name, "boot-1")
    assert "of its slots differ from the checkpoint" in one.reason
    assert harness.pool.diagnosis().health is Health.DEGRADED
    settle(harness)
    assert seated(harness) == [other for other in sorted(harness.workers) if other != name]
    assert np.array_equal(harness.pool.verification.table, expert_table(MODEL))
    assert harness.pool.verification.complete
    assert harness.pool.agreement.is_settled
    assert f"{name} is quarantined" in harness.pool.diagnosis().reason
    assert name in harness.pool.membership.epochs[0].reason
    assert any(f"worker {name} (boot boot-1) is quarantined" in line for line in harness.logs)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_wrong_bytes_count_although_the_next_epoch_has_begun(serving_harness, is_damaged):
    harness = serving_harness
    worker = harness.workers["worker-1"]
    late = dataclasses.replace(worker.serving(), layout_digest=worker.layout.digest())
    if is_damaged:
        late.checksums[1, 2, 3] ^= 16
    harness.lose(harness.workers["worker-3"])
    for one in harness.ranks[:3]:
        lost = GroupLost(epoch=1, reason="x", expert_of_slot=None, generation=1)
        harness.say(one, lost)
    harness.tick(WAIT_S)
    assert late.epoch < harness.pool.roster.epoch
    assert "worker-1" in seated(harness)
    harness.say(worker, late)
    assert set(quarantined(harness)) == ({"worker-1"} if is_damaged else set())


def test_planning_goes_on_without_the_quarantined_worker(harness, skewed):
    damage(harness, "worker-1")
    harness.serve()
    settle(harness)
    out = harness.workers.pop("worker-1")
    harness.run_traffic(skewed(3), seconds=25)
    assert any(record.accepted for record in harness.decisions())
    for name, message in harness.sent:
        if isinstance(message, Stage):
            assert name != out.hello.worker
            for move in message.moves:
                assert move.checksum == expert_checksum(move.layer, move.expert)


def test_a_restart_with_good_bytes_ends_the_quarantine(harness):
    damage(harness, "worker-2")
    harness.serve()
    settle(harness)
    harness.lose(harness.workers["worker-2"])
    harness.workers["worker-2"] = ScriptedWorker(hello_of_worker("worker-2", boot_id="boot-2"))
    harness.hello(harness.workers["worker-2"].hello)
    assert not quarantined(harness)
    settle(harness, seconds=30)
    assert seated(harness) == sorted(harness.workers)
    assert harness.pool.diagnosis().health is Health.SERVING


def test_a_new_stream_of_the_same_process_does_not_end_it(harness):
    bad = damage(harness, "worker-2")
    harness.serve()
    settle(harness)
    harness.lose(bad)
    harness.hello(bad.hello)
    settle(harness, seconds=60)
    assert "worker-2" in quarantined(harness)
    assert "worker-2" not in seated(harness)


def test_a_balancer_that_restarts_finds_the_wrong_bytes_again(harness, make_harness):
    bad = damage(harness, "worker-2")
    harness.assemble()
    again = make_harness()
    again.workers = harness.workers
    for worker in harness.ranks:
        again.hello(worker.reconnecting())
    assert list(quarantined(again)) == ["worker-2"]
    settle(again)
    assert bad.hello.worker not in seated(again)


def test_a_rank_0_that_makes_up_a_table_is_quarantined_itself(harness):
    harness.assemble()
    liar, *others = harness.ranks
    table = expert_table(MODEL).copy()
    table[1, 7, 0] ^= 1
    harness.say(liar, dataclasses.replace(liar.serving(), expert_checksums=table))
    for worker in others:
        harness.say(worker, worker.serving())
    assert list(quarantined(harness)) == [liar.hello.worker]
    settle(harness)
    assert harness.pool.verification.complete
    assert np.array_equal(harness.pool.verification.table, expert_table(MODEL))


def test_a_byte_that_changes_later_is_seen_at_the_next_report(serving_harness):
    harness = serving_harness
    worker = harness.workers["worker-2"]
    changed = worker.checksums()
    changed[0, 4, 15] ^= 1
    expert = int(worker.own(worker.layout.expert_of_slot)[0, 4])
    harness.say(worker, dataclasses.replace(worker.serving(), checksums=changed))
    reason = quarantined(harness)["worker-2"].reason
    assert f"slot {SLOTS * worker.rank + 4} of layer 0, for expert {expert}" in reason


def test_a_pool_that_needs_the_quarantined_worker_serves_on_and_says_so(make_harness):
    harness = make_harness()  # 4 x 10 slots
    bad = damage(harness, "worker-1")
    harness.serve()
    settle(harness)
    diagnosis = harness.pool.diagnosis()
    assert diagnosis.health is Health.DEGRADED
    assert diagnosis.reason.startswith(
        "all ranks serve on, perhaps with wrong experts: the 3 workers that are not quarantined "
        "do not suffice (30 slots cannot hold 32 experts: 4 workers are needed); "
        "worker-1 is quarantined: "
    )
    harness.lose(bad)
    harness.disconnected.add("worker-1")
    del harness.workers["worker-1"]
    for worker in harness.ranks:
        lost = worker.own(worker.layout.expert_of_slot)
        harness.say(worker, GroupLost(epoch=1, reason="a peer left", expert_of_slot=lost))
    diagnosis = harness.pool.diagnosis()
    assert diagnosis.health is Health.DOWN
    assert "cannot hold 32 experts: 4 workers are needed" in diagnosis.reason


# Workers with another checkpoint -----------------------------------------------------------------


class OtherWorker(ScriptedWorker):
    """A worker with a checkpoint of its own."""

    def __init__(self, name, **changes):
        changes = {"checkpoint_fingerprint": "def", **changes}
        changes |= {"experts_digest": checksums_digest(expert_table(MODEL) ^ 1)}
        super().__init__(hello_of_worker(name, **changes))

    def checksums(self):
        return super().checksums() ^ 1

    def expert_checksums(self):
        return None if self.rank else expert_table(MODEL) ^ 1


@pytest.mark.parametrize("comes_first", [True, False])
def test_the_odd_one_of_four_is_quarantined_whenever_it_comes(harness, comes_first):
    odd = OtherWorker("worker-0")
    good = [harness.workers[f"worker-{number}"] for number in (1, 2, 3)]
    harness.workers["worker-0"] = odd
    for worker in [odd, *good] if comes_first else [*good, odd]:
        harness.hello(worker.hello)
    experts = [one.hello.experts_digest.hex() for one in (odd, good[0])]
    assert (
        f"its checkpoint is def with experts {experts[0]}, but 3 workers of the pool have abc with "
        f"experts {experts[1]}"
    ) in quarantined(harness)["worker-0"].reason
    settle(harness, seconds=WAIT_S)
    assert seated(harness) == ["worker-1", "worker-2", "worker-3"]
    assert harness.pool.agreement.is_settled
    (rejection,) = harness.sent_to("worker-0", Rejection)
    assert not rejection.fatal
    assert "is quarantined: its checkpoint is def" in rejection.reason


def test_the_words_tell_checkpoints_apart_that_share_a_fingerprint(harness):
    """Manifests may differ in tables that the fingerprint leaves out."""
    harness.workers["worker-0"] = OtherWorker("worker-0", checkpoint_fingerprint="abc")
    harness.assemble()
    is_it, has_pool = quarantined(harness)["worker-0"].reason.split(", but 3 workers of the pool ")
    assert is_it.removeprefix("its checkpoint is ") not in has_pool


def test_two_against_two_open_nothing_until_it_is_decided(harness):
    for name in ("worker-2", "worker-3"):
        harness.workers[name] = OtherWorker(name)
    harness.assemble()
    settle(harness, seconds=WAIT_S)
    assert harness.pool.roster.epoch == 0
    diagnosis = harness.pool.diagnosis()
    assert diagnosis.health is Health.WAITING
    assert "none of them the majority" in diagnosis.reason
    harness.lose(harness.workers["worker-3"])
    harness.workers["worker-3"] = ScriptedWorker(hello_of_worker("worker-3", boot_id="boot-2"))
    harness.hello(harness.workers["worker-3"].hello)
    assert list(quarantined(harness)) == ["worker-2"]
    assert "but 3 workers of the pool have abc" in quarantined(harness)["worker-2"].reason
    settle(harness, seconds=WAIT_S)
    assert seated(harness) == ["worker-0", "worker-1", "worker-3"]


def test_a_reason_names_the_majority_of_now(serving_harness):
    """Of four that outvoted a newcomer, one goes."""
    harness = serving_harness
    odd = OtherWorker("worker-9")
    harness.hello(odd.hello)
    assert "but 4 workers of the pool have abc" in quarantined(harness)["worker-9"].reason
    harness.lose(harness.workers["worker-3"])
    (shown,) = quarantined(harness).values()
    assert "but 3 workers of the pool have abc" in shown.reason
    assert "but 3 workers of the pool have abc" in harness.pool.diagnosis().reason


def test_a_serving_epoch_is_not_outvoted_by_newcomers(serving_harness):
    for number in range(4, 14):
        name = f"worker-{number}"
        serving_harness.workers[name] = OtherWorker(name)
        serving_harness.hello(serving_harness.workers[name].hello)
    settle(serving_harness, seconds=60)
    assert seated(serving_harness) == [f"worker-{number}" for number in range(4)]
    assert len(quarantined(serving_harness)) == 10


def test_once_the_group_is_lost_the_majority_decides(serving_harness):
    """Three of four were restarted with the good checkpoint: the damaged one does not bar them."""
    harness = serving_harness
    for number in (1, 2, 3):
        name = f"worker-{number}"
        harness.lose(harness.workers[name])
        harness.workers[name] = OtherWorker(name, boot_id="boot-2")
    old = harness.workers["worker-0"]
    harness.say(old, GroupLost(epoch=1, reason="peers left", expert_of_slot=None, generation=1))
    for number in (1, 2, 3):
        harness.hello(harness.workers[f"worker-{number}"].hello)
    settle(harness, seconds=WAIT_S)
    assert list(quarantined(harness)) == ["worker-0"]
    assert seated(harness) == ["worker-1", "worker-2", "worker-3"]
    assert harness.pool.agreement.is_settled


@pytest.mark.parametrize("damaged", [2, 3])
def test_nobody_is_quarantined_in_place_of_a_rank_that_is_gone(make_harness, damaged):
    """Its wrong bytes are noted, and compared once rank 0 has sent the table of checksums."""
    harness = make_harness(num_ranks=4)
    harness.assemble()
    wrong = harness.ranks[damaged]
    checksums = wrong.serving().checksums.copy()
    checksums[0, 0] ^= 1
    harness.say(wrong, dataclasses.replace(wrong.serving(), checksums=checksums))
    for worker in harness.ranks[1:]:
        if worker is not wrong:
            harness.say(worker, worker.serving())
    harness.lose(wrong)
    harness.disconnected.add(wrong.hello.worker)
    harness.hello(dataclasses.replace(wrong.hello, boot_id="another process of its name"))
    harness.say(harness.ranks[0], harness.ranks[0].serving())
    assert not harness.pool.quarantine.workers
