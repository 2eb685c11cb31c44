"""`Move`: one expert copied into one slot, and where its bytes come from."""

from dataclasses import dataclass

CHECKSUM_BYTES = 16
"""BLAKE2b-128 over an expert's bytes in the order gate, up, down (weights, then scales)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSource:
    """Pull the expert from a rank that holds it in the current generation."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSource:
    """Read the expert from the checkpoint; always possible, always last."""


Source = RankSource | CheckpointSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Copy logical `expert` of MoE layer `layer` into physical `slot`, verified by `checksum`."""

    layer: int
    slot: int
    expert: int
    checksum: bytes
    sources: tuple[Source, ...]
