"""What `plan`, `replay` and `whatif` are asked in the same words. Starts nothing, reads nothing."""

from dataclasses import dataclass
from pathlib import Path

from equipoise.formats.format import Format


class ToolInputError(ValueError):
    """What a person asked of a tool cannot be done; the message names the option and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadsSettings:
    """Which loads, and of which model.

    Raises:
        ToolInputError: a value is outside its range.
    """

    loads: tuple[str, ...] = ()
    """Files of loads, with commas between them: SGLang's recorder (.pt, .json), TensorRT-LLM's
    statistics (a folder), DeepSeek's EPLB (.npz), or our own loads.json. Needed."""

    loads_format: Format | None = None
    """Format of the loads; found by what is in them unless given."""

    windows: tuple[str, ...] = ()
    """Windows to use, by name; all unless given. "code" stands for "code/0", "code/1" and so on."""

    model_config: Path | None = None
    """The model's config.json: it says groups, the first MoE layer and the size of an expert."""

    groups: int | None = None
    """Expert groups of the router, 8 in DeepSeek-V3; 1 unless this or the config says."""

    shared_expert: bool = False
    """Plan the shared expert as one routed more, numbered behind the others: every token loads it.
    It is taken to be as large as a routed one."""

    experts_per_token: int | None = None
    """Routed experts that a token chooses, 8 in DeepSeek-V3: says how many tokens load the shared
    expert, where neither the loads nor the config do."""

    first_moe_layer: int | None = None
    """Layer of the model that its first MoE layer is, 3 in DeepSeek-V3. Files that count all layers
    are understood by it, and it is needed to write them."""

    expert_bytes: int | None = None
    """Bytes of one expert in one layer; those of DeepSeek-V3 in FP8 unless this or the config
    says."""

    def __post_init__(self) -> None:
        if not self.loads:
            raise ToolInputError("say which loads: --loads FILE")
        _check_least("--groups", self.groups, 1)
        _check_least("--experts-per-token", self.experts_per_token, 1)
        if self.shared_expert and (self.groups or 1) > 1:
            raise ToolInputError(
                "--shared-expert goes without --groups: the shared expert belongs to none"
            )
        _check_least("--first-moe-layer", self.first_moe_layer, 0)
        _check_least("--expert-bytes", self.expert_bytes, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Ranks, their slots, and what is in them.

    Raises:
        ToolInputError: the number of ranks is missing.
    """

    current: Path | None = None
    """Layout in use: moves are counted from it, and what need not move stays. Without it, from the
    layout a pool starts with: experts in order."""

    current_format: Format | None = None
    """Format of the current layout; found by what is in it unless given."""

    nodes: int = 1
    """Nodes, with equally many ranks each."""

    ranks: int | None = None
    """Expert-parallel ranks, one a GPU. Needed."""

    slots: int | None = None
    """Physical slots per layer over all ranks; as few as hold all experts unless given."""

    def __post_init__(self) -> None:
        if self.ranks is None:
            raise ToolInputError("say how many ranks there are: --ranks N")


def _check_least(option: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ToolInputError(f"{option} must be at least {least}, not {value}")
