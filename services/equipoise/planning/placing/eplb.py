"""The published expert-parallel load balancer: replicate hot experts, pack replicas on ranks.

Source of the idea: DeepSeek's Expert Parallelism Load Balancer (github.com/deepseek-ai/EPLB) and
the DeepSeek-V3 technical report, section 3.4. Written from the description. Placements equal those
of the published program, including an expert twice on one rank, which the planner repairs.
"""

import numpy as np

from equipoise.planning.arrays import ExpertTable, Indices, Load, Slots, Weights
from equipoise.planning.placing.compiled import compiled, part


def deal_groups(load: Load, *, num_groups: int, num_nodes: int) -> Indices:
    """Step 1: assign each node equally many groups of even load; int64 [layers, groups], by node.

    `load` is [layers, experts]; group g starts at expert g * experts / groups.
    """
    num_layers, num_experts = load.shape
    assert num_experts % num_groups == 0, "experts divide into groups"
    assert num_groups % num_nodes == 0, "groups divide over nodes"
    group_load = load.reshape(num_layers, num_groups, -1).sum(axis=2)
    room = np.full(num_nodes, num_groups // num_nodes, dtype=np.int64)
    return _pack_rows(np.ascontiguousarray(group_load, dtype=np.float64), room)


def place(load: Load, *, groups: Indices, num_nodes: int, slots_of_rank: Indices) -> ExpertTable:
    """Steps 2 and 3: replicate within each node, then pack its ranks; int32 [layers, slots].

    `groups` is [layers, groups], node by node, as `deal_groups` returns them. `slots_of_rank` is
    int64 [ranks]; nodes have equally many consecutive ranks and equally many slots in total. Ranks
    with unequal slots are an extension: the published program requires equal ones.
    """
    num_layers, num_experts = load.shape
    num_groups = groups.shape[1]
    assert len(slots_of_rank) % num_nodes == 0, "ranks divide over nodes"
    slots_of_node = slots_of_rank.reshape(num_nodes, -1).sum(axis=1)
    assert (slots_of_node == slots_of_node[0]).all(), "nodes have equally many slots"
    assert slots_of_node[0] * num_nodes >= num_experts, "every expert needs a slot"
    size = num_experts // num_groups
    experts: Indices = groups[:, :, None] * size + np.arange(size)
    experts_of_node = np.ascontiguousarray(experts.reshape(num_layers, num_nodes, -1))
    cells = experts_of_node + np.arange(num_layers)[:, None, None] * num_experts
    load_of_node: Weights = np.asarray(load, dtype=np.float64).ravel()[cells]
    return _place_layers(
        load_of_node,
        experts_of_node,
        _roughly_heaviest_first(load_of_node),
        np.ascontiguousarray(slots_of_rank.reshape(num_nodes, -1)),
    )


def _roughly_heaviest_first(weight: Weights) -> Indices:
    """Sort each row heaviest first; nearly equal weights may come in any order.

    Sorts integers made of the high bits of a weight and its index, which NumPy does many times
    faster than an argsort. They order like the weights, which must not be negative.
    """
    num_items = weight.shape[-1]
    low_bits = (1 << (num_items - 1).bit_length()) - 1
    keys = ~np.ascontiguousarray(weight).view(np.int64)
    keys &= ~low_bits
    keys |= np.arange(num_items)
    keys.sort(axis=-1)
    keys &= low_bits
    return keys


@compiled
def _place_layers(
    load_of_node: Weights, experts_of_node: Indices, heaviest_first: Indices, slots_of_rank: Indices
) -> Slots:
    """Replicate and pack; `slots_of_rank` is [nodes, ranks of the node], others as named above.

    `heaviest_first` may be approximate; it is corrected in place.
    """
    num_layers, num_nodes, _ = experts_of_node.shape
    num_slots = slots_of_rank[0].sum()
    table = np.empty((num_layers, num_nodes * num_slots), dtype=np.int32)
    for layer in range(num_layers):
        for node in range(num_nodes):
            load, order = load_of_node[layer, node], heaviest_first[layer, node]
            _correct(load, order)
            of_slot, share, num_replicas = _replicate(load, order, num_slots)
            packed = _pack(share, _with_replicas(order, share, num_replicas), slots_of_rank[node])
            for position in range(num_slots):
                expert = experts_of_node[layer, node, of_slot[packed[position]]]
                table[layer, node * num_slots + position] = expert
    return table


@compiled
def _pack_rows(weight: Weights, room: Indices) -> Indices:
    packed = np.empty(weight.shape, dtype=np.int64)
    for row in range(len(weight)):
        packed[row] = _pack(weight[row], np.argsort(-weight[row], kind="mergesort"), room)
    return packed


@part
def _correct(weight: Weights, order: Indices) -> None:
    """Correct an almost sorted order: heaviest first, ties by index (insertion sort)."""
    for place in range(1, len(order)):
        item, hole = order[place], place
        while hole > 0 and _goes_before(weight, item, order[hole - 1]):
            order[hole] = order[hole - 1]
            hole -= 1
        order[hole] = item


@part
def _goes_before(weight: Weights, item: int, other: int) -> bool:
    return weight[item] > weight[other] or (weight[item] == weight[other] and item < other)


@part
def _replicate(
    load: Weights, heaviest_first: Indices, num_slots: int
) -> tuple[Indices, Weights, Indices]:
    """Give every redundant slot to the expert with the most load per replica.

    Returns:
        experts [slots], each once in order, then the extra replicas in the order they were added;
        the load of each of these replicas, [slots]; and the replicas of each expert, [experts].
    """
    num_experts = len(load)
    of_slot = np.empty(num_slots, dtype=np.int64)
    num_replicas = np.ones(num_experts, dtype=np.int64)
    expert_at = heaviest_first.copy()
    key = -load[expert_at]  # Sorted, so already a heap.
    of_slot[:num_experts] = np.arange(num_experts)
    for slot in range(num_experts, num_slots):
        hottest = expert_at[0]
        of_slot[slot] = hottest
        num_replicas[hottest] += 1
        key[0] = -(load[hottest] / num_replicas[hottest])
        _sift_down(key, expert_at, num_experts)
    return of_slot, (load / num_replicas)[of_slot], num_replicas


@part
def _with_replicas(order: Indices, share: Weights, num_replicas: Indices) -> Indices:
    """Sort slots by share, heaviest first, [slots]; `order` has the experts by their whole load.

    Experts with one slot keep their order. Only the others are sorted, then merged in.
    """
    num_experts, num_slots = len(order), len(share)
    divided = np.empty(num_slots, dtype=np.int64)
    num_divided = 0
    for slot in range(num_slots):
        if slot >= num_experts or num_replicas[slot] > 1:
            divided[num_divided] = slot
            num_divided += 1
    divided = divided[:num_divided]
    divided = divided[np.argsort(-share[divided], kind="mergesort")]
    merged = np.empty(num_slots, dtype=np.int64)
    taken = 0
    end = 0
    for expert in order:
        if num_replicas[expert] > 1:
            continue
        while taken < num_divided and _goes_before(share, divided[taken], expert):
            merged[end] = divided[taken]
            taken += 1
            end += 1
        merged[end] = expert
        end += 1
    merged[end:] = divided[taken:]
    return merged


@part
def _pack(weight: Weights, heaviest_first: Indices, room: Indices) -> Indices:
    """Put items, heaviest first, into the lightest pack with room.

    `weight` is [items]; `room`, [packs], is the number of items each pack takes. Returns the items
    pack by pack, [items].
    """
    num_items, num_packs = len(weight), len(room)
    if room.max() == 1:  # Nothing to balance: keep the order.
        return np.arange(num_items)
    packed = np.empty(num_items, dtype=np.int64)
    position = np.zeros(num_packs, dtype=np.int64)
    position[1:] = np.cumsum(room)[:-1]
    left = room.copy()
    pack_weight = np.zeros(num_packs)
    pack_at = np.arange(num_packs)
    num_open = num_packs
    for item in heaviest_first:
        pack = pack_at[0]
        packed[position[pack]] = item
        position[pack] += 1
        left[pack] -= 1
        pack_weight[0] += weight[item]
        if left[pack] == 0:
            num_open -= 1
            pack_weight[0], pack_at[0] = pack_weight[num_open], pack_at[num_open]
        _sift_down(pack_weight, pack_at, num_open)
    return packed


@part
def _sift_down(key: Weights, index: Indices, size: int) -> None:
    """Restore a min-heap of (key, index) after its first entry grew."""
    hole, moving_key, moving_index = 0, key[0], index[0]
    while True:
        child = 2 * hole + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (
            key[right] < key[child] or (key[right] == key[child] and index[right] < index[child])
        ):
            child = right
        if moving_key < key[child] or (moving_key == key[child] and moving_index < index[child]):
            break
        key[hole], index[hole] = key[child], index[child]
        hole = child
    key[hole], index[hole] = moving_key, moving_index
