"""`equipoise whatif`: compare numbers of GPUs and of redundant slots for recorded loads."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.progress import MofNCompleteColumn
from rich.table import Table

from equipoise.cli.display import console, format_count, print_json, print_whole, progress_bar
from equipoise.cli.offline.inputs import Case, numbers, read_case
from equipoise.cli.offline.money import CostSettings
from equipoise.cli.offline.policies import policies_of
from equipoise.cli.offline.replay_run import replay
from equipoise.cli.offline.settings import WhatIfSettings
from equipoise.cli.offline.steps_table import StepBalance, StepPrice, show_steps
from equipoise.planning.layout import Layout
from equipoise.planning.places import Wishes, plan_in_places
from equipoise.planning.policy import Algorithm, Policy, SlotUse
from equipoise.planning.topology import Topology
from equipoise.settings.errors import InvalidSettingsError
from equipoise.settings.numbers import format_bytes

MAX_OPTIONS = 1000
MAX_TOKENS = 65_536
_GIB = 1024**3
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOption:
    """The gain and cost of one pool size."""

    num_ranks: int
    """GPUs."""

    num_nodes: int
    """Nodes."""

    num_slots: int
    """Physical slots per layer."""

    num_redundant: int
    """Redundant slots per layer; on average, if layers share places."""

    balancedness: float
    """Balancedness of one plan for all windows, measured on them."""

    balancedness_min_layer: float
    """The same for the worst layer."""

    bound: float
    """Upper bound of the balancedness."""

    memory_bytes: int
    """Bytes of experts per GPU."""

    displaced_tokens: int
    """Tokens that a GPU could cache instead of its redundant experts."""

    balancedness_replayed: float | None
    """Mean balancedness under the policy, without the first window; None with one window."""

    moves_per_hour: float | None
    """Moves under the policy; None with one window."""

    bytes_per_hour: float | None
    """Bytes moved under the policy; None with one window."""

    steps: tuple[StepBalance, ...] = ()
    """How even steps are, for each number of tokens."""

    @property
    def worth(self) -> float:
        """The balancedness to compare by: the replayed one if there is one."""
        replayed = self.balancedness_replayed
        return self.balancedness if replayed is None else replayed


def run(settings: WhatIfSettings) -> int:
    """Evaluate every pool size; print one row each and the recommendation.

    Raises:
        FormatError: a file is invalid.
        InvalidSettingsError: an option is invalid, or there are too many pools to evaluate.
        ModuleNotFoundError: steps are to be drawn and torch is missing.
    """
    case = read_case(settings.source)
    if settings.token_bytes is not None:
        case = replace(case, token_bytes=settings.token_bytes)
    options = _evaluated(settings, case)
    memory_bytes = None if settings.memory_gib is None else settings.memory_gib * _GIB
    chosen, reason = choose(options, tolerance=settings.tolerance, memory_bytes=memory_bytes)
    of_ranks = [knee(some, tolerance=settings.tolerance) for some in _by_ranks(options)]
    knees = [one for one in of_ranks if one is not None]
    price = StepPrice(assignment_us=settings.assignment_us, exchange_us=settings.exchange_us)
    if settings.json:
        document = {
            "choices": [_as_json(one, settings.cost) for one in options],
            "chosen": None if chosen is None else _as_json(chosen, settings.cost),
            "knees": [_as_json(one, settings.cost) for one in knees],
            "cost_basis": settings.cost.basis,
            "reason": reason,
            "steps": [
                {"num_ranks": one.num_ranks, "num_redundant": one.num_redundant}
                | price.as_json(step)
                for one in options
                for step in one.steps
            ],
            "expert_bytes": case.model.expert_bytes,
            "expert_bytes_origin": case.expert_bytes_origin,
            "token_bytes": case.token_bytes,
        }
        print_json(document)
    else:
        _show(options, chosen, knees, reason, case, cost=settings.cost)
        if settings.tokens_per_rank:
            show_steps([(one.num_ranks, one.num_redundant, one.steps) for one in options], price)
    return 0


def _as_json(option: PoolOption, cost: CostSettings) -> dict[str, Any]:
    lost = cost.lost_gpus(option.worth, num_ranks=option.num_ranks)
    price = cost.price_per_hour(lost)
    choice = asdict(option)
    del choice["steps"]
    return {**choice, "gpus_lost": lost, "price_lost_per_hour": price}


def topologies(
    num_experts: int, *, rank_counts: Sequence[int], ranks_per_node: int, max_redundant: int
) -> Iterator[Topology]:
    """Yield all pools to try: for each number of ranks, slots per rank up to `max_redundant`.

    The fewest slots that hold all experts are always included. A rank has at most one per expert.
    """
    for num_ranks in rank_counts:
        least = -(-num_experts // num_ranks)
        most = min(num_experts, max(least, (num_experts + max_redundant) // num_ranks))
        for slots_per_rank in range(least, most + 1):
            yield Topology(
                node_of_rank=_nodes(num_ranks, ranks_per_node), slots_per_rank=slots_per_rank
            )


def topologies_of_places(
    num_experts: int,
    *,
    num_layers: int,
    rank_counts: Sequence[int],
    ranks_per_node: int,
    max_redundant: int,
) -> Iterator[Topology]:
    """Yield all pools with shared places to try.

    Redundant slots per layer are 0, 1 and then twice as many, up to `max_redundant`, on average
    over layers. A rank has one slot more in each layer than the most memory has room for, and at
    most one per expert.
    """
    for num_ranks in rank_counts:
        limit = min(max_redundant, num_experts * (num_ranks - 1))
        redundant = [0, *(2**power for power in range(limit.bit_length()))]
        if limit > redundant[-1]:
            redundant.append(limit)
        most_places = (-(-num_layers * (num_experts + one) // num_ranks) for one in redundant)
        for places in dict.fromkeys(most_places):
            yield Topology(
                node_of_rank=_nodes(num_ranks, ranks_per_node),
                slots_per_rank=min(num_experts, -(-(num_experts + limit) // num_ranks) + 1),
                places_of_rank=(places,) * num_ranks,
            )


def _nodes(num_ranks: int, ranks_per_node: int) -> tuple[str, ...]:
    # Treat a pool that does not fill whole nodes as one node.
    on_nodes = num_ranks if num_ranks % ranks_per_node else ranks_per_node
    return tuple(f"node{rank // on_nodes}" for rank in range(num_ranks))


def evaluate(
    case: Case,
    *,
    topology: Topology,
    algorithm: Algorithm,
    policy: Policy,
    window_s: float,
    tokens_per_rank: Sequence[int] = (),
) -> PoolOption:
    """Compute the gain and cost of one pool."""
    recording, model = case.recording, case.model
    made = plan_in_places(
        recording.total(),
        Wishes(algorithm=algorithm, slots=policy.slots, weighted=policy.weighted),
        model=model,
        topology=topology,
        current=None,
    )
    balance, moves_per_hour = None, None
    start = Layout(
        generation=1,
        num_experts=model.num_experts,
        num_ranks=topology.num_ranks,
        expert_of_slot=made.expert_of_slot,
        share_of_slot=made.share_of_slot,
    )
    if recording.num_windows > 1:
        replayed = replay(
            recording,
            name="whatif",
            policy=policy,
            model=model,
            topology=topology,
            start=start,
            window_s=window_s,
        )
        later = replace(replayed, windows=replayed.windows[1:])
        balance = later.balancedness_mean if later.measured else None
        moves_per_hour = replayed.moves * _HOUR_S / (recording.num_windows * window_s)
    places = max(topology.places_of_rank, default=topology.slots_per_rank * model.num_layers)
    used = places * topology.num_ranks / model.num_layers
    redundant_bytes = (used - model.num_experts) * model.num_layers * model.expert_bytes
    return PoolOption(
        num_ranks=topology.num_ranks,
        num_nodes=len(topology.nodes),
        num_slots=int(used),
        num_redundant=int(used) - model.num_experts,
        balancedness=made.balancedness,
        balancedness_min_layer=float(made.balancedness_of_layer.min()),
        bound=made.bound,
        memory_bytes=places * model.expert_bytes,
        displaced_tokens=int(redundant_bytes / topology.num_ranks / case.token_bytes),
        balancedness_replayed=balance,
        moves_per_hour=moves_per_hour,
        bytes_per_hour=None if moves_per_hour is None else moves_per_hour * model.expert_bytes,
        steps=_steps(case, start, tokens_per_rank),
    )


def _steps(case: Case, layout: Layout, tokens_per_rank: Sequence[int]) -> tuple[StepBalance, ...]:
    load = case.recording.total()
    if not tokens_per_rank or not load.any():
        return ()
    # Draws with torch, which planning does not need.
    from equipoise.cli.offline.steps import balance_of_steps

    assert case.experts_per_token is not None, "checked before"
    return tuple(
        balance_of_steps(
            load, layout, tokens_per_rank=number, experts_per_token=case.experts_per_token
        )
        for number in tokens_per_rank
    )


def knee(options: Sequence[PoolOption], *, tolerance: float) -> PoolOption | None:
    """Find where more memory begins to buy little balance, among pools of one number of ranks.

    That is the option furthest above the line from the one with the least memory to the best
    (after Satopaa et al., "Finding a Kneedle in a Haystack", 2011); None if balance grows by
    at most `tolerance` or no option lies between them.
    """
    by_memory = sorted(options, key=lambda one: one.memory_bytes)
    best = max(by_memory, key=lambda one: one.worth)
    least = by_memory[0]
    between = by_memory[1 : by_memory.index(best)]
    if not between or best.worth <= least.worth + tolerance:
        return None

    def above_line(one: PoolOption) -> float:
        part = (one.memory_bytes - least.memory_bytes) / (best.memory_bytes - least.memory_bytes)
        return (one.worth - least.worth) / (best.worth - least.worth) - part

    found = max(between, key=above_line)
    return found if above_line(found) > 0 else None


def knee_text(found: PoolOption, options: Sequence[PoolOption]) -> str:
    """Say what more memory than at the knee buys."""
    best = max(options, key=lambda one: one.worth)
    more_bytes = best.memory_bytes - found.memory_bytes
    more_slots = best.num_redundant - found.num_redundant
    more_tokens = best.displaced_tokens - found.displaced_tokens
    return (
        f"{found.num_ranks} ranks: the knee is at "
        f"{format_count(found.num_redundant, 'redundant slot')}, balance {found.worth:.4f}; "
        f"{more_slots} more add {best.worth - found.worth:.4f} and take "
        f"{format_bytes(more_bytes)} per GPU, room for {more_tokens:,} tokens of context"
    )


def _by_ranks(options: Sequence[PoolOption]) -> Iterator[Sequence[PoolOption]]:
    for num_ranks in dict.fromkeys(one.num_ranks for one in options):
        yield [one for one in options if one.num_ranks == num_ranks]


def choose(
    options: Sequence[PoolOption], *, tolerance: float, memory_bytes: float | None
) -> tuple[PoolOption | None, str]:
    """Choose the best option that fits, if any, and explain why.

    Throughput per GPU grows with balancedness, and memory without experts serves the cache. So of
    the options within `tolerance` of the best, choose the one with the least memory per GPU, then
    the fewest moves, then the fewest ranks.
    """
    fitting = [one for one in options if memory_bytes is None or one.memory_bytes <= memory_bytes]
    if not fitting:
        least = min(options, key=lambda one: one.memory_bytes)
        return None, (
            f"nothing fits: the smallest need is {format_bytes(least.memory_bytes)} of experts per "
            f"GPU, with {least.num_ranks} ranks"
        )
    best = max(fitting, key=lambda one: one.worth)
    near = [one for one in fitting if one.worth >= best.worth - tolerance]
    chosen = min(near, key=lambda one: (one.memory_bytes, one.moves_per_hour or 0.0, one.num_ranks))
    kind = "balance" if chosen.balancedness_replayed is None else "replayed balance"
    reason = (
        f"choose {_describe(chosen)}: {kind} {chosen.worth:.3f} with "
        f"{format_bytes(chosen.memory_bytes)} of experts per GPU"
    )
    if chosen is best:
        rank = f", the best of {len(fitting)} options" if len(fitting) > 1 else ""
        return chosen, reason + rank
    return chosen, (
        f"{reason}, the least memory of the {len(near)} options within {tolerance:g} of the best, "
        f"{best.worth:.3f} with {format_bytes(best.memory_bytes)} ({_describe(best)})"
    )


def _describe(option: PoolOption) -> str:
    slots = format_count(option.num_redundant, "redundant slot")
    return f"{option.num_ranks} ranks with {slots}"


def _evaluated(settings: WhatIfSettings, case: Case) -> tuple[PoolOption, ...]:
    ((_, policy),) = policies_of([settings.policy or "default"]).items()
    rank_counts = numbers("--ranks", settings.ranks)
    if not rank_counts or min(rank_counts) < 1:
        raise InvalidSettingsError("--ranks must be numbers of at least 1")
    tokens_per_rank = numbers("--tokens-per-rank", settings.tokens_per_rank)
    if tokens_per_rank and not 1 <= min(tokens_per_rank) <= max(tokens_per_rank) <= MAX_TOKENS:
        raise InvalidSettingsError(f"--tokens-per-rank must be numbers from 1 to {MAX_TOKENS}")
    if tokens_per_rank and case.experts_per_token is None:
        raise InvalidSettingsError(
            "--tokens-per-rank needs the routed experts per token: --experts-per-token N"
        )
    num_experts = case.model.num_experts
    most = num_experts // 4 if settings.max_redundant is None else settings.max_redundant
    limits: dict[str, Any] = {"rank_counts": rank_counts, "max_redundant": most}
    limits["ranks_per_node"] = settings.ranks_per_node
    if settings.pooled:
        policy = replace(policy, slots=SlotUse.POOLED)
        tried = list(topologies_of_places(num_experts, num_layers=case.model.num_layers, **limits))
    else:
        tried = list(topologies(num_experts, **limits))
    if len(tried) > MAX_OPTIONS:
        raise InvalidSettingsError(
            f"{len(tried)} pools are more than {MAX_OPTIONS}: use fewer --ranks or a smaller "
            "--max-redundant"
        )
    with progress_bar(MofNCompleteColumn()) as progress:
        return tuple(
            evaluate(
                case,
                topology=topology,
                algorithm=settings.algorithm,
                policy=policy,
                window_s=settings.window_s,
                tokens_per_rank=tokens_per_rank,
            )
            for topology in progress.track(tried, description="pools")
        )


def _show(
    options: Sequence[PoolOption],
    chosen: PoolOption | None,
    knees: Sequence[PoolOption],
    reason: str,
    case: Case,
    *,
    cost: CostSettings,
) -> None:
    out = console()
    model = case.model
    out.print(
        f"{model.num_layers} layers x {model.num_experts} experts of "
        f"{format_bytes(model.expert_bytes)} ({case.expert_bytes_origin}), "
        f"{format_count(case.recording.num_windows, 'window')} of loads\n"
    )
    replayed = case.recording.num_windows > 1
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    columns = ["ranks", "redundant", "balance", "worst", "memory", "tokens"]
    columns += ["replayed", "moves/h", "bytes/h"] if replayed else []
    for name in (*columns, *cost.columns):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for one in options:
        cells = [
            str(one.num_ranks),
            str(one.num_redundant),
            f"{one.balancedness:.4f}",
            f"{one.balancedness_min_layer:.4f}",
            format_bytes(one.memory_bytes),
            f"-{one.displaced_tokens:,}" if one.displaced_tokens else "",
        ]
        if replayed:
            cells += [
                f"{one.balancedness_replayed:.4f}",
                f"{one.moves_per_hour:,.0f}",
                format_bytes(one.bytes_per_hour or 0.0),
            ]
        cells += cost.cells(cost.lost_gpus(one.worth, num_ranks=one.num_ranks))
        is_chosen = one is chosen
        table.add_row(*cells, "◀" if is_chosen else "", style="bold" if is_chosen else "")
    print_whole(table)
    if cost.is_wanted:
        out.print(f"\nGPUs lost to imbalance, {cost.basis}")
    out.print(
        "\nworst: balance of the worst layer; memory: of experts, per GPU; tokens: context that a "
        f"GPU's redundant experts displace, at {format_bytes(case.token_bytes)} each"
    )
    for one in knees:
        (of_ranks,) = (some for some in _by_ranks(options) if one in some)
        out.print(knee_text(one, of_ranks))
    out.print(f"\n{reason}")
