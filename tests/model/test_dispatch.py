import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from equipoise_model.dispatch import ExpertParallel
from equipoise_model.exchange import RowExchange
from equipoise_model.experts import StagedExperts
from equipoise_model.overlap import Order, finish
from equipoise_model.placement import PlacementTables
from equipoise_model.plain.experts import ExpertSlots
from equipoise_model.plain.router import Routing
from tests.support.small_models import MOE_LAYERS as CONFIG

NUM_LAYERS, NUM_EXPERTS, TOP_K = 2, 16, 4


def random_layout(seed, *, num_slots=24):
    rng = np.random.default_rng(seed)
    extra = rng.integers(0, NUM_EXPERTS, (NUM_LAYERS, num_slots - NUM_EXPERTS))
    rows = [rng.permutation(np.concatenate([np.arange(NUM_EXPERTS), row])) for row in extra]
    return np.array(rows)


@pytest.fixture(scope="module")
def payloads():
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_LAYERS, NUM_EXPERTS, CONFIG.expert_bytes // 2)
    values = torch.randn(shape, generator=generator) / 6
    return values.to(torch.bfloat16).view(torch.uint8)


def make_layers(payloads, layout, *, row_block):
    layers = []
    for layer, row in enumerate(layout):
        slots = ExpertSlots(
            CONFIG.hidden_size,
            CONFIG.moe_intermediate_size,
            num_slots=len(row),
            row_block=row_block,
        )
        for slot, expert in enumerate(row):
            slots.write(slot, payloads[layer, expert])
        layers.append(slots)
    return layers


def make_routing(num_tokens, *, seed=0, experts=None):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, NUM_EXPERTS, generator=generator)
    ids = scores.topk(TOP_K).indices
    if experts is not None:
        ids = torch.tensor(experts).expand(num_tokens, TOP_K)
    return Routing(expert_ids_TK=ids, weights_TK=scores.gather(1, ids), scores_TE=scores)


def make_rows(num_tokens):
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randn(num_tokens, CONFIG.hidden_size, generator=generator)


def run(ep, layers, x, routing):
    step = ep.begin_step(num_tokens=len(x))
    return torch.stack([finish(step.stages(x, routing, experts)) for experts in layers])


def parallel(layout, generation=1):
    placement = PlacementTables.from_layout(layout, num_experts=NUM_EXPERTS, generation=generation)
    return ExpertParallel.local(CONFIG, placement)


def identity():
    return np.tile(np.arange(NUM_EXPERTS), (NUM_LAYERS, 1))


