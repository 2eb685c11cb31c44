"""What a slice's name says: communication, experts, attention, a layer, a step."""

import re
from dataclasses import dataclass
from enum import StrEnum

from equipoise.settings.errors import InvalidSettingsError

COMMUNICATION = (
    r"nccl|rccl|mscclpp|nvshmem|deep_?ep|::ep::(internode|intranode)|inter_?node::|intra_?node::"
    r"|internode_ll|all_?to_?all|all_?reduce|all_?gather|reduce_?scatter|cross_device_reduce"
    r"|memcpy ptop|gloo:|c10d::|record_param_comms|equipoise[.]exchange"
)
"""Names of communication in traces of NCCL, RCCL, DeepEP, NVSHMEM, MSCCL++, vLLM, SGLang, gloo."""

EXPERTS = r"moe|expert|m_?grouped|group(ed)?_?gemm"
"""Names of the experts' computation: grouped GEMMs, fused MoE kernels, ranges of MoE blocks."""

ATTENTION = r"attention|attn|flash|fmha|mla_|::mla"

_LAYER = re.compile(r"\blayers?[ ._#:]?(\d{1,4})\b", re.IGNORECASE)
_STEP = re.compile(r"^(profilerstep\b|equipoise[.]step\b)", re.IGNORECASE)


class Part(StrEnum):
    """A part of a model."""

    EXPERTS = "experts"
    ATTENTION = "attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What one name says."""

    is_communication: bool
    part: Part | None
    layer: int | None
    is_step: bool


class Names:
    """Reads names, and remembers what recent ones say.

    Args:
        communication: regular expression of names of communication; case is ignored.
        experts: the same for computation of experts.

    Raises:
        InvalidSettingsError: an expression is invalid.
    """

    def __init__(self, *, communication: str = COMMUNICATION, experts: str = EXPERTS) -> None:
        self._communication = _compiled("--communication", communication)
        self._parts = {
            Part.EXPERTS: _compiled("--experts", experts),
            Part.ATTENTION: _compiled("attention", ATTENTION),
        }
        self._known: dict[str, Meaning] = {}
        self._known_chars = 0

    def __getitem__(self, name: str) -> Meaning:
        known = self._known.get(name)
        if known is None:
            if self._known_chars > _MAX_KNOWN_CHARS:
                self._known.clear()
                self._known_chars = 0
            self._known_chars += len(name) + _CHARS_PER_MEANING
            known = self._known[name] = self._read(name)
        return known

    def _read(self, name: str) -> Meaning:
        is_communication = self._communication.search(name) is not None
        parts = (part for part, words in self._parts.items() if words.search(name))
        layer = _LAYER.search(name)
        return Meaning(
            is_communication=is_communication,
            part=None if is_communication else next(parts, None),
            layer=None if layer is None else int(layer[1]),
            is_step=_STEP.search(name) is not None,
        )


_MAX_KNOWN_CHARS = 2**22
"""A character needs up to 4 bytes."""
_CHARS_PER_MEANING = 200
"""What a name needs besides its characters, in characters."""


def _compiled(option: str, pattern: str) -> re.Pattern[str]:
    if not pattern:
        raise InvalidSettingsError(f"{option} must not be empty: that would match every name")
    try:
        return re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise InvalidSettingsError(
            f"{option} is not a regular expression: {error}: {pattern!r}"
        ) from None
