"""The nested objects of a `ModelConfig`: rotary embedding and FP8 weights.

Knows how `config.json` spells them, in its old and new form, and has the checks of single values
that `config` shares.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints


class UnsupportedConfigError(ValueError):
    """This model cannot run a config faithfully; the message names the field and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: plain (`factor` is None) or YaRN (arXiv 2309.00071).

    Field names are those of Hugging Face's `rope_parameters`. `original_max_position_embeddings` is
    the context length, in tokens, before YaRN extended it by `factor`.
    """

    rope_theta: float = 10_000.0
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        require(self, "rope_theta", self.rope_theta > 1, "a number above 1")
        if self.factor is None:
            return
        check = partial(require, self, prefix="rope ")
        check("factor", self.factor >= 1, "at least 1")
        original = self.original_max_position_embeddings or 0
        check("original_max_position_embeddings", original >= 1, "the context length before YaRN")
        wanted = f"at least beta_slow ({self.beta_slow})"
        check("beta_fast", self.beta_fast >= self.beta_slow > 0, wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Config:
    """Linear maps stored as E4M3 codes with a float32 scale for every 128 x 128 block."""

    scale_fmt: str | None = None
    """None for any float32 scales (DeepSeek-V3), "ue8m0" for powers of two (V3.1)."""

    def __post_init__(self) -> None:
        known, wanted = self.scale_fmt in (None, "ue8m0"), "null, 'float' or 'ue8m0'"
        require(self, "scale_fmt", known, wanted, prefix="quantization_config ")


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's magnitude correction for a context extended by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def read_rope(rest: dict[str, Any]) -> RopeConfig:
    """Pop the rotary fields of either form from `rest`.

    Raises:
        UnsupportedConfigError: a field is unknown, or its type or value is not supported.
    """
    old = rest.pop("rope_scaling", None)
    new = rest.pop("rope_parameters", None)
    theta = rest.pop("rope_theta", None)
    given = new or old or {}
    if not isinstance(given, Mapping):
        raise UnsupportedConfigError(f"rope_parameters = {given!r} is not a JSON object")
    values = dict(given)
    new_kind, old_kind = values.pop("rope_type", None), values.pop("type", None)
    kind = new_kind or old_kind or "default"
    if kind not in ("default", "yarn") or old_kind not in (None, kind):
        raise UnsupportedConfigError(
            f"rope type {kind!r} is not supported: only 'default' and 'yarn' are"
        )
    if theta is not None:
        values.setdefault("rope_theta", theta)
    unknown = sorted(values.keys() - set(_ROPE_FIELDS))
    if unknown:
        raise UnsupportedConfigError(
            f"rope field {unknown[0]!r} = {values[unknown[0]]!r} is unknown"
        )
    if kind == "yarn":
        if values.get("factor") is None:
            raise UnsupportedConfigError("rope factor is missing: yarn needs it")
        values.setdefault("original_max_position_embeddings", rest.get("max_position_embeddings"))
    else:
        values = {name: values[name] for name in ("rope_theta",) if name in values}
    present = {name: value for name, value in values.items() if value is not None}
    hints = get_type_hints(RopeConfig)
    for name, value in present.items():
        check_type(f"rope {name}", value, hints[name])
    return RopeConfig(**present)


def rope_to_dict(rope: RopeConfig) -> dict[str, Any]:
    """The new form of the rotary fields."""
    if rope.factor is None:
        return {"rope_type": "default", "rope_theta": rope.rope_theta}
    values = {name: getattr(rope, name) for name in _ROPE_FIELDS}
    return {"rope_type": "yarn"} | {name: v for name, v in values.items() if v is not None}


def read_fp8(given: object) -> Fp8Config | None:
    """Parse `quantization_config`.

    Raises:
        UnsupportedConfigError: it describes another kind of weights, or has an unknown field.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise UnsupportedConfigError(f"quantization_config = {given!r} is not a JSON object")
    for name in sorted(_FP8_REQUIRED - given.keys()):
        raise UnsupportedConfigError(f"quantization_config {name} is missing")
    for name in sorted(given.keys() - {"scale_fmt"}):
        if name not in _FP8_FIXED:
            raise UnsupportedConfigError(
                f"quantization_config field {name!r} = {given[name]!r} is unknown"
            )
        allowed = _FP8_FIXED[name]
        value = list(given[name]) if isinstance(given[name], tuple) else given[name]
        if value not in allowed:
            raise UnsupportedConfigError(
                f"quantization_config {name} = {given[name]!r} is not supported: only "
                f"{allowed[0]!r} is"
            )
    scale_fmt = given.get("scale_fmt")
    return Fp8Config(scale_fmt=None if scale_fmt == "float" else scale_fmt)


def fp8_to_dict(fp8: Fp8Config) -> dict[str, Any]:
    """The published form of `quantization_config`."""
    values = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    return values if fp8.scale_fmt is None else values | {"scale_fmt": fp8.scale_fmt}


def require(config: object, name: str, condition: bool, wanted: str, *, prefix: str = "") -> None:
    """Raise UnsupportedConfigError with the field's name and value unless a condition holds."""
    _require(f"{prefix}{name}", getattr(config, name), condition, wanted)


def _require(name: str, value: object, condition: bool, wanted: str) -> None:
    if not condition:
        raise UnsupportedConfigError(f"{name} = {value!r} is not supported: it must be {wanted}")


def check_type(name: str, value: object, hint: Any) -> None:
    """Reject a JSON value of the wrong type for its field; an integer is accepted for a float."""
    allowed = [get_origin(one) or one for one in get_args(hint) or (hint,)]
    if isinstance(value, tuple) and tuple in allowed:
        for one in value:
            check_type(name, one, int)
    good = type(value) in allowed or (type(value) is int and float in allowed)
    if isinstance(value, float) and not math.isfinite(value):
        good = False
    names = ["null" if kind is NoneType else kind.__name__ for kind in allowed]
    _require(name, value, good, f"of type {' or '.join(names)}")


_ROPE_FIELDS = tuple(f.name for f in fields(RopeConfig))

_FP8_REQUIRED = {"quant_method", "weight_block_size"}

# Fields with one supported meaning; the first is the one written.
_FP8_FIXED: dict[str, list[object]] = {
    "quant_method": ["fp8"],
    "weight_block_size": [[128, 128]],
    "activation_scheme": ["dynamic"],
    "fmt": ["e4m3"],
    "dequantize": [False, True],
    "expert_dtype": ["fp8"],
    "modules_to_convert": [None, []],
    # The head is always in BF16.
    "modules_to_not_convert": [None, [], ["lm_head"]],
}