def test_dispatch_equals_a_loop_over_rows_and_their_experts(payloads):
    layers = make_layers(payloads, identity(), row_block=None)
    x, routing = make_rows(9), make_routing(9)
    y = run(ExpertParallel.local(CONFIG), layers, x, routing)
    for layer, experts in enumerate(layers):
        for row in range(9):
            naive = torch.zeros(CONFIG.hidden_size)
            for expert, weight in zip(
                routing.expert_ids_TK[row], routing.weights_TK[row], strict=True
            ):
                counts = [int(slot == expert) for slot in range(NUM_EXPERTS)]
                naive += weight * experts(x[row : row + 1], counts)[0]
            torch.testing.assert_close(y[layer, row], naive, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_tokens", [1, 8, 33])
def test_any_layout_matches_the_identity_layout_bit_by_bit_in_row_blocks(
    payloads, seed, num_tokens
):
    x, routing = make_rows(num_tokens), make_routing(num_tokens)
    expected = run(
        ExpertParallel.local(CONFIG), make_layers(payloads, identity(), row_block=16), x, routing
    )
    layout = random_layout(seed)
    seen = run(parallel(layout), make_layers(payloads, layout, row_block=16), x, routing)
    assert torch.equal(seen, expected)


def test_slots_get_the_shares_of_their_expert_and_no_bit_changes(payloads):
    layout = np.tile(np.r_[np.arange(NUM_EXPERTS), [0, 0, 1]], (NUM_LAYERS, 1))
    shares = np.full(layout.shape, 1 << 15)
    shares[:, [0, 16, 17]], shares[:, [1, 18]] = [20_000, 0, 12_768], [32_000, 768]
    placement = PlacementTables.from_layout(
        layout, num_experts=NUM_EXPERTS, generation=2, share_of_slot=shares
    )
    weighted = ExpertParallel.local(CONFIG, placement)
    layers = make_layers(payloads, layout, row_block=16)
    plain_layers = make_layers(payloads, identity(), row_block=16)
    for seed in range(40):
        x, routing = make_rows(25), make_routing(25, seed=seed, experts=[0, 1, 2, 3])
        plain = run(ExpertParallel.local(CONFIG), plain_layers, x, routing)
        assert torch.equal(run(weighted, layers, x, routing), plain)
    rows = weighted.loads()[0].slot_load_LS
    for layer in range(NUM_LAYERS):
        # 1,000 tokens; the sequence is off by a few of them, whatever the batches were.
        np.testing.assert_allclose(rows[layer, [0, 16, 17]], [610, 0, 390], atol=8)
        np.testing.assert_allclose(rows[layer, [1, 18]], [977, 23], atol=8)


@pytest.mark.parametrize("seed", range(4))
def test_any_layout_is_close_to_the_identity_layout_in_fast_mode(payloads, seed):
    x, routing = make_rows(33), make_routing(33)
    expected = run(
        ExpertParallel.local(CONFIG), make_layers(payloads, identity(), row_block=None), x, routing
    )
    layout = random_layout(seed)
    seen = run(parallel(layout), make_layers(payloads, layout, row_block=None), x, routing)
    torch.testing.assert_close(seen, expected, atol=1e-5, rtol=1e-5)


def test_a_rows_result_does_not_depend_on_its_batch_in_row_blocks(payloads):
    layers = make_layers(payloads, identity(), row_block=16)
    x, routing = make_rows(20), make_routing(20)
    whole = run(ExpertParallel.local(CONFIG), layers, x, routing)
    for row in range(20):
        part = Routing(*(tensor[row : row + 1] for tensor in routing))
        alone = run(ExpertParallel.local(CONFIG), layers, x[row : row + 1], part)
        assert torch.equal(alone[:, 0], whole[:, row])


def test_every_choice_of_every_row_is_counted_once_at_its_expert(payloads):
    layout = random_layout(1)
    ep, layers = parallel(layout), make_layers(payloads, layout, row_block=16)
    expected = np.zeros((NUM_LAYERS, NUM_EXPERTS), dtype=np.int64)
    for step, num_tokens in enumerate([5, 0, 17, 1]):
        routing = make_routing(num_tokens, seed=step)
        run(ep, layers, make_rows(num_tokens), routing)
        np.add.at(expected, (slice(None), routing.expert_ids_TK.flatten().numpy()), 1)
    (load,) = ep.loads()
    assert load.slot_load_LS.sum(axis=1).tolist() == [23 * TOP_K] * NUM_LAYERS
    by_expert = np.zeros_like(expected)
    for layer in range(NUM_LAYERS):
        np.add.at(by_expert[layer], layout[layer], load.slot_load_LS[layer])
    assert (by_expert == expected).all()


def test_no_row_is_dropped_when_all_choose_the_same_experts(payloads):
    layout = random_layout(2)
    ep, layers = parallel(layout), make_layers(payloads, layout, row_block=None)
    x, routing = make_rows(100), make_routing(100, experts=[3, 7, 1, 0])
    y = run(ep, layers, x, routing)
    alone = run(parallel(layout), layers, x[99:], Routing(*(tensor[99:] for tensor in routing)))
    torch.testing.assert_close(y[:, 99:], alone, atol=1e-5, rtol=1e-5)
    (load,) = ep.loads()
    for layer in range(NUM_LAYERS):
        for expert in (3, 7, 1, 0):
            assert load.slot_load_LS[layer][layout[layer] == expert].sum() == 100


def test_replicas_of_a_hot_expert_share_its_rows_evenly(payloads):
    layout = np.tile(np.concatenate([np.arange(NUM_EXPERTS), [5, 5, 5]]), (NUM_LAYERS, 1))
    ep, layers = parallel(layout), make_layers(payloads, layout, row_block=None)
    for _ in range(50):
        run(ep, layers, make_rows(8), make_routing(8, experts=[5, 1, 2, 3]))
    (load,) = ep.loads()
    of_five = load.slot_load_LS[:, layout[0] == 5]
    assert of_five.sum(axis=1).tolist() == [400, 400]
    assert of_five.min() >= 97
    assert of_five.max() <= 103


def test_a_switch_in_the_middle_changes_no_bit_and_starts_a_count_of_its_own(payloads):
    first, second = random_layout(3), random_layout(4)
    x, routing = make_rows(12), make_routing(12)
    ep, layers = parallel(first), make_layers(payloads, first, row_block=16)
    before = run(ep, layers, x, routing)
    moves = {
        (layer, slot): payloads[layer, second[layer, slot]]
        for layer, slot in np.argwhere(first != second).tolist()
    }
    staged = StagedExperts.prepare(moves, layers)
    placement = PlacementTables.from_layout(second, num_experts=NUM_EXPERTS, generation=2)
    while_staged = run(ep, layers, x, routing)
    staged.apply()
    ep.switch(placement)
    after = run(ep, layers, x, routing)
    assert torch.equal(before, while_staged)
    assert torch.equal(before, after)
    new, old = ep.loads()
    assert (new.generation, old.generation) == (2, 1)
    assert new.slot_load_LS.sum(axis=1).tolist() == [12 * TOP_K] * NUM_LAYERS
    assert old.slot_load_LS.sum(axis=1).tolist() == [24 * TOP_K] * NUM_LAYERS


def test_loads_are_copies_that_later_steps_leave_alone(payloads):
    ep, layers = ExpertParallel.local(CONFIG), make_layers(payloads, identity(), row_block=None)
    run(ep, layers, make_rows(3), make_routing(3))
    (load,) = ep.loads()
    run(ep, layers, make_rows(3), make_routing(3))
    assert load.slot_load_LS.sum() == 3 * TOP_K * NUM_LAYERS


def test_gradients_reach_rows_weights_and_only_the_chosen_experts(payloads):
    layers = make_layers(payloads, identity(), row_block=None)[:1]
    x, routing = make_rows(6).requires_grad_(), make_routing(6, experts=[2, 9, 4, 11])
    weights = routing.weights_TK.clone().requires_grad_()
    run(
        ExpertParallel.local(CONFIG), layers, x, routing._replace(weights_TK=weights)
    ).sum().backward()
    assert x.grad.abs().sum() > 0
    assert weights.grad.abs().min() > 0
    touched = layers[0].down.grad.abs().sum(dim=(1, 2)).nonzero().flatten()
    assert touched.tolist() == [2, 4, 9, 11]


def test_a_placement_of_another_shape_cannot_be_switched_to():
    ep = ExpertParallel.local(CONFIG)
    with pytest.raises(AssertionError):
        ep.switch(
            PlacementTables.from_layout(random_layout(0), num_experts=NUM_EXPERTS, generation=2)
        )


def test_paced_experts_take_at_least_their_pace_and_give_the_same_bits(payloads):
    layers = make_layers(payloads, identity(), row_block=None)
    x, routing = make_rows(10), make_routing(10)
    expected = run(ExpertParallel.local(CONFIG), layers, x, routing)
    began = time.perf_counter()
    paced = run(ExpertParallel.local(CONFIG, pace_s_per_row=0.002), layers, x, routing)
    assert time.perf_counter() - began >= NUM_LAYERS * 10 * TOP_K * 0.002
    assert torch.equal(paced, expected)


def test_experts_that_take_longer_than_their_pace_do_not_sleep(payloads, monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    layers = make_layers(payloads, identity(), row_block=None)
    ep = ExpertParallel.local(CONFIG, pace_s_per_row=1e-12)
    run(ep, layers, make_rows(10), make_routing(10))
    assert slept == [0.0] * NUM_LAYERS


@pytest.mark.parametrize(("overlaps", "order"), [(True, Order.PREFILL), (False, Order.DECODE)])
def test_micro_batches_never_have_two_exchanges_open_where_only_one_may_be(overlaps, order):
    placement = PlacementTables.from_layout(
        [list(range(NUM_EXPERTS))] * NUM_LAYERS, num_experts=NUM_EXPERTS, num_ranks=2
    )
    here = ExpertParallel(
        placement,
        ranks=RowExchange(group=object(), rank=0, count=2),
        exchange=SimpleNamespace(overlaps=overlaps),
        order=Order.PREFILL,
    )
    here.agree([[2, 2], [1, 2]])
    assert here.begin_step(num_tokens=3).order is order
