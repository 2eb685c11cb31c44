"""`BalancePolicy`: the form of a policy file, generated from the fields of `Policy`."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    create_model,
)

from equipoise.policy.setting import SETTINGS, Setting

API_VERSION = "equipoise.dev/v1alpha1"
KIND = "BalancePolicy"

PoolName = Annotated[str, Field(min_length=1, max_length=253)]

_SECTIONS = {
    "averages": "Averages of the load, and the detection of shifts.",
    "planning": "How to make a layout.",
    "judging": "What a plan must gain, and what it is assumed to cost.",
    "waves": "How much of a plan to roll out at a time.",
    "rollback": "When to roll back a layout that missed its expected gain.",
    "slowWorker": "Which workers count as slow, and what to do about them.",
    "timeouts": "The timeout of every wait. `equipoise status` shows which ones were reached.",
}


class Section(BaseModel):
    """Some values of a policy. Unknown keys are faults, missing ones have their default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def written(self) -> dict[str, Any]:
        """The values that the file contains, by field of `Policy`; no defaults."""
        found: dict[str, Any] = {}
        for key in self.model_fields_set:
            value = getattr(self, key)
            if isinstance(value, Section):
                found |= value.written()
            elif settings := type(self).model_fields[key].metadata:
                found[settings[0].name] = value
        return found


def _section(name: str, about: str, members: dict[str, Setting | type[Section]]) -> type[Section]:
    values: dict[str, Any] = {}
    for key, member in members.items():
        if isinstance(member, Setting):
            described = Field(
                default=member.initial,
                description=member.explanation,
                json_schema_extra={"default": member.default},
            )
            form = PlainValidator(member.checked), WithJsonSchema(member.json_schema)
            values[key] = (Annotated[Any, member, *form], described)
        else:
            values[key] = (member, Field(default_factory=member))
    return create_model(name, __base__=Section, __doc__=about, **values)


def _pool_policy() -> type[Section]:
    members: dict[str, Any] = {}
    for one in SETTINGS:
        section, _, key = one.path.rpartition(".")
        (members.setdefault(section, {}) if section else members)[key] = one
    for name, about in _SECTIONS.items():
        members[name] = _section(name[0].upper() + name[1:], about, members[name])
    return _section("PoolPolicy", "Every value that can be set for a pool.", members)


if TYPE_CHECKING:  # Type checkers do not know generated classes.
    PoolPolicy = Section
else:
    PoolPolicy = _pool_policy()


class PoolOverride(PoolPolicy):
    """Values of the pool with this name, or of all pools that serve `phase`."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    phase: Literal["prefill", "decode", "mixed"] | None = None
    """Phase of the pools that these values are for, whatever their names, except pools that have an
    entry of their own. Default: the values are for the pool with the entry's name."""


class BalancePolicy(Section):
    """How loads become layouts: for all pools, and what differs for single pools."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    apiVersion: Literal["equipoise.dev/v1alpha1"]
    """Version of this file's form."""

    kind: Literal["BalancePolicy"]
    """Kind of this file."""

    defaults: PoolPolicy = Field(default_factory=PoolPolicy)
    """Values for every pool."""

    pools: dict[PoolName, PoolOverride] = Field(default_factory=dict)
    """Values that differ from the defaults, by pool name or by phase."""
