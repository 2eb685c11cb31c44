"""From settings to what planning works on: loads, a model's shape, ranks, the layout in use.

Reads files by `equipoise.formats`, and says in words what does not fit together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from equipoise.cli.offline.settings import LoadsSettings, PoolSettings, ToolInputError
from equipoise.formats.errors import FormatError
from equipoise.formats.expected import Expected
from equipoise.formats.files import read_placement, read_recording
from equipoise.formats.model_config import ModelConfig, read_model_config
from equipoise.formats.recording import Recording, joined
from equipoise.planning.arrays import ExpertTable, ShareTable
from equipoise.planning.layout import Layout
from equipoise.planning.placing.twins import repair_twins
from equipoise.planning.shared_expert import shape_with_shared_expert, with_shared_expert
from equipoise.planning.topology import ModelShape, Topology

MAX_SLOTS = 1_000_000
"""Slots per layer: fifty times those of the largest pool that anybody has described."""

DEEPSEEK_V3_EXPERT_BYTES = 3 * (7168 * 2048 + 4 * 56 * 16)
"""Three FP8 matrices of 7168 x 2048, and a float32 scale for each block of 128 x 128."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """Loads and the model they are of; `expert_bytes_origin` says where that size comes from.

    With `has_shared_expert`, the last expert is the one that every token loads.
    """

    recording: Recording
    model: ModelShape
    expert_bytes_origin: str
    has_shared_expert: bool = False

    @property
    def expected(self) -> Expected:
        """What a layout of this model must agree with."""
        return Expected(
            num_layers=self.model.num_layers,
            num_experts=self.model.num_experts,
            first_moe_layer=self.recording.first_moe_layer,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CurrentLayout:
    """A layout in use. `expert_of_slot`, [layers, slots], is what the file says.

    Peers may hold an expert twice on a rank, which `Layout` never does; then `layout` differs in
    `num_twins` slots, which every plan has to change anyway, and splits evenly.
    `share_of_slot`, of the same shape, is None for even splits.
    """

    layout: Layout
    expert_of_slot: ExpertTable
    share_of_slot: ShareTable | None
    num_twins: int


def read_case(settings: LoadsSettings) -> Case:
    """Read all files of loads, and the model's config if there is one.

    Raises:
        FormatError: a file cannot be used.
        ToolInputError: files and options contradict each other.
    """
    config = None if settings.model_config is None else read_model_config(settings.model_config)
    first_moe_layer = settings.first_moe_layer
    if first_moe_layer is None and config is not None:
        first_moe_layer = config.first_moe_layer
    recordings = {
        label: read_recording(
            path,
            form=settings.loads_format,
            num_experts=None if config is None else config.num_experts,
            first_moe_layer=first_moe_layer,
        )
        for label, path in _labelled(settings.loads).items()
    }
    (recording,) = recordings.values() if len(recordings) == 1 else (joined(recordings),)
    if settings.windows:
        recording = recording.only(settings.windows)
    expert_bytes, origin = _expert_bytes(settings, config)
    groups = settings.groups or (config.num_groups if config else 1)
    if recording.num_experts % groups:
        raise ToolInputError(
            f"--groups {groups}: {recording.num_experts} experts do not divide into {groups} groups"
        )
    model = ModelShape(
        num_layers=recording.num_layers,
        num_experts=recording.num_experts,
        num_groups=groups,
        expert_bytes=expert_bytes,
    )
    if settings.shared_expert:
        top_k = settings.experts_per_token or recording.top_k or (config.top_k if config else None)
        if top_k is None:
            raise ToolInputError(
                "--shared-expert: say how many routed experts a token chooses: --experts-per-token"
            )
        windows = with_shared_expert(recording.windows, top_k=top_k)
        recording = replace(recording, windows=windows)
        model = shape_with_shared_expert(model)
    return Case(
        recording=recording,
        model=model,
        expert_bytes_origin=origin,
        has_shared_expert=settings.shared_expert,
    )


def topology_of(
    model: ModelShape, *, num_nodes: int, num_ranks: int, num_slots: int | None
) -> Topology:
    """Ranks in equal shares on nodes, and slots in equal shares on ranks.

    Without `num_slots`, there are as few as hold all experts.

    Raises:
        ToolInputError: they do not divide, do not hold all experts, or are absurdly many.
    """
    if num_ranks > MAX_SLOTS or (num_slots or 0) > MAX_SLOTS:
        raise ToolInputError(f"--ranks and --slots go up to {MAX_SLOTS}")
    if num_ranks < 1 or num_nodes < 1 or num_ranks % num_nodes:
        raise ToolInputError(f"--ranks {num_ranks} do not divide over --nodes {num_nodes}")
    least = -(-model.num_experts // num_ranks) * num_ranks
    num_slots = least if num_slots is None else num_slots
    if num_slots < 1 or num_slots % num_ranks:
        below = num_slots // num_ranks * num_ranks
        raise ToolInputError(
            f"--slots {num_slots} do not divide over --ranks {num_ranks}: take "
            f"{max(below, least)} or {max(below, least) + num_ranks}"
        )
    if num_slots < model.num_experts:
        raise ToolInputError(
            f"--slots {num_slots} cannot hold {model.num_experts} experts: take {least} or more"
        )
    ranks_per_node = num_ranks // num_nodes
    return Topology(
        node_of_rank=tuple(f"node{rank // ranks_per_node}" for rank in range(num_ranks)),
        slots_per_rank=num_slots // num_ranks,
    )


def pool_topology(settings: PoolSettings, model: ModelShape) -> Topology:
    """The ranks that a pool's settings name.

    Raises:
        ToolInputError: they do not divide, or do not hold all experts.
    """
    assert settings.ranks is not None, "settings check it"
    return topology_of(
        model, num_nodes=settings.nodes, num_ranks=settings.ranks, num_slots=settings.slots
    )


def unequal_topology(
    settings: PoolSettings, model: ModelShape, *, slots_of_rank: Sequence[str]
) -> Topology:
    """The ranks that a pool's settings name, with the slots that words such as 9x16 say.

    Raises:
        ToolInputError: a word is none, or they name another number of ranks or too few slots.
    """
    assert settings.ranks is not None, "settings check it"
    slots: list[int] = []
    for word in slots_of_rank:
        size, _, count = word.partition("x")
        if not (size.isdecimal() and (count or "1").isdecimal()) or len(word) > 20:
            raise ToolInputError(f"--slots-of-rank must be such as 9 or 9x16, not {word!r}")
        slots += [int(size)] * min(int(count or 1), settings.ranks + 1)
    if len(slots) != settings.ranks or min(slots) < 1:
        raise ToolInputError(
            f"--slots-of-rank must give each of --ranks {settings.ranks} at least 1 slot"
        )
    if sum(slots) < model.num_experts:
        raise ToolInputError(
            f"--slots-of-rank has {sum(slots)} slots, too few for {model.num_experts} experts"
        )
    even = topology_of(model, num_nodes=settings.nodes, num_ranks=settings.ranks, num_slots=None)
    return replace(even, slots_per_rank=max(slots), slots_of_rank=tuple(slots))


def read_current(settings: PoolSettings, *, case: Case, topology: Topology) -> CurrentLayout | None:
    """Read the layout in use, or None if none is named.

    Raises:
        FormatError: the file cannot be used, or is of other experts, layers, ranks or slots.
    """
    path = settings.current
    if path is None:
        return None
    placement = read_placement(path, form=settings.current_format, expected=case.expected)
    if placement.num_slots != topology.num_slots:
        raise FormatError(
            f"{path}: it has {placement.num_slots} slots, --slots says {topology.num_slots}"
        )
    if placement.num_ranks not in {None, topology.num_ranks}:
        raise FormatError(
            f"{path}: it has {placement.num_ranks} ranks, --ranks says {topology.num_ranks}"
        )
    table = placement.expert_of_slot
    # The load says which twins are cheapest to swap away.
    repaired = repair_twins(table, load=case.recording.total(), num_ranks=topology.num_ranks)
    num_twins = int(np.count_nonzero(repaired != table))
    layout = Layout(
        generation=1,
        num_experts=placement.num_experts,
        num_ranks=topology.num_ranks,
        expert_of_slot=repaired,
        share_of_slot=None if num_twins else placement.share_of_slot,
    )
    return CurrentLayout(
        layout=layout,
        expert_of_slot=table,
        share_of_slot=placement.share_of_slot,
        num_twins=num_twins,
    )


def numbers(option: str, words: Sequence[str]) -> tuple[int, ...]:
    """Whole numbers and ranges such as 8-11, of an option with commas.

    Raises:
        ToolInputError: a word is neither.
    """
    found: list[int] = []
    for word in words:
        first, dash, last = word.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(word) > 20:
            raise ToolInputError(f"{option} must be numbers or ranges such as 0,4-7, not {word!r}")
        end = int(last or first)
        if not int(first) <= end <= int(first) + 100_000:
            raise ToolInputError(f"{option}: {word} is no range")
        found += range(int(first), end + 1)
    return tuple(dict.fromkeys(found))


def _labelled(files: Sequence[str]) -> dict[str, Path]:
    """Paths by their stems, or by the whole where two have one stem."""
    paths = [Path(file) for file in dict.fromkeys(files)]
    stems = [path.stem for path in paths]
    return {path.stem if stems.count(path.stem) == 1 else str(path): path for path in paths}


def _expert_bytes(settings: LoadsSettings, config: ModelConfig | None) -> tuple[int, str]:
    if settings.expert_bytes is not None:
        return settings.expert_bytes, "as given"
    if config is not None:
        return config.expert_bytes, "by the model's config"
    return DEEPSEEK_V3_EXPERT_BYTES, "DeepSeek-V3's in FP8; for another model say --model-config"
