"""Turns settings into planning's inputs: loads, model shape, ranks and current layout."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from equipoise.cli.offline.settings import PoolSettings, RecordingSettings
from equipoise.formats.errors import FormatError
from equipoise.formats.expected import Expected
from equipoise.formats.files import read_placement, read_recording
from equipoise.formats.model_config import ModelDescription, read_model_config
from equipoise.formats.recording import Recording, joined
from equipoise.planning.arrays import ExpertTable, ShareTable
from equipoise.planning.layout import Layout, used_places
from equipoise.planning.placing.twins import repair_twins
from equipoise.planning.recovery import recover
from equipoise.planning.shared_expert import shape_with_shared_expert, with_shared_expert
from equipoise.planning.topology import ModelShape, Topology
from equipoise.settings.errors import InvalidSettingsError

MAX_SLOTS = 1_000_000
"""Maximum slots per layer: fifty times the largest published pool."""

DEEPSEEK_V3_EXPERT_BYTES = 3 * (7168 * 2048 + 4 * 56 * 16)
"""Three FP8 matrices of 7168 x 2048, with a float32 scale per 128 x 128 block."""

DEEPSEEK_V3_TOKEN_BYTES = 61 * (512 + 64) * 2
"""Latents of 61 layers in bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """Recorded loads and their model."""

    recording: Recording
    """The loads."""

    model: ModelShape
    """The model's shape."""

    expert_bytes_origin: str
    """Where the model's expert size comes from, for the reader."""

    token_bytes: int
    """Bytes of a token in a GPU's cache; DeepSeek-V3's if unknown."""

    has_shared_expert: bool = False
    """Whether the last expert is the shared one, which every token activates."""

    experts_per_token: int | None = None
    """Experts that a token activates, the shared one included; None if unknown."""

    @property
    def expected(self) -> Expected:
        """The shape that a layout file of this model must have."""
        return Expected(
            num_layers=self.model.num_layers,
            num_experts=self.model.num_experts,
            first_moe_layer=self.recording.first_moe_layer,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CurrentLayout:
    """A current layout read from a file.

    Other engines may hold an expert twice on one rank; `Layout` never does.
    """

    layout: Layout
    """The layout with such duplicates replaced, and then with even shares."""

    expert_of_slot: ExpertTable
    """The table as in the file, [layers, slots]."""

    share_of_slot: ShareTable | None
    """Shares as in the file, [layers, slots]; None for even shares."""

    num_twins: int
    """Number of slots in which `layout` differs from the file. Every plan changes them."""


def read_case(settings: RecordingSettings) -> Case:
    """Read all files of loads, and the model's config if there is one.

    Raises:
        FormatError: a file is invalid.
        InvalidSettingsError: files and options contradict each other.
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
        raise InvalidSettingsError(
            f"--groups {groups} does not divide {recording.num_experts} experts"
        )
    model = ModelShape(
        num_layers=recording.num_layers,
        num_experts=recording.num_experts,
        num_groups=groups,
        expert_bytes=expert_bytes,
    )
    top_k = settings.experts_per_token or recording.top_k or (config.top_k if config else None)
    if settings.shared_expert:
        if top_k is None:
            raise InvalidSettingsError(
                "--shared-expert needs the routed experts per token: --experts-per-token N"
            )
        windows = with_shared_expert(recording.windows, top_k=top_k)
        recording = replace(recording, windows=windows)
        model = shape_with_shared_expert(model)
    return Case(
        recording=recording,
        model=model,
        expert_bytes_origin=origin,
        token_bytes=(config and config.token_bytes) or DEEPSEEK_V3_TOKEN_BYTES,
        has_shared_expert=settings.shared_expert,
        experts_per_token=None if top_k is None else top_k + settings.shared_expert,
    )


def pool_topology(settings: PoolSettings, model: ModelShape) -> Topology:
    """A pool with the same number of ranks on each node and of slots on each rank.

    Raises:
        InvalidSettingsError: ranks or slots do not divide evenly, hold too few experts, exceed
            `MAX_SLOTS` or are more per rank than experts; or places hold too few experts or exceed
            the slots.
    """
    num_nodes, num_ranks = settings.nodes, _num_ranks(settings)
    if num_ranks > MAX_SLOTS or (settings.slots or 0) > MAX_SLOTS:
        raise InvalidSettingsError(f"--ranks and --slots must be at most {MAX_SLOTS}")
    if num_ranks % num_nodes:
        raise InvalidSettingsError(
            f"--ranks {num_ranks} cannot be split evenly over --nodes {num_nodes}"
        )
    least = -(-model.num_experts // num_ranks) * num_ranks
    num_slots = least if settings.slots is None else settings.slots
    if num_slots > (most := model.num_experts * num_ranks):
        raise InvalidSettingsError(
            f"--slots {num_slots} is more than one slot per expert on each rank: use at most {most}"
        )
    if num_slots % num_ranks:
        below = num_slots // num_ranks * num_ranks
        raise InvalidSettingsError(
            f"--slots {num_slots} cannot be split evenly over --ranks {num_ranks}: use "
            f"{max(below, least)} or {max(below, least) + num_ranks}"
        )
    if num_slots < model.num_experts:
        raise InvalidSettingsError(
            f"--slots {num_slots} cannot hold {model.num_experts} experts: use {least} or more"
        )
    ranks_per_node, slots_per_rank = num_ranks // num_nodes, num_slots // num_ranks
    return Topology(
        node_of_rank=tuple(f"node{rank // ranks_per_node}" for rank in range(num_ranks)),
        slots_per_rank=slots_per_rank,
        places_of_rank=_places(settings, model, slots_per_rank=slots_per_rank),
    )


def _num_ranks(settings: PoolSettings) -> int:
    assert settings.ranks is not None, "the commands' settings require it or take a unit's"
    return settings.ranks


def _places(settings: PoolSettings, model: ModelShape, *, slots_per_rank: int) -> tuple[int, ...]:
    """Places of each rank; none if layers do not share any."""
    if not settings.places:
        return ()
    num_ranks = _num_ranks(settings)
    is_equal = len(settings.places) == 1 and settings.places[0].isdecimal()
    words = [f"{settings.places[0]}x{num_ranks}"] if is_equal else settings.places
    places = _of_ranks("--places", words, num_ranks=num_ranks, what="place")
    least, most = model.num_layers * model.num_experts, model.num_layers * slots_per_rank
    if max(places) > most:
        raise InvalidSettingsError(
            f"--places: {max(places)} of a rank must be at most {most}, one in each of "
            f"{slots_per_rank} slots (--slots / --ranks) of {model.num_layers} layers"
        )
    if sum(places) < least:
        raise InvalidSettingsError(
            f"--places: {sum(places)} of {num_ranks} ranks must be at least {least}, one for "
            f"each of {model.num_experts} experts of {model.num_layers} layers"
        )
    return places


def places_text(topology: Topology) -> str:
    """Return the places of ranks as tables name them, such as `116 places each`."""
    fewest, most = min(topology.places_of_rank), max(topology.places_of_rank)
    return f"{most} places each" if fewest == most else f"{fewest} to {most} places each"


def unequal_topology(
    settings: PoolSettings, model: ModelShape, *, slots_of_rank: Sequence[str]
) -> Topology:
    """The pool that the settings describe, with the slots per rank from items such as 9x16.

    Raises:
        InvalidSettingsError: an item is invalid, or they describe other ranks, or too few or
            too many slots.
    """
    slots = _of_ranks("--slots-of-rank", slots_of_rank, num_ranks=_num_ranks(settings), what="slot")
    if sum(slots) < model.num_experts:
        raise InvalidSettingsError(
            f"--slots-of-rank has {sum(slots)} slots, too few for {model.num_experts} experts"
        )
    if max(slots) > model.num_experts:
        raise InvalidSettingsError(
            f"--slots-of-rank gives a rank {max(slots)} slots, more than one per expert: use at "
            f"most {model.num_experts}"
        )
    even = pool_topology(replace(settings, slots=None), model)
    return replace(even, slots_per_rank=max(slots), slots_of_rank=slots)


def _of_ranks(option: str, words: Sequence[str], *, num_ranks: int, what: str) -> tuple[int, ...]:
    """A number for each rank, from items such as 9 or 9x16."""
    sizes: list[int] = []
    for word in words:
        size, _, count = word.partition("x")
        if not (size.isdecimal() and (count or "1").isdecimal()) or len(word) > 20:
            raise InvalidSettingsError(f"{option} takes items such as 9 or 9x16, not {word!r}")
        sizes += [int(size)] * min(int(count or 1), num_ranks + 1)
    if len(sizes) != num_ranks or min(sizes) < 1:
        raise InvalidSettingsError(
            f"{option} must list {num_ranks} ranks (--ranks) with at least 1 {what} each"
        )
    return tuple(sizes)


def read_current(settings: PoolSettings, *, case: Case, topology: Topology) -> CurrentLayout | None:
    """Read the current layout, if the settings name a file.

    Raises:
        FormatError: the file is invalid, or its experts, layers, ranks or slots differ.
    """
    path = settings.current
    if path is None:
        return None
    placement = read_placement(path, form=settings.current_format, expected=case.expected)
    if placement.num_slots != topology.num_slots:
        raise FormatError(
            f"{path}: {placement.num_slots} slots, but --slots is {topology.num_slots}"
        )
    if placement.num_ranks not in {None, topology.num_ranks}:
        raise FormatError(
            f"{path}: {placement.num_ranks} ranks, but --ranks is {topology.num_ranks}"
        )
    table = placement.expert_of_slot
    if topology.places_of_rank:
        used = used_places(table, first_slot=topology.first_slot)
        over = used > topology.places_of_rank
        if over.any():
            rank = int(over.argmax())
            raise FormatError(
                f"{path}: rank {rank} holds {used[rank]} experts, but --places gives it "
                f"{topology.places_of_rank[rank]}"
            )
    elif placement.has_empty_slots:
        raise FormatError(f"{path}: its layers share places: say how many with --places")
    # The load determines which duplicates are cheapest to replace.
    repaired = table
    if not placement.has_empty_slots:
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


def starting_layout(settings: PoolSettings, *, case: Case, topology: Topology) -> Layout:
    """The current layout, or what a new pool starts with if the settings name no file.

    Raises:
        FormatError: the file is invalid, or its experts, layers, ranks or slots differ.
    """
    if (current := read_current(settings, case=case, topology=topology)) is not None:
        return current.layout
    model = case.model
    return recover(
        [None] * topology.num_ranks,
        load=np.zeros((model.num_layers, model.num_experts)),
        model=model,
        topology=topology,
        committed=None,
        generation=1,
    )


def numbers(option: str, words: Sequence[str]) -> tuple[int, ...]:
    """Parse whole numbers and ranges such as 8-11.

    Raises:
        InvalidSettingsError: an item is neither.
    """
    found: list[int] = []
    for word in words:
        first, dash, last = word.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(word) > 20:
            raise InvalidSettingsError(
                f"{option} takes numbers and ranges such as 0,4-7, not {word!r}"
            )
        end = int(last or first)
        if not int(first) <= end <= int(first) + 100_000:
            raise InvalidSettingsError(f"{option}: {word} is not a valid range")
        found += range(int(first), end + 1)
    return tuple(dict.fromkeys(found))


def _labelled(files: Sequence[str]) -> dict[str, Path]:
    """Paths by stem, or by full path where stems repeat."""
    paths = [Path(file) for file in dict.fromkeys(files)]
    stems = [path.stem for path in paths]
    return {path.stem if stems.count(path.stem) == 1 else str(path): path for path in paths}


def _expert_bytes(settings: RecordingSettings, config: ModelDescription | None) -> tuple[int, str]:
    if settings.expert_bytes is not None:
        return settings.expert_bytes, "from --expert-bytes"
    if config is not None:
        return config.expert_bytes, "from the model config"
    return DEEPSEEK_V3_EXPERT_BYTES, "DeepSeek-V3 in FP8; use --model-config for another model"
