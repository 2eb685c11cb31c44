"""Orders in which micro-batches take turns, and steps that are cut into them."""

from collections import Counter
from itertools import pairwise

import pytest

from equipoise_model.overlap import Order, Stage, finish, run_in_turns, turns

SENDING = {Stage.SENT: "D", Stage.COMPUTED: "C"}


def words(order, *, num_layers):
    """The exchanges in the order in which they begin, as "DA CA"."""
    ordered = turns(order, num_batches=2, num_layers=num_layers)
    return " ".join(SENDING[stage] + "AB"[batch] for batch, stage in ordered if stage in SENDING)


def test_prefill_sends_both_micro_batches_rows_before_outputs():
    assert words(Order.PREFILL, num_layers=2) == "DA DB CA CB DA DB CA CB"


def test_decode_has_one_exchange_open_at_a_time():
    assert words(Order.DECODE, num_layers=2) == "DA CA DB CB DA CA DB CB"
    is_open = set()
    for batch, stage in turns(Order.DECODE, num_batches=2, num_layers=5):
        # An exchange that a stage waits for ends before the stage begins its own.
        if stage in (Stage.COMPUTED, Stage.COMBINED):
            is_open.discard(batch)
        if stage in SENDING:
            assert not is_open
            is_open.add(batch)


def test_decode_computes_attention_in_two_halves_beside_the_other_ones_exchanges():
    ordered = turns(Order.DECODE, num_batches=2, num_layers=3)
    following = dict(pairwise(ordered))
    assert following[0, Stage.SENT] == (1, Stage.PROJECTED)
    assert following[0, Stage.COMPUTED] == (1, Stage.ROUTED)


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("num_batches", [1, 2])
def test_every_stage_runs_once_in_order_and_the_first_micro_batch_leads(order, num_batches):
    ordered = turns(order, num_batches=num_batches, num_layers=4)
    assert set(Counter(batch for batch, _ in ordered).values()) == {20}
    done = Counter()
    for batch, stage in ordered:
        assert stage == done[batch] % len(Stage)
        done[batch] += 1
        # The second one's attention reads latents that the first one stored in the stage before.
        assert done[0] >= done[1] or num_batches == 1


def counting(name, num_layers, log):
    for layer in range(num_layers):
        for stage in Stage:
            log.append((name, layer, stage))
            yield stage
    log.append((name, "end"))
    return name


@pytest.mark.parametrize("order", Order)
def test_micro_batches_run_in_turns_to_their_ends(order):
    log = []
    batches = [counting(name, 3, log) for name in "AB"]
    assert run_in_turns(batches, order=order, num_layers=3) == ["A", "B"]
    assert log[-2:] == [("A", "end"), ("B", "end")]
    seen = [("AB".index(name), stage) for name, _, stage in log[:-2]]
    assert tuple(seen) == turns(order, num_batches=2, num_layers=3)


def test_a_micro_batch_alone_runs_without_a_pause():
    log = []
    assert finish(counting("A", 2, log)) == "A"
    assert len(log) == 2 * len(Stage) + 1
