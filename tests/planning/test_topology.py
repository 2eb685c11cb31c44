import pytest

from equipoise.planning.topology import ModelShape, Topology


def test_slots_belong_to_ranks_in_order():
    topology = Topology(node_of_rank=("a", "a", "b"), slots_per_rank=4)
    assert topology.num_slots == 12
    assert topology.nodes == ("a", "b")


def test_ranks_may_own_unequal_numbers_of_slots():
    topology = Topology(node_of_rank=("a", "a", "b"), slots_per_rank=4, slots_of_rank=(2, 4, 3))
    assert topology.num_slots == 9
    assert topology.first_slot == (0, 2, 6, 9)
    assert not topology.has_equal_slots


def test_some_ranks_of_a_topology_keep_their_nodes_and_slots():
    topology = Topology(node_of_rank=("a", "a", "b"), slots_per_rank=4, slots_of_rank=(2, 4, 3))
    assert topology.only((0, 2)) == Topology(
        node_of_rank=("a", "b"), slots_per_rank=3, slots_of_rank=(2, 3)
    )


@pytest.mark.parametrize("slots_of_rank", [(2,), (2, 0), (2, 5)])
def test_slots_of_ranks_that_do_not_fit_are_rejected(slots_of_rank):
    with pytest.raises(ValueError, match="slots_"):
        Topology(node_of_rank=("a", "a"), slots_per_rank=4, slots_of_rank=slots_of_rank)


@pytest.mark.parametrize(("nodes", "slots"), [((), 1), (("a",), 0)])
def test_a_topology_has_ranks_with_slots(nodes, slots):
    with pytest.raises(ValueError, match="at least"):
        Topology(node_of_rank=nodes, slots_per_rank=slots)


def test_a_model_has_layers_experts_groups_and_bytes():
    with pytest.raises(ValueError, match="num_layers must be at least 1"):
        ModelShape(num_layers=0, num_experts=4, num_groups=2, expert_bytes=1)


def test_experts_divide_into_groups():
    with pytest.raises(ValueError, match="5 experts do not divide evenly into 2 groups"):
        ModelShape(num_layers=1, num_experts=5, num_groups=2, expert_bytes=1)
