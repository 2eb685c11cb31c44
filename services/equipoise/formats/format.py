"""`Format`: the supported file formats."""

from enum import StrEnum


class Format(StrEnum):
    """A supported file format; most have one form for loads and another for layouts."""

    EQUIPOISE = "equipoise"
    """Equipoise's own JSON for loads (windows by domain) and layouts."""

    SGLANG = "sglang"
    """Loads: a recorder's `stat` file, .pt or .json. Layouts: JSON for --init-expert-location."""

    VLLM = "vllm"
    """Layouts: a JSON list [slots], or [layers][slots]."""

    VLLM_ASCEND = "vllm-ascend"
    """Layouts: expert_map.json."""

    TENSORRT_LLM = "tensorrt-llm"
    """Loads: a folder of statistics. Layouts: the YAML of its load balancer."""

    DEEPSEEK = "deepseek"
    """Loads and layouts: the tensors of DeepSeek's EPLB, as .npz."""
