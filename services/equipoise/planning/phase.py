"""`Phase` of inference."""

from enum import StrEnum


class Phase(StrEnum):
    """Phase of inference; prefill and decode load experts differently."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
