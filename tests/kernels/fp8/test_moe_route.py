import pytest
import torch

from equipoise_kernels.errors import KernelInputError
from equipoise_kernels.fp8.moe.route import (
    RouteConfig,
    route_reference,
    route_to_slots,
    route_triton,
)
from equipoise_kernels.fp8.moe.routes import Routes, RoutingRule, SlotTables
from equipoise_kernels.replica_choice import SHARE_BITS
from tests.support.guarded_tensors import guarded

CONFIG = RouteConfig(num_warps=1)
RULE = RoutingRule(num_experts=16, num_groups=4, top_groups=2, top_k=3, normalize=True, scale=2.5)
# Groups that are no power of two, one group, one choice, all choices.
RULES = [
    RULE,
    RoutingRule(num_experts=18, num_groups=3, top_groups=2, top_k=4, normalize=True, scale=1.5),
    RoutingRule(num_experts=5, num_groups=1, top_groups=1, top_k=5, normalize=False, scale=1.0),
    RoutingRule(num_experts=8, num_groups=4, top_groups=3, top_k=1, normalize=True, scale=1.0),
    # A shared expert, as the first of more padded choices and within them.
    RoutingRule(
        num_experts=8, num_groups=2, top_groups=1, top_k=2, normalize=True, scale=2.5, shared=True
    ),
    RoutingRule(
        num_experts=6, num_groups=1, top_groups=1, top_k=3, normalize=True, scale=2.5, shared=True
    ),
]
BACKENDS = {
    "reference": route_reference,
    "triton": lambda *args, **kwargs: route_triton(*args, config=CONFIG, **kwargs),
}


def tables(num_experts, generator, *, max_replicas=3, with_shares=False):
    count = torch.randint(1, max_replicas + 1, (num_experts,), generator=generator)
    used = torch.arange(max_replicas) < count.unsqueeze(1)
    slots = torch.full((num_experts, max_replicas), -1)
    slots[used] = torch.randperm(int(count.sum()), generator=generator)
    if not with_shares:
        return SlotTables(slots_of_expert_ER=slots, replica_count_E=count)
    parts = torch.rand(num_experts, max_replicas, generator=generator) * used
    ends = (parts.cumsum(1) / parts.sum(1, keepdim=True) * (1 << SHARE_BITS)).to(torch.int64)
    ends[torch.arange(max_replicas) >= count.unsqueeze(1) - 1] = 1 << SHARE_BITS
    return SlotTables(slots_of_expert_ER=slots, replica_count_E=count, share_ends_ER=ends)


def routed(backend, logits, bias, *, rule, tables, layer=3, num_valid=None, first_token=1000):
    out = guarded_routes(len(logits), rule.num_choices)
    rows = torch.zeros(int(tables.replica_count_E.sum()), dtype=torch.int64)
    BACKENDS[backend](
        logits,
        bias,
        rule=rule,
        tables=tables,
        token_ids_T=torch.arange(first_token, first_token + len(logits)),
        layer=layer,
        rows_S=rows,
        num_valid=None if num_valid is None else torch.tensor([num_valid], dtype=torch.int32),
        out=Routes(**{name: tensor.view for name, tensor in out.items()}),
    )
    assert all(tensor.guard_is_intact() for tensor in out.values())
    return *(tensor.view for tensor in out.values()), rows


def guarded_routes(num_rows, top_k):
    return {
        "expert_ids_TK": guarded((num_rows, top_k), torch.int64),
        "slots_TK": guarded((num_rows, top_k), torch.int64),
        "weights_TK": guarded((num_rows, top_k), torch.float32),
    }


def same(seen, wanted):
    for kernel, reference in zip(seen, wanted, strict=True):
        if kernel.dtype is torch.float32:
            torch.testing.assert_close(kernel, reference, rtol=1e-6, atol=0, equal_nan=True)
        else:
            assert torch.equal(kernel, reference)


