import numpy as np
import pytest

from equipoise.formats.errors import FormatError
from equipoise.formats.expected import Expected
from equipoise.formats.placement import ExpertPlacement


def placed(rows, **facts):
    return ExpertPlacement(
        expert_of_slot=np.array(rows, dtype=np.int32), **{"num_experts": 2, **facts}
    )


@pytest.mark.parametrize(
    ("rows", "facts", "words"),
    [
        ([[0, 1], [0, 2]], {}, "layer 1, slot 1 holds expert 2, but experts are numbered 0 to 1"),
        ([[0, 1], [-2, 0]], {"first_moe_layer": 3}, "layer 4, slot 0 holds expert -2"),
        ([[0, 1], [1, 1]], {"first_moe_layer": 3}, "layer 4 has no slot for expert 0"),
        ([[0]], {}, "1 slots cannot hold 2 experts"),
        ([[0, 1, 1]], {"num_ranks": 2}, "3 slots do not divide evenly over 2 ranks"),
        ([[]], {}, r"there are no slots: the table has the shape \[1, 0\]"),
    ],
)
def test_a_table_that_no_pool_could_run_is_rejected(rows, facts, words):
    with pytest.raises(FormatError, match=words):
        placed(rows, **facts)


def test_an_expert_twice_on_a_rank_is_the_peers_business():
    assert placed([[0, 0, 1, 1]], num_ranks=2).num_slots == 4


@pytest.mark.parametrize(
    ("expected", "words"),
    [
        (Expected(num_experts=3), "it has 2 experts, expected 3"),
        (Expected(num_ranks=4), "it has 2 ranks, expected 4"),
        (Expected(num_layers=3), "it has 1 MoE layers, expected 3; .* set --first-moe-layer"),
        (Expected(first_moe_layer=1), "first MoE layer is layer 3 of the model, expected layer 1"),
    ],
)
def test_a_file_that_disagrees_is_rejected(expected, words):
    table = np.array([[0, 1]], dtype=np.int32)
    with pytest.raises(FormatError, match=words):
        expected.placement(table, num_experts=2, num_ranks=2, first_moe_layer=3)