@pytest.mark.parametrize("with_shares", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_the_kernel_chooses_weighs_and_counts_as_the_reference(
    rule, with_shares, generator, interpreted
):
    logits = torch.randn(6, rule.num_experts, generator=generator)
    bias = torch.randn(rule.num_experts, generator=generator) - 1
    layout = tables(rule.num_placed, generator, with_shares=with_shares)
    both = [
        routed(backend, logits, bias, rule=rule, tables=layout, num_valid=5) for backend in BACKENDS
    ]
    same(*both)
    ids, slots, weights, rows = both[1]
    assert (ids[5] == -1).all()
    assert (slots[5] == -1).all()
    assert (weights[5] == 0).all()
    assert int(rows.sum()) == 5 * rule.num_choices
    if rule.shared:
        assert (ids[:5, -1] == rule.num_experts).all()
        assert (weights[:5, -1] == 1).all()
    assert all(slots[t, k] in layout.slots_of_expert_ER[ids[t, k]] for t, k in ((0, 0), (4, -1)))


@pytest.mark.parametrize("first_token", [0, 2**50])
def test_replicas_share_an_expert_in_the_kernel_as_in_the_reference(
    first_token, generator, interpreted
):
    rule = RoutingRule(
        num_experts=4, num_groups=1, top_groups=1, top_k=1, normalize=True, scale=1.0
    )
    logits = torch.tensor([0.0, 3.0, 0.0, 0.0]).expand(24, 4).contiguous()
    ends = torch.tensor([[8192, 8192, 32768]]).expand(4, 3).contiguous()
    layout = SlotTables(
        slots_of_expert_ER=torch.arange(12).view(4, 3),
        replica_count_E=torch.full((4,), 3),
        share_ends_ER=ends,
    )
    both = [
        routed(b, logits, torch.zeros(4), rule=rule, tables=layout, first_token=first_token)
        for b in BACKENDS
    ]
    same(*both)
    _, _, _, rows = both[1]
    first, none, rest = rows[3:6].tolist()
    assert none == 0
    assert first + rest == 24
    assert abs(first - 6) <= 2


def test_the_lower_expert_and_group_win_among_equals(interpreted):
    logits = torch.zeros(2, 16)
    logits[1, 9] = 1.0
    layout = SlotTables(
        slots_of_expert_ER=torch.arange(16).view(16, 1),
        replica_count_E=torch.ones(16, dtype=torch.int64),
    )
    for backend in BACKENDS:
        ids, *_ = routed(backend, logits, torch.zeros(16), rule=RULE, tables=layout)
        assert ids.tolist() == [[0, 1, 2], [9, 0, 1]]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_nan_is_chosen_last_and_only_without_alternatives(generator, interpreted):
    logits = torch.randn(3, 16, generator=generator)
    logits[0, 4:8] = float("nan")
    logits[1] = float("nan")
    bias = torch.zeros(16)
    bias[8:] = float("-inf")
    layout = tables(16, generator)
    both = [routed(backend, logits, bias, rule=RULE, tables=layout) for backend in BACKENDS]
    same(*both)
    ids, _, weights, _ = both[1]
    assert not weights[0].isnan().any()
    assert set(ids[0].tolist()) < {0, 1, 2, 3}
    assert weights[1].isnan().all()
    assert ids[1].tolist() == [0, 1, 2]


def test_a_layout_that_names_slots_and_replicas_that_are_not_there_writes_nothing_outside(
    generator, interpreted
):
    logits = torch.randn(4, 16, generator=generator)
    storage = torch.full((24,), -1)
    counters = storage[8:16]
    counters.zero_()
    slots = torch.full((16, 1), 10_000)
    slots[::2, 0] = torch.arange(8)
    route_triton(
        logits,
        torch.zeros(16),
        rule=RULE,
        tables=SlotTables(slots_of_expert_ER=slots, replica_count_E=torch.full((16,), 2**20)),
        token_ids_T=torch.arange(4),
        layer=1,
        rows_S=counters,
        num_valid=None,
        out=Routes(**{n: t.view for n, t in guarded_routes(4, 3).items()}),
        config=CONFIG,
    )
    assert (storage[:8] == -1).all()
    assert (storage[16:] == -1).all()
    assert counters.sum() <= 12


def test_rows_may_be_none_or_lie_apart_and_the_committed_configuration_serves(
    generator, interpreted
):
    layout = tables(16, generator)
    wide = torch.randn(3, 40, generator=generator)
    bias = torch.randn(16, generator=generator)
    seen, wanted = (
        {
            "logits_TE": wide[:, :16] if backend == "triton" else wide[:, :16].contiguous(),
            "out": Routes(**{n: t.view for n, t in guarded_routes(3, 3).items()}),
        }
        for backend in BACKENDS
    )
    for run, arguments in ((route_triton, seen), (route_reference, wanted)):
        run(
            **arguments,
            bias_E=bias,
            rule=RULE,
            tables=layout,
            token_ids_T=torch.arange(3),
            layer=0,
            rows_S=None,
            num_valid=None,
        )
    assert torch.equal(seen["out"].slots_TK, wanted["out"].slots_TK)
    none = route_to_slots(
        wide[:0, :16], bias, rule=RULE, tables=layout, token_ids_T=torch.arange(0), layer=0
    )
    assert none.slots_TK.shape == (0, 3)


GOOD = {"num_experts": 16, "num_groups": 4, "top_groups": 2, "top_k": 3}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_groups": 0}, "groups <= experts"),
        ({"num_groups": 3}, "equal groups"),
        ({"top_groups": 5}, "top_groups <= groups"),
        ({"num_groups": 16}, "2 experts each"),
        ({"top_k": 9}, "cannot have 9"),
    ],
)
def test_a_rule_that_contradicts_itself_is_rejected(change, named):
    with pytest.raises(KernelInputError, match=named):
        RoutingRule(**GOOD | change, normalize=True, scale=1.0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"logits_TE": torch.zeros(2, 16, dtype=torch.bfloat16)}, "logits must be float32"),
        ({"logits_TE": torch.zeros(2, 12)}, r"logits must be \[2, 16\]"),
        ({"logits_TE": torch.zeros(16)}, r"logits must be \[T, E\]"),
        ({"bias_E": torch.zeros(15)}, "bias must be"),
        ({"token_ids_T": torch.arange(3)}, "token_ids must be"),
        ({"token_ids_T": torch.arange(4)[::2]}, "token_ids must be contiguous"),
        ({"rows_S": torch.zeros(16, dtype=torch.int32)}, "rows must be int64"),
        ({"num_valid": torch.zeros(2, dtype=torch.int32)}, "num_valid must be"),
        ({"out": Routes(expert_ids_TK=torch.zeros(2, 4, dtype=torch.int64),
                        slots_TK=torch.zeros(2, 4, dtype=torch.int64),
                        weights_TK=torch.zeros(2, 4))}, "out must be"),
    ],
)  # fmt: skip
def test_inputs_that_break_the_contract_are_rejected_by_name(change, named):
    good = {
        "logits_TE": torch.zeros(2, 16),
        "bias_E": torch.zeros(16),
        "token_ids_T": torch.arange(2),
    }
    layout = SlotTables(
        slots_of_expert_ER=torch.arange(16).view(16, 1),
        replica_count_E=torch.ones(16, dtype=torch.int64),
    )
    with pytest.raises(KernelInputError, match=named):
        route_to_slots(**good | change, rule=RULE, tables=layout, layer=0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"slots_of_expert_ER": torch.zeros(4, dtype=torch.int64)}, r"\[E, R\]"),
        ({"slots_of_expert_ER": torch.zeros(4, 2, dtype=torch.int32)}, "int64"),
        ({"replica_count_E": torch.ones(3, dtype=torch.int64)}, "replica_count must be"),
        ({"share_ends_ER": torch.ones(4, 3, dtype=torch.int64)}, "share_ends must be"),
    ],
)
def test_tables_that_do_not_belong_together_are_rejected(change, named):
    good = {
        "slots_of_expert_ER": torch.zeros(4, 2, dtype=torch.int64),
        "replica_count_E": torch.ones(4, dtype=torch.int64),
    }
    with pytest.raises(KernelInputError, match=named):
        SlotTables(**good | change)
